"""One block of a recorded run: `trace RUN --block N --step S` at a step, `explain --block N` through the whole run."""

from pathlib import Path

from pagedcli.answers.why import why_of_block
from pagedcli.cli.decoder import recorded_decoder
from pagedcli.show.block_tables import block_facts, tables_at_step, tables_of_run
from pagedcli.show.tables import Format, print_tables
from pagedcli.show.terminal import say_notes
from pagedcli.trace.files import TraceReader
from pagedcli.views.block_life import lived


def print_block_at(trace: Path, block_id: int, step: int | None, format_: Format) -> None:
    """Print the block at a step, as its forward pass sees the cache; None: at the end."""
    _print(trace, block_id, step, None, format_, is_at_step=True)


def explain_block(trace: Path, block_id: int, tokenizer: str | None, format_: Format) -> None:
    """Print who held the block through the run, its contents and its story."""
    _print(trace, block_id, None, tokenizer, format_, is_at_step=False)


def _print(
    trace: Path, block_id: int, step: int | None, tokenizer: str | None, format_: Format, *, is_at_step: bool
) -> None:
    reader = TraceReader(trace)
    life, state = lived(reader, block_id, step)
    if step is None:
        say_notes(reader.notes)
    decode = recorded_decoder(trace, tokenizer)
    facts = block_facts(life, state, decode)
    tables = tables_at_step(life, state, facts) if is_at_step else tables_of_run(life, state, decode)
    if format_ is Format.CSV and not is_at_step:
        tables = tables[:1]
    print_tables(tables, format_, facts=facts, story=[why_of_block(life, state)])
