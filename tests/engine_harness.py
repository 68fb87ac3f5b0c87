"""Prompts for an engine, and a run that checks the block pool after each step."""

import random
import time

from pagedcli.config import EngineConfig
from pagedcli.runner.llm_engine import LLMEngine


class FirstEight:
    """A guide that allows eight tokens."""

    allowed_tokens = b"\xff" + bytes(39)

    def accept(self, token_id):
        pass

    @classmethod
    def find_allowed(cls, guides):
        return [False] * len(guides)


def ragged_prompts(num_prompts=16, vocab_size=320, seed=0):
    """Prompts of 1 to 60 tokens; half of them share a prefix of 24."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, vocab_size) for _ in range(24)]
    prompts = [[rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 36))] for _ in range(num_prompts)]
    return [shared + prompt if i % 2 else prompt for i, prompt in enumerate(prompts)]


def run(engine, prompts, params):
    """Token ids of all samples of all prompts, in order; `params` is one for all or a list."""
    params = params if isinstance(params, list) else [params] * len(prompts)
    for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), prompt, param)
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id] = output
        engine.cache.check(engine.scheduler.running)
    assert engine.block_manager.num_free_blocks == engine.plan.num_blocks
    return [[sample.token_ids for sample in outputs[str(i)].samples] for i in range(len(prompts))]


def make_engine(path, *, emit=None, trace_tokens=False, clock_ns=time.perf_counter_ns, **config):
    config = EngineConfig(model=str(path), device="cpu", **{"dtype": "float32", "max_num_seqs": 16, **config})
    return LLMEngine(config, emit=emit, trace_tokens=trace_tokens, clock_ns=clock_ns)
