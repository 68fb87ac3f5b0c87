"""Conditions on sequences: `waited>10 state=running | story`. Used by the filter of the application's list."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from pagedcli.errors import UsageError
from pagedcli.trace.state import SeqState

Value = Callable[[SeqState, int | None], int | str]
Condition = Callable[[SeqState, int | None], bool]  # of a sequence at a step


@dataclass(frozen=True, slots=True)
class Field:
    """What a condition may ask of a sequence."""

    value: Value
    meaning: str


FIELDS = {
    "seq": Field(lambda seq, _: seq.seq_id, "its number"),
    "request": Field(lambda seq, _: seq.label, "the request's id"),
    "sample": Field(lambda seq, _: seq.sample_index, "which sample of the request"),
    "state": Field(
        lambda seq, _: seq.status, "waiting, prefill, decode, preempted, finished; running: prefill or decode"
    ),
    "end": Field(lambda seq, _: seq.finish_reason or "", "why it finished: stop, length, ..."),
    "tokens": Field(lambda seq, _: seq.num_tokens, "tokens of prompt and answer"),
    "computed": Field(lambda seq, _: seq.num_computed_tokens, "tokens in the cache"),
    "prompt": Field(lambda seq, _: seq.num_prompt_tokens, "prompt tokens"),
    "out": Field(lambda seq, _: seq.num_output_tokens, "generated tokens"),
    "cached": Field(lambda seq, _: seq.num_cached_tokens, "tokens that its last lookup found"),
    "blocks": Field(lambda seq, _: len(seq.held_block_ids), "blocks that it holds"),
    "waited": Field(lambda seq, step: seq.num_steps_waited(step), "steps spent waiting"),
    "preempted": Field(lambda seq, _: seq.num_preemptions, "times it was preempted"),
    "recomputed": Field(lambda seq, _: seq.num_recomputed_tokens, "tokens computed again"),
}
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": lambda a, b: a >= b, "<=": lambda a, b: a <= b, "!=": lambda a, b: a != b,
    ">": lambda a, b: a > b, "<": lambda a, b: a < b, "=": lambda a, b: a == b,
}  # fmt: skip
_TERM = re.compile(r"([a-z_]+)(>=|<=|!=|==|>|<|=)(\S*)", re.IGNORECASE)
GRAMMAR = "fields: " + ", ".join(FIELDS) + "; = != > >= < <=; a space means and, | means or, ! means not"


def parse(text: str) -> Condition:
    """The condition that a text states: alternatives between `|`, each of terms that must all hold. A term compares a
    field, or is text that the sequence's number, request or state contains. `!` negates a term.

    Raises: UsageError for an unknown field, a field of numbers compared with text, or text compared by size.
    """
    alternatives = [[_term(word) for word in part.split()] for part in text.split("|")]

    def holds(seq: SeqState, step: int | None) -> bool:
        return any(all(term(seq, step) for term in terms) for terms in alternatives)

    return holds


def _term(word: str) -> Condition:
    if word.startswith("!") and len(word) > 1:
        denied = _term(word[1:])
        return lambda seq, step: not denied(seq, step)
    compared = _TERM.fullmatch(word)
    if compared is None:
        wanted = word.lower()
        return lambda seq, _: wanted in f"{seq.seq_id} {seq.label} {seq.status}".lower()
    name, sign, operand = compared[1].lower(), compared[2].replace("==", "="), compared[3]
    field = FIELDS.get(name)
    if field is None:
        raise UsageError(f"there is no field {compared[1]!r}", hint="use " + ", ".join(FIELDS))
    return _text_term(name, field, sign, operand) if name in _TEXTS else _number_term(name, field, sign, operand)


_TEXTS = ("request", "state", "end")


def _text_term(name: str, field: Field, sign: str, operand: str) -> Condition:
    if sign not in ("=", "!="):
        raise UsageError(f"{name} is text: compare it by = or !=")
    wanted, equal = operand.lower(), sign == "="
    if name == "state" and wanted == "running":
        return lambda seq, _: seq.running == equal
    return lambda seq, step: (str(field.value(seq, step)).lower() == wanted) == equal


def _number_term(name: str, field: Field, sign: str, operand: str) -> Condition:
    try:
        bound = float(operand.replace(",", ""))
    except ValueError:
        raise UsageError(f"{name} is compared with a number, not {operand!r}") from None
    compare = _COMPARE[sign]
    return lambda seq, step: compare(float(field.value(seq, step)), bound)
