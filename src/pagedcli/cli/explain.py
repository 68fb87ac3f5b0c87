"""`pagedcli explain`: why each prefix lookup of a recorded run hit or missed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from pagedcli.cli.block import explain_block
from pagedcli.cli.cures import print_answer, recorded_cures
from pagedcli.cli.decoder import Decode, TokenizerOption, recorded_tokenizer
from pagedcli.cli.options import option
from pagedcli.cli.page import write_run_page
from pagedcli.cli.plan_tables import ALL_HINT
from pagedcli.cli.recorded_run import TraceFile
from pagedcli.cli.recording import is_recording, print_capture
from pagedcli.errors import UsageError
from pagedcli.events import MISS_WORDS
from pagedcli.printable import capitalized, percent_text, plural
from pagedcli.records import Share
from pagedcli.show.tables import Format, Table, table
from pagedcli.show.terminal import say_notes
from pagedcli.simulation.sources import RecordedRequests
from pagedcli.trace.files import TraceReader
from pagedcli.trace.state import PoolState, SeqState
from pagedcli.views.explain import (
    REASON_WORDS,
    ExplainedLookup,
    Explainer,
    Lookup,
    SaltRow,
    SnapshotRow,
    Totals,
    explain_trace,
    hits_by_salt,
    lookup_story,
)
from pagedcli.views.names import NamedRequest, find_request
from pagedcli.views.rows import chosen, values_of
from pagedcli.views.words import accepted_words, again_words

_REQUEST_HELP = "Show only the lookups of this request, by its id or row index, or of one sequence (seq:31)."
_BLOCK_HELP = "Show the history of block N instead: who held it, and what it contained."
_PAGE_HELP = "Write an HTML page instead; --request opens that request in it."
_ALL_HELP = "Show every table in full, also the outcomes of all tokens and lookups, snapshots and salts."
_FORMAT_HELP = "Output format. csv has one table: the totals; with --lookups or --request, the lookups."
_MOST_LOST = 10  # lookups shown without --lookups
_LOST_MOST = "Lookups that lost most"
_IN_SHORT = ("step", "label", "num_tokens", "tokens_hit", "lost_tokens", "why")  # columns without --all
_MOST_SNAPSHOTS = 20
_MOST_TOLD = 4  # lookups of a request that are told in sentences
_MOST_SALTS = 20


def explain(
    trace: TraceFile,
    *,
    request: Annotated[str | None, option(metavar="ID", help=_REQUEST_HELP)] = None,
    block: Annotated[int | None, option(metavar="N", min=0, help=_BLOCK_HELP)] = None,
    lookups: Annotated[
        bool, option("--lookups", help="List every lookup, not only those that lost the most tokens.")
    ] = False,
    all_: Annotated[bool, option("--all", help=_ALL_HELP)] = False,
    output_file: Annotated[Path | None, option("-o", "--output-file", metavar="PAGE.html", help=_PAGE_HELP)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing page.")] = False,
    tokenizer: TokenizerOption = None,
    format_: Annotated[Format, typer.Option("--format", help=_FORMAT_HELP)] = Format.TABLE,
) -> None:
    """Explain why each prefix lookup hit or missed, and where the hit rate was lost.

    The ceiling is the hit rate of an unlimited cache in which every block is computed once. If the run was recorded
    with --record-tokens, explain also shows the text where prompts diverge. Recordings of `pagedcli attach` have no
    lookups: for these, explain shows which blocks were recomputed and why, and what a larger cache would have kept.
    With -o it writes a page that needs no network: block map and tables at any step, charts over time, every
    request and lookup. If tokens were recorded, it contains parts of the prompts: share with care.

    \b
    Examples:
      pagedcli explain run.jsonl
      pagedcli explain run.jsonl --request code-Mirano
      pagedcli explain run.jsonl --block 37                (pagedcli trace run.jsonl --block 37 --step 100: at one step)
      pagedcli explain run.jsonl --lookups --format csv > lookups.csv
      pagedcli explain run.jsonl -o run.html
    """  # fmt: skip
    if output_file is not None:
        if block is not None or lookups or all_ or format_ is not Format.TABLE:
            raise UsageError("-o writes the whole page: only --request and --tokenizer can be combined with it")
        write_run_page(trace, output_file, request, tokenizer, overwrite=overwrite)
        return
    if is_recording(trace, request=request, lookups=lookups, block=block, all=all_):
        print_capture(trace, tokenizer, format_, in_full=True)
        return
    if block is not None:
        if request is not None or lookups or all_:
            raise UsageError("--block cannot be combined with --request, --lookups or --all")
        explain_block(trace, block, tokenizer, format_)
        return
    named = None if request is None else find_request(TraceReader(trace), request, str(trace))
    reader = TraceReader(trace)
    is_run, is_short = request is None and not lookups, format_ is Format.TABLE and not all_
    requests = RecordedRequests() if is_run and format_ is not Format.CSV else None
    explainer, state = explain_trace(reader, *([] if requests is None else [requests]))
    say_notes(reader.notes)
    loaded = recorded_tokenizer(trace, tokenizer)
    decode = None if loaded is None else loaded.decode
    cures = [] if requests is None else recorded_cures(requests, state, loaded)
    if named is None:
        answer = [] if lookups else [why_in_words(explainer, state)]
        tables = _tables(explainer, decode, in_short=is_short and is_run, every_lookup=lookups)
    else:
        chosen = _lookups_of(named, explainer, trace)
        answer = _story(chosen, decode, filter(None, map(state.seq, named.seq_ids)))
        answer += ["As a table: --all."] if is_short else []
        tables = [] if is_short else [_lookups_table(chosen, "Lookups", decode)]
    if format_ is Format.CSV:  # one table per file
        tables = [each for each in tables if each.key == ("totals" if is_run else "lookups")]
    print_answer(answer, cures, tables, format_, _facts(explainer, state))


def _tables(explainer: Explainer, decode: Decode | None, *, in_short: bool, every_lookup: bool) -> list[Table]:
    """The tables of a run. `in_short`: the lookups that lost most, or why all ended where they did."""
    lost = sorted(filter(Lookup.num_lost_tokens, explainer.lookups), key=Lookup.num_lost_tokens, reverse=True)
    if in_short:
        found = _lookups_table(lost[:_MOST_LOST], _LOST_MOST, decode, _IN_SHORT) if lost else _reasons_table(explainer)
        return [replace(found, notes=[*found.notes, *_prefix_notes(explainer, in_short=True), ALL_HINT])]
    lookups = _lookups_table(lost[:_MOST_LOST], _LOST_MOST, decode)
    if every_lookup:
        lookups = _lookups_table(explainer.lookups, "Lookups", decode)
    return [_totals_table(explainer), _reasons_table(explainer), lookups, *_tables_of_states_and_salts(explainer)]


def _lookups_of(named: NamedRequest, explainer: Explainer, trace: Path) -> list[Lookup]:
    """The lookups of a request. Raises: UsageError if there is none."""
    found = [lookup for lookup in explainer.lookups if lookup.seq_id in named.seq_ids]
    if not found:
        raise UsageError(f"request {named.name!r} of {trace} was never admitted: it has no prefix lookup")
    return found


def _story(lookups: Sequence[Lookup], decode: Decode | None, seqs: Iterable[SeqState]) -> list[str]:
    """What the lookups of a request found, why they ended, where its prompt diverged, and how many draft tokens were
    accepted, in sentences."""
    told = [lookup_story(lookup) for lookup in lookups[:_MOST_TOLD]]
    if len(lookups) > _MOST_TOLD:
        told.append(f"It looked up {len(lookups) - _MOST_TOLD:,} more times.")
    diverged = dict.fromkeys(ExplainedLookup(lookup, decode).divergence for lookup in lookups)
    words = [*diverged, _guess_words(seqs)]
    return [*told, *(f"{capitalized(each)}." for each in words if each is not None)]


def why_in_words(explainer: Explainer, state: PoolState) -> str:
    """How much of a run's prompts came from the cache, how much could have, and what the rest was lost to."""
    first = explainer.totals(own=False)
    if not first.num_tokens:
        return "No prompt was looked up in the prefix cache."
    tokens, num_blocks = plural(first.num_tokens, "prompt token"), plural(state.started.num_blocks, "block")
    were = "was" if state.started.num_blocks == 1 else "were"
    lost = {
        f"{num_blocks} {were} too few ({{}} evicted before reuse)": first.evicted,
        "{} computed by two sequences at once": first.in_flight,
        "{} cached without a snapshot of the recurrent state": first.vetoed,
    }
    why = [words.format(plural(count, "token")) for words, count in lost.items() if count]
    if first.caching_off:
        said = f"Prefix caching was off: all of {tokens} were computed"
    else:
        said = f"{percent_text(first.num_found / first.num_tokens)} of {tokens} came from the cache"
        if first.ideal > first.num_found:
            could = percent_text(first.ideal / first.num_tokens)
            said += f"; an unlimited cache would find {could}" + (f": {', '.join(why)}" if why else "")
        else:
            said += ", as much as an unlimited cache would find"
    if num_preemptions := sum(seq.num_preemptions for seq in state.all_seqs()):
        again = plural(state.num_recomputed_tokens, "token")
        said += f"; {plural(num_preemptions, 'preemption')}: {again} computed again"
    if words := _guess_words(state.all_seqs()):
        said += f"; {words}{again_words(state.num_again_tokens)}"
    return f"{said}."


