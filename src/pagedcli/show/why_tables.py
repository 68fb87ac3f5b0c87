"""The tables of why no more was found: outcomes of tokens and of lookups, the lookups that lost most, snapshots and
salts. Used by `explain` for our runs and for recordings of servers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pagedcli.answers.why import PART_WORDS, ExplainedLookup, ReasonRow, Reasons, SaltRow
from pagedcli.printable import plural
from pagedcli.records import Share
from pagedcli.show.tables import ALL_HINT, Table, table
from pagedcli.trace.tokens import Decode
from pagedcli.views.explain import Lookup, SnapshotRow, Totals
from pagedcli.views.rows import chosen, values_of

_MOST_LOST = 10  # lookups that are listed unless all are
_LOST_MOST = "Lookups that lost most"
_IN_SHORT = ("step", "label", "num_tokens", "tokens_hit", "lost_tokens", "why")
_MOST_ROWS = 20  # snapshots, salts


@dataclass(frozen=True, slots=True)
class _TotalsRow:
    """Tokens with one outcome."""

    part: str
    label: Annotated[str, "tokens that were"]
    tokens: Annotated[int, "first"]
    share: Share | None
    own_tokens: Annotated[int, "later"]
    own_share: Annotated[Share | None, "share"]


def short_tables(reasons: Reasons, decode: Decode | None) -> list[Table]:
    """The lookups that lost most, or why all ended where they did."""
    lost = reasons.lost()[:_MOST_LOST]
    found = lookups_table(lost, _LOST_MOST, decode, _IN_SHORT) if lost else _reasons_table(reasons)
    notes = filter(None, [*found.notes, reasons.lost_content, _longest_shared(reasons), ALL_HINT])
    return [replace(found, notes=[*notes])]


def reasons_tables(reasons: Reasons, decode: Decode | None, *, every_lookup: bool = False) -> list[Table]:
    """All tables; snapshots and salts only where there are any."""
    shown, title = (reasons.lookups, "Lookups") if every_lookup else (reasons.lost()[:_MOST_LOST], _LOST_MOST)
    tables = [_totals_table(reasons), _reasons_table(reasons), lookups_table(shown, title, decode)]
    if reasons.snapshots:
        tables.append(_snapshots_table(reasons.snapshots))
    return [*tables, *salts_tables(reasons)]


def server_tables(reasons: Reasons, decode: Decode | None) -> list[Table]:
    """The tables of a server's requests, of which only full blocks are known. The lookups that lost most are shown."""
    lookups = sorted(reasons.lookups, key=Lookup.num_lost_tokens, reverse=True)
    listed = lookups_table(lookups, "Lookups that stored blocks", decode, max_shown=_MOST_LOST)
    listed = replace(listed, columns=[each for each in listed.columns if each.key in _IN_SHORT])
    return [_reasons_table(reasons), listed, *salts_tables(reasons)]


def _totals_table(reasons: Reasons) -> Table:
    first, own = reasons.totals(own=False), reasons.totals(own=True)
    words = {**PART_WORDS, "ideal": PART_WORDS["ideal"] + " and the prefix store" * bool(first.disk_hit)}
    rows = [_TotalsRow(key, label, *_share(first, key), *_share(own, key)) for key, label in words.items()]
    always = ("num_tokens",) if first.caching_off else ("hit", "num_tokens", "ideal")
    kept = [row for row in rows if row.tokens or row.own_tokens or row.part in always]
    later = f"{own.num_lookups:,} later, after a preemption or for n > 1"
    title = f"Prefix cache: {plural(first.num_lookups, 'first lookup')}, {later} (first, later: tokens)"
    notes = filter(None, [
        reasons.lost_content,
        None if first.caching_off else "ceiling: hits if no block were evicted or computed twice",
        f"minimum cacheable prefix: {plural(reasons.block_size, 'token')} (one block)",
        _longest_shared(reasons),
    ])  # fmt: skip
    return table(_TotalsRow, "totals", title, kept, "label tokens share own_tokens own_share", notes=[*notes])


def _share(totals: Totals, key: str) -> tuple[int, float | None]:
    """The tokens of a part, and their share of all."""
    num_tokens = getattr(totals, key)
    return num_tokens, num_tokens / totals.num_tokens if totals.num_tokens else None


def _longest_shared(reasons: Reasons) -> str:
    longest, size = reasons.longest_shared_prefix(), reasons.block_size
    return f"longest shared prefix: {plural(longest, 'token')}" + (
        f", {plural(longest // size, 'full block')} of {size}" if size else ""
    )


def _reasons_table(reasons: Reasons) -> Table:
    has_later = bool(reasons.totals(own=True).num_lookups)
    columns = "meaning lookups own_lookups" if has_later else "meaning lookups"
    headers = {} if has_later else {"lookups": "lookups"}
    return table(ReasonRow, "reasons", "Why lookups ended where they did", reasons.rows(), columns, headers=headers)


def lookups_table(
    lookups: Sequence[Lookup],
    title: str,
    decode: Decode | None,
    columns: Sequence[str] | None = None,
    max_shown: int | None = None,
) -> Table:
    """What was found, what was lost and why. `columns`: None for all, with where prompts diverge as notes."""
    rows = [values_of(ExplainedLookup(lookup, decode), "json") for lookup in lookups]
    unit = lookups[0].unit if lookups else "step"
    shown = [
        replace(each, header=unit) if each.key == "step" else each
        for each in chosen(ExplainedLookup, "table")
        if columns is None or each.key in columns
    ]
    noted = rows[:max_shown] if columns is None else []
    diverged = [f"seq {row['seq_id']}: {row['divergence']}" for row in noted if row["divergence"] is not None]
    return Table("lookups", title, shown, rows, diverged, max_shown)


def _snapshots_table(snapshots: list[SnapshotRow]) -> Table:
    """The snapshots that most tokens were found by."""
    used = sorted(snapshots, key=lambda use: use.tokens_hit, reverse=True)
    rows = [values_of(use, "json") for use in used[:_MOST_ROWS]]
    unused = sum(not use.num_hits for use in snapshots)
    title = f"Snapshots of recurrent state: {len(snapshots):,}, of which {unused:,} were never used"
    notes = [f"the {len(rows)} most used are shown"] if len(rows) < len(snapshots) else []
    return Table("snapshots", title, chosen(SnapshotRow, "table"), rows, notes)


def salts_tables(reasons: Reasons) -> list[Table]:
    """Hit rates of requests that share blocks only among themselves; empty if there is one salt."""
    rows = [values_of(row, "table") for row in reasons.salts()]
    notes = [f"the {_MOST_ROWS} with the most tokens are shown"] if len(rows) > _MOST_ROWS else []
    title = "Hit rate by cache_salt: salts are numbered as they appear, and never recorded"
    return [Table("salts", title, chosen(SaltRow, "table"), rows, notes, max_shown=_MOST_ROWS)] if rows else []
