"""Conditions on sequences: `waited>10 state=running | story`. Used by the filter of the application's list."""

import re
from collections.abc import Callable

from pagedcli.errors import UsageError
from pagedcli.records import Column
from pagedcli.views.rows import SequenceRow, chosen

Condition = Callable[[SequenceRow], bool]


def fields() -> dict[str, Column]:
    """What a condition may ask of a sequence."""
    return {column.header: column for column in chosen(SequenceRow, "filter")}


def grammar() -> str:
    """The fields and signs in one line."""
    return "fields: " + ", ".join(fields()) + "; = != > >= < <=; a space means and, | means or, ! means not"


_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": lambda a, b: a >= b, "<=": lambda a, b: a <= b, "!=": lambda a, b: a != b,
    ">": lambda a, b: a > b, "<": lambda a, b: a < b, "=": lambda a, b: a == b,
}  # fmt: skip
_TERM = re.compile(r"([a-z_]+)(>=|<=|!=|==|>|<|=)(\S*)", re.IGNORECASE)


def parse(text: str) -> Condition:
    """The condition that a text states: alternatives between `|`, each of terms that must all hold. A term compares a
    field, or is text that the sequence's number, request or state contains. `!` negates a term.

    Raises: UsageError for an unknown field, a field of numbers compared with text, or text compared by size.
    """
    alternatives = [[_term(word) for word in part.split()] for part in text.split("|")]

    return lambda row: any(all(term(row) for term in terms) for terms in alternatives)


def _term(word: str) -> Condition:
    if word.startswith("!") and len(word) > 1:
        denied = _term(word[1:])
        return lambda row: not denied(row)
    compared = _TERM.fullmatch(word)
    if compared is None:
        wanted = word.lower()
        return lambda row: wanted in f"{row.seq_id} {row.label} {row.status}".lower()
    name, sign, operand = compared[1].lower(), compared[2].replace("==", "="), compared[3]
    field = fields().get(name)
    if field is None:
        raise UsageError(f"there is no field {compared[1]!r}", hint="use " + ", ".join(fields()))
    return (_text_term if field.kind == "text" else _number_term)(name, field.key, sign, operand)


def _text_term(name: str, key: str, sign: str, operand: str) -> Condition:
    if sign not in ("=", "!="):
        raise UsageError(f"{name} is text: compare it by = or !=")
    wanted, equal = operand.lower(), sign == "="
    if name == "state" and wanted == "running":
        return lambda row: bool(row.running) == equal
    return lambda row: (str(getattr(row, key) or "").lower() == wanted) == equal


def _number_term(name: str, key: str, sign: str, operand: str) -> Condition:
    try:
        bound = float(operand.replace(",", ""))
    except ValueError:
        raise UsageError(f"{name} is compared with a number, not {operand!r}") from None
    compare = _COMPARE[sign]
    return lambda row: compare(float(getattr(row, key)), bound)
