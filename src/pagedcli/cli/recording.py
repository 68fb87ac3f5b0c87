"""Recordings of KV events as subjects of the commands: `attach`, `trace`, `explain`, and its page."""

from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pagedcli.cli.options import do_not_apply
from pagedcli.errors import UsageError
from pagedcli.kvevents.capture import CaptureReader, is_capture
from pagedcli.kvevents.fold import KVState
from pagedcli.kvevents.lookups import Lookups, SaltRow, hits_by_salt, read_lookups
from pagedcli.kvevents.tree import Decode, LargerCache, curve
from pagedcli.models.hub import resolve_model
from pagedcli.printable import one_line
from pagedcli.show import pages
from pagedcli.show.kv_tables import facts, print_summary, summary
from pagedcli.show.tables import Format, Table, print_tables, table
from pagedcli.show.terminal import is_interactive, say_notes

if TYPE_CHECKING:
    from pagedcli.batch.tokenizer import Tokenizer


def is_recording(path: Path, **given: object) -> bool:
    """Whether a command's subject is a recording of KV events, not a trace. `given`: options that only a trace has, by
    name, None or False where the user did not set them. Raises: UsageError if a recording gets one."""
    if not is_capture(path):
        return False
    names = [name for name, value in given.items() if value is not None and value is not False]
    if names:
        what = "a recording of KV events, which contain no requests, lookups or block ids"
        raise UsageError(f"{path} is {what}: {do_not_apply(names)}")
    return True


def open_capture(path: Path, model: str | None) -> CaptureReader:
    """Open a recording. Raises: UsageError if text is requested but it has no token ids."""
    reader = CaptureReader(path)
    if model is not None and not reader.has_tokens:
        raise UsageError(f"{path} has no token ids to decode", hint="record with --tokens")
    return reader


def fold_capture(reader: CaptureReader, watch: Callable[[], LargerCache] | None = None) -> KVState:
    """The state at the end of a recording. Prints its notes on stderr."""
    state = KVState(reader.sources, keep_tokens=True, watch=watch)
    for frames, time_s, source in reader:
        state.take(frames, time_s, source)
    say_notes(reader.notes)
    return state


def kv_decoder(model: str) -> Decode:
    """Token ids to text, with a model's tokenizer. Ids outside its vocabulary stay numbers."""
    return _decode_with(_tokenizer_of(model))


def _tokenizer_of(model: str) -> "Tokenizer":
    from pagedcli.batch.tokenizer import Tokenizer

    return Tokenizer(resolve_model(model, weights=False))


def _decode_with(tokenizer: "Tokenizer") -> Decode:
    def decode(ids: tuple[int, ...]) -> str:
        try:
            return tokenizer.decode(ids)
        except OverflowError:  # from the network
            return " ".join(map(str, ids))

    return decode


def print_capture(path: Path, model: str | None, format_: Format, *, in_full: bool = False) -> None:
    """What `attach` prints at its end; `in_full`: also why blocks were recomputed, and what would have helped."""
    state, answer, tables = _judged(open_capture(path, model), model, in_full=in_full)
    print_summary(answer, tables, state, format_)


def _judged(reader: CaptureReader, model: str | None, *, in_full: bool) -> tuple[KVState, list[str], list[Table]]:
    """The state at the end of a recording, what is said of it and its tables."""
    from pagedcli.cli.cures import seen_cures  # loads numpy, without which a server is watched

    state, watchers = fold_with_curve(reader)
    tokenizer = None if model is None else _tokenizer_of(model)
    lookups = read_lookups(CaptureReader(reader.path), keep_tokens=reader.has_tokens)
    decode = None if tokenizer is None else _decode_with(tokenizer)
    told = [cure.text for cure in seen_cures(lookups, tokenizer)]
    answer, tables = summary(state, decode, curve(watchers), cures=told, in_full=in_full)
    return state, answer, [*tables, *_salts(lookups)]


_MOST_SALTS = 20


def _salts(found: Lookups) -> list[Table]:
    """The hit rates of salts, if a request has one."""
    title = "Hit rate by cache_salt or adapter, of requests that stored a block"
    rows = hits_by_salt(found)
    return [table(SaltRow, "salts", title, rows, max_shown=_MOST_SALTS)] if rows else []


def fold_with_curve(reader: CaptureReader) -> tuple[KVState, list[LargerCache]]:
    """The state at the end, and what larger caches would have kept, per tree."""
    watchers: list[LargerCache] = []

    def watch() -> LargerCache:
        watchers.append(LargerCache())
        return watchers[-1]

    return fold_capture(reader, watch), watchers


