"""What the fields of a record are called and how they are shown: stated once, in their types. Used by all that prints.

    @dataclass(frozen=True, slots=True)
    class Need:                                       # show.tables.table(Need, "needs", "What N need", rows)
        at: str                                       # no words: the header is the name without num_ and _id
        num_tokens: int                               # int 1,234; float 1,234.56; bool yes; Bytes, Share, Seconds
        most: Annotated[float, "at once", whole]      # a text is the header, a function the format, Means the meaning
        shared: Annotated[int, ...] | UnsetType = UNSET  # UNSET in all rows: no column, and not in JSON

The name is the key in JSON and CSV, the order that of the fields; `show.tables.table` chooses columns by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from msgspec import UNSET, UnsetType

from pagedcli.printable import byte_text, percent_text, seconds_text

ColumnKind = Literal["int", "float", "text", "bool", "ints", "texts"]


def text(value: object) -> str:
    """The value as text; yes or no for booleans."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def count(value: float) -> str:
    """1,234"""
    return f"{value:,.0f}"


def decimal(value: float) -> str:
    """1,234.56"""
    return f"{value:,.2f}"


def number(value: float) -> str:
    """1,234, or 1,234.56 if it is not whole"""
    return count(value) if value == value // 1 else decimal(value)


def whole(value: float) -> str:
    """1,234 of 1,234.56, for what comes in whole units: requests that are served at once."""
    return f"{int(value):,}"


percent = percent_text  # 21.3 %


def size(num_bytes: float) -> str:
    """28.00 MiB"""
    return byte_text(num_bytes, digits=2)


def hash_text(block_hash: int | None) -> str | None:
    """A hash as everything shows it: 16 hexadecimal digits."""
    return None if block_hash is None else f"{block_hash:016x}"


@dataclass(frozen=True, slots=True)
class Means:
    """The meaning of a field, as the docs and the help give it, and its unit where the name has none."""

    text: str
    unit: str = ""


class Align(Enum):
    """Where a column stands, if not by its type: numbers to the right, all else to the left."""

    LEFT = "left"
    RIGHT = "right"


LEFT, RIGHT = Align.LEFT, Align.RIGHT
Bytes = Annotated[int, size]
Share = Annotated[float, percent]
Seconds = Annotated[float, seconds_text]
Whole = Annotated[float, whole]


@dataclass(frozen=True, slots=True)
class Column:
    """One column. Values that are None or absent show as '-', and are empty in CSV."""

    key: str  # plain key in JSON and CSV, e.g. "block_bytes"
    header: str  # readable, with the unit
    show: Callable[[Any], str] = text
    words: bool = False  # left-aligned although it has its own `show`
    kind: ColumnKind = "text"
    meaning: str = ""
    unit: str = ""

    @property
    def is_number(self) -> bool:
        return self.show is not text and not self.words


def computed(read: Callable[[Any], Any]) -> Any:
    """A field whose value is computed when it is read. Only for classes that are no dataclasses."""
    return property(read)


def columns_of(record: type) -> dict[str, Column]:
    """The columns of a record's public fields, by name."""
    return _columns_of(record)


@cache
def _columns_of(record: Any) -> dict[str, Column]:
    hints = get_type_hints(record, include_extras=True)
    fields = {name: hint for name, hint in hints.items() if name[0] != "_" and ClassVar not in (hint, get_origin(hint))}
    return {name: _column(name, hint) for name, hint in fields.items()}


def as_row(record: object) -> dict[str, Any]:
    """The record with plain keys, without what is UNSET. A field `class_` has the key `class`."""
    values = ((name.removesuffix("_"), getattr(record, name)) for name in columns_of(type(record)))
    return {name: value for name, value in values if value is not UNSET}


_KINDS: dict[Any, ColumnKind] = {bool: "bool", int: "int", float: "float"}
_SHOWN: dict[ColumnKind, Callable[[Any], str]] = {"int": count, "float": decimal}


def _column(name: str, hint: Any) -> Column:
    base, notes = _unwrapped(hint)
    kind = _KINDS.get(base, "text")
    if get_origin(base) in (list, tuple):
        kind = "ints" if int in [_unwrapped(each)[0] for each in get_args(base)] else "texts"
    words = [note for note in notes if isinstance(note, str)]
    formats = [note for note in notes if callable(note)]
    means = next((note for note in notes if isinstance(note, Means)), Means(""))
    show = formats[-1] if formats else _SHOWN.get(kind, text)
    is_number = RIGHT in notes or (kind in _SHOWN and LEFT not in notes)
    if is_number and show is text:  # Aligned to the right anyway; an int with the format `text` stays left.
        show, is_number = (str, True) if RIGHT in notes else (text, False)
    header = words[-1] if words else name.removeprefix("num_").removesuffix("_id").replace("_", " ")
    return Column(name, header, show, not is_number, kind, means.text, means.unit)


def _unwrapped(hint: Any) -> tuple[Any, list[Any]]:
    """The type without None and UNSET, and what is said about it; of several types `object`."""
    if get_origin(hint) is Annotated:
        base, notes = _unwrapped(get_args(hint)[0])
        return base, [*notes, *hint.__metadata__]
    options = [each for each in get_args(hint) if each not in (NoneType, UnsetType)]
    if get_origin(hint) in (list, tuple, dict, Literal) or not options:
        return hint, []
    return _unwrapped(options[0]) if len(options) == 1 else (object, [])
