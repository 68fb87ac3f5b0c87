"""The steps of a decoder layer between its attention calls: one function each, one implementation per device."""
