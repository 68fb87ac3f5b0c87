"""`pagedcli explain -o`: the HTML page of a recorded run."""

from pathlib import Path

from pagedcli.cli.cures import recorded_cures
from pagedcli.cli.decoder import recorded_decoder, recorded_tokenizer
from pagedcli.cli.recording import capture_page
from pagedcli.files import check_files, whole_file, writing
from pagedcli.kvevents.capture import is_capture
from pagedcli.show.report import render_report
from pagedcli.show.tables import size
from pagedcli.show.terminal import say, say_notes
from pagedcli.simulation.sources import RecordedRequests
from pagedcli.trace.files import TraceReader
from pagedcli.views.names import find_request


def write_run_page(trace: Path, path: Path, request: str | None, tokenizer: str | None, *, overwrite: bool) -> None:
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
