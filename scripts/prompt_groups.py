"""Steps that mix prompts with decodes, by min_prefill_tokens: python scripts/prompt_groups.py [ROWS]

Runs the real scheduler without a model on jobs whose rows have a tenth to all of so many tokens, at 256 sequences. The
times are not measured: they follow from assumed times of Qwen3-0.6B's steps on an H100 (GPU work by bytes and FLOP,
host work by launch), and only their ratio says something.
"""

import random
import sys
from array import array

from pagedcli.core.scheduler import ScheduledStep, Scheduler
from pagedcli.planning.step_time import StepWork
from pagedcli.simulation.requests import TraceRequest, Workload
from pagedcli.simulation.run import Schedule, plan_for, simulate

FIXED_S, TOKEN_S, KV_TOKEN_S = 1.6e-3, 2.4e-6, 114_688 / 2.75e12  # of a step's GPU work; KV: 28 layers, bf16
GRAPH_HOST_S, EAGER_HOST_S = 1.2e-3, 5.5e-3  # the host's work of a step; GPU and host overlap

JOBS = ((1024, 1024, 38_000), (1024, 1024, 12_000), (128, 256, 38_000))  # most tokens in and out, and the pool


class Assumed:
    """Assumed times of steps, and how many of them mix prompts with decodes."""

    num_mixed = 0

    def __call__(self, work: ScheduledStep, scheduler: Scheduler) -> int:
        step = StepWork.of(work, scheduler)
        self.num_mixed += 0 < step.num_chunks < len(work.seqs)
        attended = step.attended_by_decodes + step.attended_by_prompts / 1000  # prompts read K and V once per tile
        device_s = FIXED_S + step.num_tokens * TOKEN_S + attended * KV_TOKEN_S
        return round(1e9 * max(device_s, EAGER_HOST_S if step.num_chunks else GRAPH_HOST_S))


def requests(num_rows: int, most_prompt: int, most_output: int) -> list[TraceRequest]:
    rng = random.Random(0)

    def length(most: int) -> int:
        return rng.randint(most // 10, most)

    return [
        TraceRequest(
            str(row),
            None,
            num_prompt,
            length(most_output),
            token_ids=array("q", (rng.randrange(1000) for _ in range(num_prompt))),
        )
        for row in range(num_rows)
        for num_prompt in [length(most_prompt)]
    ]


def main() -> None:
    num_rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    print("prompt  output     pool   least   steps   mixed   mixed %   assumed s")
    for most_prompt, most_output, num_blocks in JOBS:
        for least in (0, 512, 1024, 2048):
            time, work = Assumed(), Workload(requests(num_rows, most_prompt, most_output))
            plan = plan_for(
                work, num_blocks=num_blocks, block_size=16, max_num_seqs=256, max_num_batched_tokens=16384,
                min_prefill_tokens=least,
            )  # fmt: skip
            run = simulate(work, plan, Schedule(step_time=time))
            print(
                f"{most_prompt:>6,} {most_output:>7,} {num_blocks:>8,} {least:>7,} {run.facts.num_steps:>7,}"
                f" {time.num_mixed:>7,} {time.num_mixed / run.facts.num_steps:>9.1%} {run.total_s:>11.2f}"
            )


if __name__ == "__main__":
    main()
