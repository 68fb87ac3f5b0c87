"""`pagedcli explain`: why each prefix lookup of a recorded run hit or missed."""

from pathlib import Path
from typing import Annotated, Any

import typer

from pagedcli.answers.why import Reasons, why, why_of_request
from pagedcli.cli.block import print_block
from pagedcli.cli.cures import print_answer, recorded_cures
from pagedcli.cli.decoder import TokenizerOption, recorded_decoder, recorded_tokenizer
from pagedcli.cli.options import option
from pagedcli.cli.recorded_run import TraceFile
from pagedcli.cli.recording import capture_page, is_recording, print_capture
from pagedcli.errors import UsageError
from pagedcli.files import check_files, whole_file, writing
from pagedcli.kvevents.capture import is_capture
from pagedcli.printable import percent_text, plural
from pagedcli.records import size
from pagedcli.show.report import render_report
from pagedcli.show.tables import Format, table
from pagedcli.show.terminal import say, say_notes
from pagedcli.show.why_tables import lookups_table, reasons_tables, short_tables
from pagedcli.simulation.sources import RecordedRequests
from pagedcli.trace.files import TraceReader
from pagedcli.trace.fold import fold
from pagedcli.trace.state import PoolState
from pagedcli.views.explain import Lookup, explain_trace
from pagedcli.views.names import NamedRequest, find_request
from pagedcli.views.whole_run import CostRow, WholeRun, costs

_REQUEST_HELP = "Show only the lookups of this request, by its id or row index, or of one sequence (seq:31)."
_BLOCK_HELP = "Show the history of block N instead: who held it, and what it contained."
_COSTLIEST_HELP = (
    "List the N requests that took most computed tokens instead, with what was found and what was repeated."
)
_PAGE_HELP = "Write an HTML page instead; --request opens that request in it."
_ALL_HELP = "Show every table in full, also the outcomes of all tokens and lookups, snapshots and salts."
_FORMAT_HELP = "Output format. csv has one table: the totals; with --lookups or --request, the lookups."


def explain(
    trace: TraceFile,
    *,
    request: Annotated[str | None, option(metavar="ID", help=_REQUEST_HELP)] = None,
    block: Annotated[int | None, option(metavar="N", min=0, help=_BLOCK_HELP)] = None,
    costliest: Annotated[int | None, option(metavar="N", min=1, help=_COSTLIEST_HELP)] = None,
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
      pagedcli explain run.jsonl --costliest 10
      pagedcli explain run.jsonl --lookups --format csv > lookups.csv
      pagedcli explain run.jsonl -o run.html
    """  # fmt: skip
    if output_file is not None:
        if block is not None or costliest is not None or lookups or all_ or format_ is not Format.TABLE:
            raise UsageError("-o writes the whole page: only --request and --tokenizer can be combined with it")
        _write_page(trace, output_file, request, tokenizer, overwrite=overwrite)
        return
    if is_recording(trace, request=request, lookups=lookups, block=block, costliest=costliest, all=all_):
        print_capture(trace, tokenizer, format_, in_full=True)
        return
    is_combined = request is not None or lookups or all_ or None not in (block, costliest)
    if is_combined and (block, costliest) != (None, None):
        raise UsageError("--block and --costliest cannot be combined with --request, --lookups, --all or each other")
    if costliest is not None:
        _print_costliest(trace, costliest, format_)
        return
    if block is not None:
        print_block(trace, block, None, tokenizer, format_)
        return
    _print_lookups(trace, request, tokenizer, format_, lookups=lookups, in_full=all_)


def _print_lookups(
    trace: Path, request: str | None, tokenizer: str | None, format_: Format, *, lookups: bool, in_full: bool
) -> None:
    """Print why the lookups of a run, or of one request, ended where they did."""
    reader = TraceReader(trace)
    named = None if request is None else find_request(TraceReader(trace), request, str(trace))
    is_run, is_short = request is None and not lookups, format_ is Format.TABLE and not in_full
    requests = RecordedRequests() if is_run and format_ is not Format.CSV else None
    explainer, state = explain_trace(reader, *([] if requests is None else [requests]))
    say_notes(reader.notes)
    loaded = recorded_tokenizer(trace, tokenizer)
    decode = None if loaded is None else loaded.decode
    cures = [] if requests is None else recorded_cures(requests, state, loaded)
    reasons = why(explainer, state)
    if named is None:
        answer = [] if lookups else [reasons.answer]
        is_short = is_short and is_run
        tables = short_tables(reasons, decode) if is_short else reasons_tables(reasons, decode, every_lookup=lookups)
    else:
        chosen = _lookups_of(named, reasons, trace)
        answer = why_of_request(chosen, decode, filter(None, map(state.seq, named.seq_ids)))
        answer += ["As a table: --all."] if is_short else []
        tables = [] if is_short else [lookups_table(chosen, "Lookups", decode)]
    if format_ is Format.CSV:  # one table per file
        tables = [each for each in tables if each.key == ("totals" if is_run else "lookups")]
    print_answer(answer, cures, tables, format_, _facts(reasons, state))


def _print_costliest(trace: Path, number: int, format_: Format) -> None:
    """Print the requests that took most computed tokens."""
    reader, run = TraceReader(trace), WholeRun()
    run.finish(fold(reader, run))
    say_notes(reader.notes)
    found = costs(run.requests)
    num_computed, shown = sum(row.num_computed for row in found), found[:number]
    answer = (
        f"The {plural(len(shown), 'costliest request')} of {len(found):,} took"
        f" {percent_text(sum(row.share for row in shown))} of {plural(num_computed, 'computed token')}."
    )
    listed = table(CostRow, "costliest", "Requests, most computed first (counts in tokens)", shown)
    print_answer([answer], [], [listed], format_, {"num_computed_tokens": num_computed})


def _lookups_of(named: NamedRequest, reasons: Reasons, trace: Path) -> list[Lookup]:
    """The lookups of a request. Raises: UsageError if there is none."""
    found = [lookup for lookup in reasons.lookups if lookup.seq_id in named.seq_ids]
    if not found:
        raise UsageError(f"request {named.name!r} of {trace} was never admitted: it has no prefix lookup")
    return found


def _facts(reasons: Reasons, state: PoolState) -> dict[str, Any]:
    new = reasons.totals(own=False)
    return {
        "block_size": reasons.block_size,
        "longest_shared_prefix_tokens": reasons.longest_shared_prefix(),
        "hit_rate": new.num_found / new.num_tokens if new.num_tokens else None,
        "ideal_hit_rate": new.ideal / new.num_tokens if new.num_tokens else None,
        "num_events": state.num_events,
    }


def _write_page(trace: Path, path: Path, request: str | None, tokenizer: str | None, *, overwrite: bool) -> None:
    """Write a self-contained HTML page of a recorded run, opened at a request if one is named."""
    check_files({"the trace": trace}, {"the page": path}, overwrite=overwrite)
    if is_capture(trace):
        page = capture_page(trace, tokenizer)
    else:
        reader = TraceReader(trace)
        named = None if request is None else find_request(TraceReader(trace), request, str(trace))
        requests = RecordedRequests()
        page = render_report(
            reader,
            lambda: recorded_decoder(trace, tokenizer),
            selected=() if named is None else named.seq_ids,
            views=[requests],
            what_to_change=lambda state: [
                cure.text for cure in recorded_cures(requests, state, recorded_tokenizer(trace, tokenizer))
            ],
        )
        say_notes(reader.notes)
    with writing(path), whole_file(path, overwrite=overwrite) as file:
        file.write(page)
    say(f"{path}: {size(len(page))}, open it in a browser")
