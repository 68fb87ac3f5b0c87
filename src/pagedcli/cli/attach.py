"""`pagedcli attach`: watch the KV cache of a running server, from the events it publishes."""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from pagedcli import app, kvevents
from pagedcli.cli.options import FormatOption, option
from pagedcli.cli.recording import kv_decoder, print_capture
from pagedcli.errors import UsageError
from pagedcli.files import KV_RECORDING, check_files
from pagedcli.kvevents.capture import CaptureWriter
from pagedcli.kvevents.fold import KVState
from pagedcli.kvevents.sockets import Subscriber
from pagedcli.printable import plural
from pagedcli.process import interrupts_raised
from pagedcli.show.kv_tables import metrics_table, print_summary, summary
from pagedcli.show.tables import Format
from pagedcli.show.terminal import is_interactive, say
from pagedcli.trace.tokens import Decode

_WAIT_S = 0.1
_LINE_S = 10.0
_ENDPOINTS_HELP = "tcp://HOST:PORT of each publisher, or a recording."
_REPLAY_HELP = "Replay endpoint to fetch missed messages from; one per publisher."
Endpoints = Annotated[list[str], typer.Argument(metavar="ENDPOINT...", help=_ENDPOINTS_HELP, show_default=False)]


def attach(
    endpoints: Endpoints,
    *,
    replay: Annotated[list[str] | None, option(metavar="ENDPOINT", help=_REPLAY_HELP)] = None,
    topic: Annotated[str, option(help="Read only messages whose topic starts with this.")] = "",
    metrics: Annotated[
        str | None, option(metavar="URL", help="Also show the server's own counters, read from this /metrics page.")
    ] = None,
    model: Annotated[str | None, option("-m", "--model", help="Decode prefixes with this model's tokenizer.")] = None,
    record: Annotated[Path | None, option(metavar="FILE.jsonl[.zst]", help="Record all messages to a file.")] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Include token ids in the recording; by default only digests.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing recording.")] = False,
    duration: Annotated[float | None, option(metavar="SECONDS", min=0, help="Stop after this time.")] = None,
    idle: Annotated[
        float | None, option(metavar="SECONDS", min=0, help="Stop when no message has arrived for this long.")
    ] = None,
    no_live: Annotated[bool, typer.Option("--no-live", help="Print only the final summary.")] = False,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Watch the KV cache of a running vLLM, SGLang or TensorRT-LLM server.

    Reads the KV events that the server publishes (docs/servers.md: how to enable them) and rebuilds its prefix tree:
    what is resident, how long blocks live, and which are evicted and recomputed. On a terminal it opens an application
    (q quits, ? shows all keys); at the end it prints a summary to stdout. KV events contain no hits or requests:
    --metrics adds the server's counts.

    \b
    Examples:
      pagedcli attach tcp://localhost:5557
      pagedcli attach tcp://localhost:5557 --replay tcp://localhost:5558 --metrics http://localhost:8000/metrics
      pagedcli attach tcp://gpu1:5557 tcp://gpu1:5558 --duration 60 --format json | jq .num_blocks_stored_again
      pagedcli attach tcp://localhost:5557 --record events.jsonl.zst    (then: pagedcli explain events.jsonl.zst)

    Exit codes: 0 success (also after Ctrl-C), 1 a recording is damaged, 2 wrong usage.
    """  # fmt: skip
    if tokens and record is None:
        raise UsageError("--tokens needs --record")
    decode = None if model is None else kv_decoder(model)
    if len(endpoints) == 1 and "://" not in endpoints[0]:
        if replay or metrics or record or topic:
            raise UsageError(f"{endpoints[0]} is a recording: --replay, --metrics, --record and --topic do not apply")
        print_capture(Path(endpoints[0]), model, format_)
        return
    check_files({}, {"--record": record}, overwrite=overwrite, kinds={"--record": KV_RECORDING})
    with interrupts_raised(), ExitStack() as stack:
        subscriber = stack.enter_context(Subscriber(endpoints, replay or [], topic=topic))
        scraper = None if metrics is None else stack.enter_context(kvevents.Scraper(metrics))
        writer = None
        if record is not None:
            writer = stack.enter_context(CaptureWriter(record, endpoints, tokens=tokens))
        session = _Session(subscriber, writer, scraper, keep_tokens=decode is not None)
        if is_interactive(with_stdout=False) and not no_live:
            session.watch(duration, idle, decode)
        else:
            session.follow_until_stopped(duration, idle)
    _summarize(session.state, scraper, decode, format_)
    if record is not None:
        say(f"recording: {record}; view it with: pagedcli trace {record}")


def _summarize(state: KVState, scraper: "kvevents.Scraper | None", decode: Decode | None, format_: Format) -> None:
    gc.freeze()  # the collector would walk over all blocks several times while the tables are made
    answer, tables = summary(state, decode)
    if scraper is not None:
        tables.append(metrics_table(scraper))
    print_summary(answer, tables, state, format_)
    if not state.num_messages:
        unknown = "no messages received: check that the server publishes KV events there (docs/servers.md)"
        say(f"note: {(scraper is not None and scraper.metrics.silence) or unknown}")


class _Session:
    """State, application and recording of one call of the command."""

    def __init__(
        self,
        subscriber: Subscriber,
        writer: CaptureWriter | None,
        scraper: "kvevents.Scraper | None",
        *,
        keep_tokens: bool,
    ) -> None:
        fetch = self._fetch if subscriber.can_replay else None
        self.state = KVState(subscriber.endpoints, keep_tokens=keep_tokens, fetch=fetch)
        self.player: app.kv_app.AttachPlayer | None = None
        self._start = time.monotonic()
        self._next_line = self._start + _LINE_S
        self._said_lost: set[int] = set()  # sources of which a lost connection was printed
        self._subscriber = subscriber
        self._writer = writer
        self._scraper = scraper

    def watch(self, duration: float | None, idle: float | None, decode: Decode | None) -> None:
        """Process messages while the application shows the state."""
        self.player = app.kv_app.AttachPlayer()
        title = f"pagedcli attach {' '.join(self._subscriber.endpoints)}"
        window = app.kv_app.KVApp(self.player, title, decode=decode, scraper=self._scraper)
        app.base.watch(window, self.player, lambda: self.follow(duration, idle))

    def follow_until_stopped(self, duration: float | None, idle: float | None) -> None:
        """Process messages as `follow` does, also until Ctrl-C."""
        try:
            self.follow(duration, idle)
        except KeyboardInterrupt:
            say(f"\nstopped; summary of {plural(self.state.num_resident, 'resident block')}")

    def follow(self, duration: float | None, idle: float | None) -> None:
        """Process messages until the time is up, none arrive, or the user quits."""
        last_message = self._now()
        if self._subscriber.can_replay:
            for source in range(len(self._subscriber.endpoints)):
                self.state.catch_up(source, self._now())
        while duration is None or self._now() < duration:
            for source, frames in self._subscriber.receive(_WAIT_S):
                last_message = self._now()
                self.state.take(frames, last_message, source)
                self._keep(frames, last_message, source)
            self._note_lost()
            if idle is not None and self._now() - last_message >= idle:
                return
            if self.player is None:
                self._say_line()
            elif self.player.stop_requested:
                return
            else:
                self.player.offer(self.state, self._now())

    def _note_lost(self) -> None:
        for source in self._subscriber.take_lost():
            self.state.reconnected(source)
            if self.player is None and source not in self._said_lost:
                say(f"note: {self.state.reconnect_note(source)}")
            self._said_lost.add(source)

    def _fetch(self, source: int, first: int, before: int | None) -> Iterator[list[bytes]]:
        for frames in self._subscriber.replay(source, first, before):
            if self.player is not None and self.player.stop_requested:
                return
            self._keep(frames, self._now(), source)
            yield frames

    def _keep(self, frames: Sequence[bytes], time_s: float, source: int) -> None:
        if self._writer is not None:
            self._writer.write(frames, time_s, source)

    def _now(self) -> float:
        return time.monotonic() - self._start

    def _say_line(self) -> None:
        """Print a line every ten seconds where there is no terminal."""
        if time.monotonic() < self._next_line:
            return
        self._next_line = time.monotonic() + _LINE_S
        if not self.state.num_messages and self._scraper is not None and self._scraper.metrics.silence:
            say(f"{self._now():.0f} s: {self._scraper.metrics.silence}")
            return
        stored, removed = self.state.rates()
        say(
            f"{self._now():.0f} s: {plural(self.state.num_batches, 'batch')}, "
            f"{plural(self.state.num_resident, 'block')} resident, "
            f"{stored:,.0f} stored/s, {removed:,.0f} removed/s"
        )
