"""`pagedcli merge`: merge the outputs of all shards of a run."""

from pathlib import Path
from typing import Annotated

import typer

from pagedcli import distributed
from pagedcli.batch.columns import kind_of
from pagedcli.batch.merge import merge_shards
from pagedcli.errors import EXIT_BAD_ROWS, UsageError
from pagedcli.files import check_files
from pagedcli.printable import plural
from pagedcli.show.terminal import say


def merge(
    shards: Annotated[
        list[Path],
        typer.Argument(
            metavar="OUT...", help="Outputs of generate --shard, in any order, or the folder of generate --ray."
        ),
    ],
    *,
    output_file: Annotated[
        Path, typer.Option("-o", "--output-file", help="File for the merged rows.", show_default=False)
    ],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output.")] = False,
    allow_duplicate_ids: Annotated[
        bool, typer.Option("--allow-duplicate-ids", help="Keep rows whose id is in more than one shard.")
    ] = False,
) -> None:
    """Merge the outputs of all shards of a run, or the parts of a distributed run, in input order.

    Every shard must be given exactly once and be finished; OUT.run.json next to each OUT must show the same input and
    settings. Rows are copied unchanged.

    \b
    Examples:
      pagedcli generate prompts.jsonl --shard 1/2 -o a.jsonl      (and 2/2 -o b.jsonl on another machine)
      pagedcli merge a.jsonl b.jsonl -o out.jsonl
      pagedcli merge parts -o out.jsonl                           (after generate prompts.jsonl --ray -o parts)

    Exit codes: 0 success, 1 a shard is damaged, 2 the files are not the shards of one run, 3 there are error rows.
    """
    reads = {f"the shard {path}": path for path in shards}
    check_files(reads, {"the output": output_file}, overwrite=overwrite)
    if len(shards) == 1 and shards[0].is_dir():
        merged, what = distributed.merge.merge_parts(shards[0], output_file, overwrite=overwrite), str(shards[0])
    elif (kind := kind_of(output_file)) != "jsonl":
        raise UsageError(f"shards are merged into JSONL, not {kind}: -o {output_file}", hint="-o out.jsonl")
    else:
        merged = merge_shards(shards, output_file, overwrite=overwrite, allow_duplicate_ids=allow_duplicate_ids)
        what = f"{len(shards):,} shards"
    order = "input order" if merged.in_input_order else "shard after shard, in order of completion"
    say(f"{plural(merged.num_rows, 'row')} of {what}, {order}; {merged.num_failed:,} failed")
    say(f"rows: {output_file}")
    raise typer.Exit(EXIT_BAD_ROWS if merged.num_failed else 0)
