"""Causes why prompts part, as verdicts."""

from dataclasses import replace

from pagedcli.planning.parting import LEAST_GAIN, Parting
from pagedcli.printable import percent_text, plural
from pagedcli.verdicts import Verdict

NOT_DRAWN = "rows that were not drawn"
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
    "move": "move it behind them, but not into another message",
    "sort": "sort them into one order",
    "replace": "make it the same everywhere",
    "one salt": "give those that may share blocks one cache_salt",
}


def parting_verdict(found: Parting, *, has_all: bool = False) -> Verdict:
    """Where prompts part, and what to do. `has_all`: more rows cannot be looked at than have been."""
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
    return _sized(
        found,
        Verdict(
            finding=finding,
            measure="hits",
            now=found.rate,
            after=found.new_rate,
            to_do=to_do,
            certainty="the changed prompts in an unlimited cache",
        ),
        has_all=has_all,
    )


def _sized(found: Parting, verdict: Verdict, *, has_all: bool) -> Verdict:
    """Add other changes and what a sample can promise: a prompt has hits on those before it, and in the whole file
    there are more of them, so the rate of a sample is a lower bound."""
    low = max(0.0, found.new_rate - found.margin)
    now, certainty = found.rate_in_file, verdict.certainty
    others = "".join(f"; {name}: {percent_text(rate)}" for name, rate in found.others)
    if not found.is_sample:
        return replace(verdict, certainty=certainty + others)
    if found.new_rate_in_file is not None:
        return replace(verdict, now=now, after=found.new_rate_in_file, certainty="all prompts in an unlimited cache")
    if now is None:
        certainty += f"{others}; of all prompts at least {percent_text(low)}"
        return replace(verdict, measure="hits of those drawn", certainty=certainty, not_looked_at=NOT_DRAWN)
    not_drawn = NOT_DRAWN if has_all else f"{NOT_DRAWN} (--all: every row)"
    if low < now + LEAST_GAIN:
        certainty = "too few of the prompts that share were drawn together to tell the hits afterwards"
        return replace(verdict, now=now, after=None, certainty=certainty, not_looked_at=not_drawn)
    least = ((name, max(0.0, rate - found.margin)) for name, rate in found.others)
    certainty += "".join(f"; {name}: at least {percent_text(rate)}" for name, rate in least)
    return replace(verdict, now=now, low=low, certainty=certainty, not_looked_at=not_drawn)


def _prompts(found: Parting) -> str:
    what = "drawn prompt" if found.is_sample else "prompt"
    return f"{found.num_prompts:,} of {plural(found.num_looked_at, what)}"


def _tokens(found: Parting) -> str:
    if found.first_token == found.last_token:
        return f"token {found.first_token:,}"
    return f"tokens {found.first_token:,} to {found.last_token:,}"
