"""What the events of a cache say: what was computed again although it had been cached, and where prompts diverge; with
what to change. Used by `attach`, `explain` and the page of a recording.
"""

from collections.abc import Sequence

from pagedcli.kvevents.fold import KVState
from pagedcli.kvevents.tree import (
    CurvePoint,
    Decode,
    Shape,
    Shapes,
    branch_label,
    largest_branches,
)
from pagedcli.printable import capitalized, percent_text, plural

WORTH_SAYING = 0.01  # share of the blocks that were stored
_MOST_OF_IT = 0.9  # share of what the largest cache would have kept
_MOST_TREES, _MOST_BRANCHES = 8, 12
_MORE_MEMORY = (
    "give the cache more memory (vLLM: --gpu-memory-utilization, SGLang: --mem-fraction-static,"
    " TensorRT-LLM: free_gpu_memory_fraction)"
)


def verdict(
    state: KVState,
    points: Sequence[CurvePoint] | None,
    decode: Decode | None,
    shapes: Shapes | None = None,
    *,
    cures: Sequence[str] = (),
) -> list[str]:
    """What was stored again, and which prompts diverge where. points: what larger caches would have kept, if known.
    cures: what to change about the prompts, as all commands say it; without any the blocks tell where most diverge."""
    num_stored = state.total("num_stored")
    if not num_stored:
        return ["No block was stored, so there is nothing to judge."]
    evicted = sum(tree.num_again["evicted"] for tree in state.trees)
    again = _again(num_stored, evicted, state.num_alone["evicted"], points)
    if cures:
        return [again, *cures]
    trees = sorted(state.trees, key=lambda tree: -len(tree.nodes))[:_MOST_TREES]
    shape_of = shapes or Shapes()
    return [again, f"{capitalized(_of_forks([shape_of(tree, with_gone=True) for tree in trees], decode))}."]


def _again(num_stored: int, evicted: int, alone: int, points: Sequence[CurvePoint] | None) -> str:
    again, answers = evicted - alone, ""
    if alone:
        came_back = plural(alone, "more block" if again else "block")
        answers = f"; {came_back} came back alone, as answers do that are generated again: a cache saves none of these"
    if not again:
        return f"No block of a prompt was stored again after an eviction{answers}."
    kept = ""
    if points and (most := points[-1].num_prompt_blocks_kept):
        enough = next(point for point in points if point.num_prompt_blocks_kept >= _MOST_OF_IT * most)
        kept = (
            f"; {plural(enough.num_more_blocks, 'more block')} would have kept at least"
            f" {enough.num_prompt_blocks_kept:,} of these"
        )
    counts = f"{percent_text(again / num_stored)} of the stored blocks ({again:,} of {num_stored:,})"
    to_do = f"; {_MORE_MEMORY}" if again >= WORTH_SAYING * num_stored else ""
    return f"{counts} had been evicted before{kept}{answers}{to_do}."


def _of_forks(shapes: Sequence[Shape], decode: Decode | None) -> str:
    """The fork below which most tokens are, by the beginning of its prompts."""
    branches = [branch for shape in shapes for branch in largest_branches(shape, _MOST_BRANCHES)]
    forks = [branch for branch in branches if branch.num_children > 1]
    if not forks:
        return "no two prompts begin with the same block and diverge later"
    fork = max(forks, key=lambda branch: branch.num_tokens)
    num_blocks = fork.depth + len(fork.nodes) - 1
    return (
        f"prompts that begin with {branch_label(fork, decode)} diverge after {plural(num_blocks, 'block')}"
        f" into {fork.num_children:,} ways"
    )