def replay_capture(path: Path, step: int | None, *, as_json: bool, every_step: bool) -> None:
    """The tree through time: one message, all of them, or on a terminal the application."""
    reader = CaptureReader(path)
    if step is not None:
        _print_step(reader, step, as_json=as_json)
    elif as_json:
        for row in _rows(reader):
            print(msgspec.json.encode(row).decode())
    elif is_interactive() and not every_step:
        _play(reader)
    else:
        for row in _rows(reader):
            print(_line(row))
    say_notes(reader.notes)


def _play(reader: CaptureReader) -> None:
    from pagedcli.app.kv_app import CapturePlayer, KVApp

    KVApp(CapturePlayer(reader, reader.sources), f"pagedcli trace {reader.path.name}").show()


def _rows(reader: CaptureReader) -> Iterator[dict[str, Any]]:
    state = KVState(reader.sources)
    before = dict.fromkeys(("num_stored", "num_removed", "num_tokens_again"), 0)
    num_notes = 0
    for number, (frames, time_s, source) in enumerate(reader):
        state.take(frames, time_s, source)
        after = {name: state.total(name) for name in before}
        again = sum(sum(tree.num_again.values()) for tree in state.trees)
        yield {
            "message": number, "time_s": time_s, "source": source,
            "num_stored_blocks": after["num_stored"] - before["num_stored"],
            "num_removed_blocks": after["num_removed"] - before["num_removed"],
            "num_tokens_computed_twice": after["num_tokens_again"] - before["num_tokens_again"],
            "num_blocks_stored_again": again, "num_resident_blocks": state.num_resident,
            "notes": list(state.notes)[num_notes:] if len(state.notes) < 200 else list(state.notes)[-1:],
        }  # fmt: skip
        before, num_notes = after, len(state.notes)


def _line(row: dict[str, Any]) -> str:
    time_s = "-" if row["time_s"] is None else f"{row['time_s']:.3f} s"
    twice = f", {row['num_tokens_computed_twice']:,} tokens twice" if row["num_tokens_computed_twice"] else ""
    changes = f"stored {row['num_stored_blocks']:,}, removed {row['num_removed_blocks']:,}{twice}"
    notes = "".join(f"; {one_line(note)}" for note in row["notes"])
    return f"message {row['message']:,} at {time_s}: {changes}; resident {row['num_resident_blocks']:,}{notes}"


def _print_step(reader: CaptureReader, step: int, *, as_json: bool) -> None:
    state, last = KVState(reader.sources, keep_tokens=True), -1
    for last, (frames, time_s, source) in enumerate(reader):
        state.take(frames, time_s, source)
        if last == step:
            _, tables = summary(state, None)
            print_tables(tables, Format.JSON if as_json else Format.TABLE, facts=facts(state))
            return
    raise UsageError(f"there is no message {step}: the last message of {reader.path} is {last}")


_MOST_POINTS = 600


def capture_page(path: Path, model: str | None) -> bytes:
    """The HTML page of a recording; prefixes as text if a model is given and tokens were recorded."""
    _, answer, tables = _judged(open_capture(path, model), model, in_full=True)
    history = residency(CaptureReader(path))
    chart = _chart(history) if history else ""
    said = pages.section("Verdict", *(f"<p>{escape(one_line(line))}</p>" for line in answer))
    shown = (pages.as_html(table) for table in tables if table.rows)
    body = "\n".join([said, chart, *shown])
    return pages.html_page(f"KV events of {one_line(path.name)}", body)


def residency(reader: CaptureReader) -> list[tuple[float, int]]:
    """(seconds, blocks resident) after each message that has a time; of many, evenly chosen ones and the peak."""
    state, rows = KVState(reader.sources), []
    for frames, time_s, source in reader:
        state.take(frames, time_s, source)
        if time_s is not None:
            rows.append((time_s, state.num_resident))
    if len(rows) <= _MOST_POINTS:
        return rows
    peak = max(range(len(rows)), key=lambda place: rows[place][1])
    chosen = {round(i * (len(rows) - 1) / (_MOST_POINTS - 1)) for i in range(_MOST_POINTS)} | {peak}
    return [rows[place] for place in sorted(chosen)]


def _chart(history: Sequence[tuple[float, int]]) -> str:
    start, end = history[0][0], history[-1][0]
    top = max(num_blocks for _, num_blocks in history) or 1
    chart = pages.LineChart((start, end), top, height=200)
    ticks = [(start, (f"{start:,.1f} s",)), (end, (f"{end:,.1f} s",))]
    parts = [*chart.axes(ticks, [(0, "0"), (top, f"{top:,}")]), chart.line(history)]
    text = f"<p>at most {top:,}, over {end - start:,.1f} seconds</p>"
    return pages.section("Blocks resident", text, chart.svg(parts, "Blocks resident"))
