"""The share of KV blocks that samples and beams save by sharing, as Kwon et al. (SOSP 2023) measured it for the lengths
of Alpaca: 19 prompt and 58 output tokens in blocks of 16. python scripts/beam_sharing.py

The share is 1 - blocks in use / entries of all block tables, summed over the steps of a run with the built-in model.
"""

import json
from pathlib import Path

from pagedcli import LLM, SamplingParams
from pagedcli.trace.fold import Fold
from pagedcli.trace.state import PoolState

PROMPTS = Path(__file__).resolve().parents[1] / "examples" / "prompts.jsonl"
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS, NUM_PROMPTS = 19, 58, 16


def share_saved(params: SamplingParams) -> float:
    """The figures of one run. Different prompts share nothing: each has a salt of its own."""
    fold = Fold(PoolState())
    in_use = entries = 0

    def emit(event: object) -> None:
        nonlocal in_use, entries
        fold(event)
        if type(event).__name__ == "StepScheduled":
            in_use += fold.state.num_used_blocks
            entries += fold.state.num_references

    llm = LLM(emit=emit, max_num_seqs=128)
    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    text = " ".join(line["prompt"] for line in lines if "prompt" in line)
    ids = llm.tokenizer.encode(text)[: NUM_PROMPTS * NUM_PROMPT_TOKENS]
    prompts = [
        {"prompt_token_ids": ids[start : start + NUM_PROMPT_TOKENS], "cache_salt": str(start)}
        for start in range(0, len(ids), NUM_PROMPT_TOKENS)
    ]
    llm.generate(prompts, params, use_tqdm=False)
    return 1 - in_use / entries


def main() -> None:
    print("sequences  parallel samples  beams")
    for width in (2, 4, 6):
        common = {"max_tokens": NUM_OUTPUT_TOKENS, "ignore_eos": True, "n": width}
        samples = share_saved(SamplingParams(**common, temperature=1.0, seed=0))
        beams = share_saved(SamplingParams(**common, beam_width=width))
        print(f"{width:9}  {samples:16.1%}  {beams:5.1%}")


if __name__ == "__main__":
    main()
