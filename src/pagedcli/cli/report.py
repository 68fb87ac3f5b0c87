"""`pagedcli report`: an HTML report of a recorded run."""

from pathlib import Path
from typing import Annotated

import typer

from pagedcli.cli.cures import recorded_cures
from pagedcli.cli.decoder import TokenizerOption, recorded_decoder, recorded_tokenizer
from pagedcli.cli.options import option
from pagedcli.cli.recorded_run import TraceFile
from pagedcli.cli.recording import capture_page, is_recording
from pagedcli.files import check_files, whole_file, writing
from pagedcli.show.report import render_report
from pagedcli.show.tables import size
from pagedcli.show.terminal import say, say_notes
from pagedcli.simulation.sources import RecordedRequests
from pagedcli.trace.files import TraceReader
from pagedcli.views.names import find_request

_REQUEST_HELP = "Open the page at this request, by its id or its row's index, or at one sequence (seq:31)."


def report(
    trace: TraceFile,
    *,
    output_file: Annotated[
        Path | None, option("-o", "--output-file", help="Output file. Default: the trace's name with .html.")
    ] = None,
    request: Annotated[str | None, option(metavar="ID", help=_REQUEST_HELP)] = None,
    tokenizer: TokenizerOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing report.")] = False,
) -> None:
    """Write a self-contained HTML report of a recorded run; it needs no network.

    It begins with what happened and what to change. A slider shows the block map and the block tables at any step;
    charts show occupancy, hit rate, waste and speed over steps and seconds; tables of requests and prefix lookups sort
    and search; the slowest requests are explained. For recordings of `pagedcli attach`: residency over time, churn,
    and what a larger cache would have kept. If tokens were recorded (--record-tokens), it contains parts of the
    prompts: share with care.

    \b
    Examples:
      pagedcli report run.jsonl.zst -o report.html
      pagedcli report run.jsonl.zst --request code-Mirano
    """  # fmt: skip
    is_kv_recording = is_recording(trace, request=request)
    path = output_file or Path(trace.name.removesuffix(".zst").removesuffix(".jsonl") + ".html")
    check_files({"the trace": trace}, {"the page": path}, overwrite=overwrite)
    if is_kv_recording:
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
