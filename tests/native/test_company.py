"""A request's tokens, beams and log-probabilities are the same bits whatever the block size, the chunks, the size of
the batch and the other requests: on this processor's instructions and on emulated tile registers."""

import pytest
from conftest import forget_library, needs_compiler
from harness.engine import ragged_prompts
from model_zoo import tiny_model

from pagedcli.config import EngineConfig
from pagedcli.native import build, load_library
from pagedcli.native.paths import Path, bf16_path
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams

pytestmark = needs_compiler

# in bfloat16 many logits are equal: what is listed depends on how ties are ordered
KINDS = [
    SamplingParams(beam_width=4, n=4, max_tokens=6, length_penalty=0.5),
    SamplingParams(temperature=0, max_tokens=5, logprobs=4, ignore_eos=True),
    SamplingParams(beam_width=2, n=2, max_tokens=6, logprobs=3),
    SamplingParams(temperature=0.9, seed=1, max_tokens=5, logprobs=20, top_k=30, top_p=0.8, n=2),
    SamplingParams(temperature=1.1, seed=2, max_tokens=5, logprobs=1, prompt_logprobs=2, min_p=0.05, top_p=0.9),
    SamplingParams(beam_width=3, n=1, max_tokens=4, stop_token_ids=[7]),
]
PROMPTS = [prompt * 2 for prompt in ragged_prompts(18, seed=5)]
ALL = range(len(PROMPTS))
# block size, chunk, sequences at once, rows; the second half is what a resumed run may have left to do
WAYS = [(1, 7, 4, ALL), (3, None, 8, ALL[9:]), (32, None, 4, ALL[::2]), (256, 5, 16, ALL), (16, 9, 4, ALL[:1])]


@pytest.fixture(scope="module", params=["this processor", "emulated tiles"])
def emulated(request):
    """Whether tile registers are emulated."""
    emulated = request.param == "emulated tiles"
    with pytest.MonkeyPatch.context() as patch:
        if emulated:
            patch.setenv(build.EMULATE_TILES, "1")
        forget_library()
        if emulated:
            assert bf16_path(load_library().functions) == Path.BF16_TILES
        yield emulated
    forget_library()


def run(path, rows, *, block_size, chunk, max_num_seqs, **config):
    limits = {"block_size": block_size, "chunked_prefill_size": chunk, "max_num_seqs": max_num_seqs}
    limits |= {"max_model_len": 192, "num_kvcache_blocks": 2000 // block_size + 40}
    engine = LLMEngine(EngineConfig(model=str(path), dtype="bfloat16", device="cpu", **limits, **config))
    for row in rows:
        engine.add_request(str(row), PROMPTS[row], KINDS[row % len(KINDS)])
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {int(output.request_id): facts(output) for output in engine.step()}
    return outputs


def facts(output):
    samples = [(s.token_ids, s.score, listed(s.logprobs), s.finish_reason) for s in output.samples]
    return samples, listed(output.prompt_logprobs)


def listed(positions):
    return [None if each is None else (each.token_id, each.logprob, each.top) for each in positions or ()]


WINDOWS = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.quick("this processor-plain")
@pytest.mark.bits
@pytest.mark.parametrize(
    ("family", "sizes", "config"),
    [
        ("qwen3", {}, {}),
        ("gemma3", WINDOWS, {}),
        ("cohere2", {**WINDOWS, "num_hidden_layers": 2}, {}),
        ("deepseek_v3", {"kv_lora_rank": 64, "qk_rope_head_dim": 32}, {}),
        ("deepseek_v2", {}, {"kv_cache_dtype": "int8", "quantization": "int8"}),
        ("qwen3-moe", {"moe_intermediate_size": 64}, {"kv_cache_dtype": "int8", "quantization": "int8"}),
    ],
    ids=["plain", "windows", "attention beside an MLP", "latents", "latents and int8", "experts and int8"],
)
def test_rows_are_the_same_bits_in_any_company_block_size_and_chunk(emulated, family, sizes, config, tmp_path):
    path = tiny_model(family, tmp_path, **sizes)
    expected = run(path, ALL, block_size=16, chunk=None, max_num_seqs=8, **config)
    for block_size, chunk, max_num_seqs, rows in WAYS:
        found = run(path, rows, block_size=block_size, chunk=chunk, max_num_seqs=max_num_seqs, **config)
        different = [row for row in rows if found[row] != expected[row]]
        assert not different, (block_size, chunk, max_num_seqs)
