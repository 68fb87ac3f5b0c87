"""What mixes the tokens of a layer: a file for each kind, with its record, tensors, state and share of a rank."""