def _guess_words(seqs: Iterable[SeqState]) -> str | None:
    """How many draft tokens of sequences were accepted; None: nothing was drafted."""
    num_right = num_guesses = 0
    for seq in seqs:
        num_right, num_guesses = num_right + seq.num_right_guesses, num_guesses + seq.num_guesses
    return accepted_words(num_right, num_guesses) if num_guesses else None


def _facts(explainer: Explainer, state: PoolState) -> dict[str, Any]:
    new = explainer.totals(own=False)
    return {
        "block_size": explainer.block_size,
        "minimum_cacheable_prefix_tokens": explainer.block_size,
        "longest_shared_prefix_tokens": explainer.longest_shared_prefix(),
        "hit_rate": new.num_found / new.num_tokens if new.num_tokens else None,
        "ideal_hit_rate": new.ideal / new.num_tokens if new.num_tokens else None,
        "num_events": state.num_events,
    }


@dataclass(frozen=True, slots=True)
class _TotalsRow:
    """Tokens with one outcome."""

    part: str
    label: Annotated[str, "tokens that were"]
    tokens: Annotated[int, "first"]
    share: Share | None
    own_tokens: Annotated[int, "later"]
    own_share: Annotated[Share | None, "share"]


@dataclass(frozen=True, slots=True)
class _ReasonRow:
    """Lookups that ended for one reason."""

    reason: Annotated[str, "outcome"]
    lookups: Annotated[int, "first lookups"]
    own_lookups: Annotated[int, "later lookups"]
    meaning: Annotated[str, "because"]


