"""Cuts an input file into parts for workers, after one pass that checks every row. Used by the driver."""

from dataclasses import dataclass, field

from pagedcli.batch.intake import BatchOptions, Intake, Refused
from pagedcli.batch.lines import LineSource
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.core.limits import Limits
from pagedcli.distributed.partition import Ints, PrefixKeys

_PARTS_PER_WORKER = 8  # a whole part is the smallest piece that can be taken from a slow worker
_MAX_PART_BYTES = 32 * 2**20  # a worker keeps the lines of its parts in memory
MAX_PARTS = 500  # files that merge has open at once
_LARGEST_ID = 2**31


@dataclass(slots=True)
class InputPlan:
    """The result of one pass over an input."""

    keys: PrefixKeys
    duplicates: set[int] = field(default_factory=set)  # rows with the id of an earlier row
    ignored: dict[str, int] = field(default_factory=dict)  # field without effect -> lines
    num_bytes: int = 0

    def parts(self, num_workers: int) -> tuple[list[Ints], list[int]]:
        """The rows of each part, and the tokens that it has to compute."""
        ordered = self.keys.ordered()
        num_parts = max(_PARTS_PER_WORKER * num_workers, -(-self.num_bytes // _MAX_PART_BYTES))
        parts = ordered.parts(max(1, min(num_parts, MAX_PARTS, len(self.keys))))
        costs, start = [], 0
        for rows in parts:
            costs.append(int(ordered.costs[start : start + len(rows)].sum()))
            start += len(rows)
        return parts, costs


def plan_input(lines: LineSource, tokenizer: Tokenizer, options: BatchOptions, block_size: int) -> InputPlan:
    """Read and tokenize every row. Raises: PagedcliError if the input cannot be read."""
    plan = InputPlan(PrefixKeys(block_size))
    intake = Intake(tokenizer, options, Limits(block_size=block_size))
    for line in lines:
        if options.limit is not None and line.index >= options.limit:
            break
        plan.num_bytes += len(line.content or b"")
        taken = intake.prepare(line)
        if taken is None or isinstance(taken, Refused):
            plan.keys.add([], 0)
            if isinstance(taken, Refused) and taken.error.code == "duplicate_id":
                plan.duplicates.add(line.index)
        else:
            first, *more = taken.prompts
            token_ids = first.token_ids
            if not all(0 <= token_id < _LARGEST_ID for token_id in token_ids):
                token_ids = []  # the engine will reject it
            num_more = sum(len(prompt.token_ids) for prompt in more)
            num_new = sum((prompt.params.max_tokens or 0) * prompt.params.num_sequences for prompt in taken.prompts)
            plan.keys.add(token_ids, num_more + num_new, taken.cache_salt)
    plan.ignored = dict(intake.parser.ignored)
    return plan
