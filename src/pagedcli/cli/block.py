"""One block of a recorded run: `trace RUN --block N`, with --step until a step, and `explain --block N`."""

from pathlib import Path

from pagedcli.answers.why import why_of_block
from pagedcli.cli.decoder import recorded_decoder
from pagedcli.show.block_tables import block_facts, block_tables
from pagedcli.show.tables import Format, print_tables
from pagedcli.show.terminal import say_notes
from pagedcli.trace.files import TraceReader
from pagedcli.views.block_life import lived


def print_block(trace: Path, block_id: int, step: int | None, tokenizer: str | None, format_: Format) -> None:
    """Print who held the block, and its contents, up to a step as its forward pass sees the cache; None: to the end."""
    reader = TraceReader(trace)
    life, state = lived(reader, block_id, step)
    if step is None:
        say_notes(reader.notes)
    decode = recorded_decoder(trace, tokenizer)
    facts = block_facts(life, state, decode)
    tables = block_tables(life, state, facts, decode)
    shown = tables[:1] if format_ is Format.CSV else tables
    print_tables(shown, format_, facts=facts, story=[why_of_block(life, state)])