def _totals_table(explainer: Explainer) -> Table:
    """Where the looked up tokens were."""
    first, own = explainer.totals(own=False), explainer.totals(own=True)
    labels = {
        "hit": "hit",
        "disk_hit": "hit: read from the prefix store",
        "late_hit": "hit later: computed by another meanwhile",
        "vetoed": "lost: no snapshot of the recurrent state",
        "evicted": "lost: evicted before the lookup",
        "in_flight": "lost: in flight in another sequence",
        "first_seen": "seen for the first time",
        "first_seen_shared": "  among these: shared, but less than a block",
        "last_block": "after the last full block",
        "last_block_shared": "  among these: shared, but less than a block",
        "last_token": "last token of a prompt cached in full",
        "caching_off": MISS_WORDS["caching_off"],
        "not_known": "unknown: the sequence ended first",
        "num_tokens": "all tokens looked up",
        "ideal": "ceiling: an unlimited cache" + " and the prefix store" * bool(first.disk_hit),
    }
    rows = [_TotalsRow(key, label, *_share(first, key), *_share(own, key)) for key, label in labels.items()]
    always = ("num_tokens",) if first.caching_off else ("hit", "num_tokens", "ideal")
    kept = [row for row in rows if row.tokens or row.own_tokens or row.part in always]
    later = f"{own.num_lookups:,} later, after a preemption or for n > 1"
    title = f"Prefix cache: {plural(first.num_lookups, 'first lookup')}, {later} (first, later: tokens)"
    columns = "label tokens share own_tokens own_share"
    return table(_TotalsRow, "totals", title, kept, columns, notes=_prefix_notes(explainer))


