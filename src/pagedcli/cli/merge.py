"""`pagedcli merge`: the outputs of all shards of a run become one file."""

from pathlib import Path
from typing import Annotated

import typer

from pagedcli.cli.session import EXIT_ERROR_ROWS, EXIT_OK
from pagedcli.cli.terminal import say
from pagedcli.errors import UsageError


def merge(
    shards: Annotated[list[Path], typer.Argument(metavar="OUT...", help="What generate --shard wrote, in any order.")],
    *,
    output_file: Annotated[Path, typer.Option("-o", "--output-file", help="The merged file.", show_default=False)],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output.")] = False,
    allow_duplicate_ids: Annotated[
        bool, typer.Option("--allow-duplicate-ids", help="Keep rows whose id another shard has, too.")
    ] = False,
) -> None:
    """Put the outputs of all shards of a run together, in the order of the input.

    Every shard must be there once, finished, and of the same input and settings: beside each OUT its run has left
    OUT.shard, which says so. Rows are copied as they are.

    \b
    Examples:
      pagedcli generate prompts.jsonl --shard 1/2 -o a.jsonl      (and 2/2 -o b.jsonl on another machine)
      pagedcli merge a.jsonl b.jsonl -o out.jsonl

    Exit codes: 0 all rows are good, 1 a shard is damaged, 2 the files are not the shards of one run, 3 there are error
    rows.
    """
    from pagedcli.batch.merge import merge_shards

    if output_file in shards:
        raise UsageError(f"{output_file} is one of the shards")
    if output_file.exists() and not overwrite:
        raise UsageError(f"the output {output_file} exists already", hint="use --overwrite, or another -o")
    merged = merge_shards(shards, output_file, allow_duplicate_ids=allow_duplicate_ids)
    order = "input order" if merged.in_input_order else "one shard after the other, as the rows were completed"
    say(f"{merged.num_rows:,} rows of {len(shards):,} shards, {order}; {merged.num_failed:,} failed")
    say(f"rows: {output_file}")
    raise typer.Exit(EXIT_ERROR_ROWS if merged.num_failed else EXIT_OK)
