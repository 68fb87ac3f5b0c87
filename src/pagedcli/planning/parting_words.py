"""Causes why prompts part, as verdicts."""

from pagedcli.planning.parting import Parting
from pagedcli.printable import percent_text, plural
from pagedcli.verdicts import Verdict

_WHAT = {
    "time": "the time",
    "date": "the date",
    "id": "an id",
    "counter": "a counter",
    "number": "a number",
    "language": "the language",
    "name": "a name",
    "text": "the text there",
    "start": "how often the mark at the beginning is repeated",
    "blank": "a blank",
    "template": "the chat template",
    "tools": "the order of the tools",
    "documents": "the order of the documents",
    "salt": "the cache_salt",
}
_TO_DO = {
    "move": "move it behind them",
    "sort": "sort them into one order",
    "replace": "make it the same everywhere",
    "one salt": "give those that may share blocks one cache_salt",
}


def parting_verdict(found: Parting, *, change: str | None = None) -> Verdict:
    """`change`: how the changed prompts can be tried, where they can be written."""
    part_at = f"{_prompts(found)} part at {_tokens(found)}"
    shown = ", ".join(f'"{text}"' for text in found.texts)
    place = f" ({shown})" if shown else ""
    if found.action == "block size":
        finding = f"{part_at}, before a block of tokens is full, so no block of what they share can be found again"
        to_do = f"use --block-size {found.block_size}"
    elif found.action == "one salt":
        finding = f"{part_at}: only {_WHAT[found.kind]} differs, {plural(found.num_equal, 'token')} are equal"
        to_do = _TO_DO[found.action]
    else:
        after = f"{plural(found.num_equal, 'token')} after it {'is' if found.num_equal == 1 else 'are'} equal"
        finding = f"{part_at}{place}: {_WHAT[found.kind]} differs, {after}"
        to_do = _TO_DO[found.action]
    others = "".join(f"; {name}: {percent_text(rate)}" for name, rate in found.others)
    return Verdict(
        finding=finding,
        measure="hits",
        now=found.rate,
        after=found.new_rate,
        low=max(0.0, found.new_rate - found.margin) if found.is_sample else None,
        high=min(1.0, found.new_rate + found.margin) if found.is_sample else None,
        to_do=to_do,
        change=change if found.action in ("move", "sort", "replace") else None,
        certainty=f"the changed prompts in an unlimited cache{others}",
        not_looked_at="rows that were not drawn (--all: every row)" if found.is_sample else None,
    )


def _prompts(found: Parting) -> str:
    what = "drawn prompt" if found.is_sample else "prompt"
    return f"{found.num_prompts:,} of {plural(found.num_looked_at, what)}"


def _tokens(found: Parting) -> str:
    if found.first_token == found.last_token:
        return f"token {found.first_token:,}"
    return f"tokens {found.first_token:,} to {found.last_token:,}"