def _share(totals: Totals, key: str) -> tuple[int, float | None]:
    """The tokens of a part, and their share of all."""
    num_tokens = getattr(totals, key)
    return num_tokens, num_tokens / totals.num_tokens if totals.num_tokens else None


def _prefix_notes(explainer: Explainer, *, in_short: bool = False) -> list[str]:
    size, longest = explainer.block_size, explainer.longest_shared_prefix()
    sizes = sorted({size, 16, 256} - {0})
    blocks = ", ".join(f"{plural(longest // s, 'block')} at block {s}" for s in sizes)
    failed = explainer.num_failed_steps
    lost = f"{plural(failed, 'step')} failed; the content of {plural(explainer.num_lost_blocks, 'block')} was dropped"
    has_ceiling = not explainer.totals(own=False).caching_off
    shared = f"longest shared prefix seen: {plural(longest, 'token')} = {blocks}"
    if in_short:
        return [*([lost] if failed else []), shared]
    return [
        *([lost] if failed else []),
        *(["ceiling: hits if no block were evicted or computed twice"] if has_ceiling else []),
        f"minimum cacheable prefix: {plural(size, 'token')} (one block)",
        shared,
    ]


def _reasons_table(explainer: Explainer) -> Table:
    first, own = explainer.totals(own=False), explainer.totals(own=True)
    rows = [
        _ReasonRow(reason, first.reasons[reason], own.reasons[reason], words)
        for reason, words in REASON_WORDS.items()
        if first.reasons[reason] or own.reasons[reason]
    ]
    columns = "meaning lookups own_lookups" if own.num_lookups else "meaning lookups"
    headers = {} if own.num_lookups else {"lookups": "lookups"}
    return table(_ReasonRow, "reasons", "Why lookups ended where they did", rows, columns, headers=headers)


def _tables_of_states_and_salts(explainer: Explainer) -> list[Table]:
    """The tables that only models with recurrent state and requests with a cache_salt have."""
    salts = hits_by_salt(explainer.lookups)
    tables = [_snapshots_table(explainer.snapshots)] if explainer.snapshots else []
    return [*tables, _salts_table(salts)] if salts else tables


def _snapshots_table(snapshots: list[SnapshotRow]) -> Table:
    """The snapshots that most tokens were found by."""
    used = sorted(snapshots, key=lambda use: use.tokens_hit, reverse=True)
    rows = [values_of(use, "json") for use in used[:_MOST_SNAPSHOTS]]
    unused = sum(not use.num_hits for use in snapshots)
    title = f"Snapshots of recurrent state: {len(snapshots):,}, of which {unused:,} were never used"
    notes = [f"the {len(rows)} most used are shown"] if len(rows) < len(snapshots) else []
    return Table("snapshots", title, chosen(SnapshotRow, "table"), rows, notes)


def _salts_table(salts: list[SaltRow]) -> Table:
    """Hit rates of requests that share blocks only among themselves."""
    rows = [values_of(row, "table") for row in salts]
    notes = [f"the {_MOST_SALTS} with the most tokens are shown"] if len(rows) > _MOST_SALTS else []
    title = "Hit rate by cache_salt: salts are numbered as they appear, and never recorded"
    return Table("salts", title, chosen(SaltRow, "table"), rows, notes, max_shown=_MOST_SALTS)


def _lookups_table(
    lookups: Sequence[Lookup], title: str, decode: Decode | None, columns: Sequence[str] | None = None
) -> Table:
    """What was found, what was lost and why. `columns`: None for all, with where prompts diverge as notes."""
    rows = [values_of(ExplainedLookup(lookup, decode), "json") for lookup in lookups]
    shown = [each for each in chosen(ExplainedLookup, "table") if columns is None or each.key in columns]
    diverged = [f"seq {row['seq_id']}: {row['divergence']}" for row in rows if row["divergence"] is not None]
    return Table("lookups", title, shown, rows, diverged if columns is None else [])
