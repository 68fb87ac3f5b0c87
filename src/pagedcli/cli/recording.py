"""Recordings of KV events as subjects of the commands: `attach`, `trace`, `explain`, and its page."""

from pathlib import Path

import msgspec

from pagedcli import app
from pagedcli.answers.why import Reasons
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.cli.options import do_not_apply
from pagedcli.errors import UsageError
from pagedcli.kvevents.capture import CaptureReader, is_capture
from pagedcli.kvevents.fold import KVState
from pagedcli.kvevents.lookups import Lookups
from pagedcli.kvevents.tree import SIZES
from pagedcli.models.hub import resolve_model
from pagedcli.show.kv_tables import facts, kv_page, message_line, message_rows, print_summary, summary
from pagedcli.show.tables import Format, Table, print_tables
from pagedcli.show.terminal import is_interactive, say_notes
from pagedcli.trace.tokens import Decode


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


def kv_decoder(model: str) -> Decode:
    """Token ids to text, with a model's tokenizer. Ids outside its vocabulary stay numbers."""
    return _decode_with(_tokenizer_of(model))


def _tokenizer_of(model: str) -> Tokenizer:
    return Tokenizer(resolve_model(model, weights=False))


def _decode_with(tokenizer: Tokenizer) -> Decode:
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

    lookups = Lookups(has_ids=reader.has_tokens)
    state = KVState(reader.sources, keep_tokens=True, larger=SIZES, observe=lookups.take)
    for frames, time_s, source in reader:
        state.take(frames, time_s, source)
    say_notes(reader.notes)
    tokenizer = None if model is None else _tokenizer_of(model)
    decode = None if tokenizer is None else _decode_with(tokenizer)
    told = [cure.text for cure in seen_cures(lookups, tokenizer)]
    reasons = Reasons("", lookups.lookups(), lookups.block_size or 0)
    return state, *summary(state, decode, cures=told, reasons=reasons, in_full=in_full)


def replay_capture(path: Path, step: int | None, *, as_json: bool, every_step: bool) -> None:
    """The tree through time: one message, all of them, or on a terminal the application."""
    reader = CaptureReader(path)
    if step is not None:
        _print_step(reader, step, as_json=as_json)
    elif as_json:
        for row in message_rows(reader):
            print(msgspec.json.encode(row).decode())
    elif is_interactive() and not every_step:
        _play(reader)
    else:
        for row in message_rows(reader):
            print(message_line(row))
    say_notes(reader.notes)


def _play(reader: CaptureReader) -> None:
    app.kv_app.KVApp(app.kv_app.CapturePlayer(reader, reader.sources), f"pagedcli trace {reader.path.name}").show()


def _print_step(reader: CaptureReader, step: int, *, as_json: bool) -> None:
    state, last = KVState(reader.sources, keep_tokens=True), -1
    for last, (frames, time_s, source) in enumerate(reader):
        state.take(frames, time_s, source)
        if last == step:
            _, tables = summary(state, None)
            print_tables(tables, Format.JSON if as_json else Format.TABLE, facts=facts(state))
            return
    raise UsageError(f"there is no message {step}: the last message of {reader.path} is {last}")


def capture_page(path: Path, model: str | None) -> bytes:
    """The HTML page of a recording; prefixes as text if a model is given and tokens were recorded."""
    _, answer, tables = _judged(open_capture(path, model), model, in_full=True)
    return kv_page(path, answer, tables)
