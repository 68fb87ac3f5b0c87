"""Lists of token-id prompts with output lengths, the same on every machine, and the shortest time that a machine's
memory and arithmetic allow for each. Free of torch.

W1-W7 are those that other engines were measured on; nano-vllm's is its own bench.py. Floors count per step, for linear
layers and for attention each, the larger of bytes over bandwidth and operations over the rate: every linear weight read
once per step, each distinct byte of K and V once, all prompts computed in one packed step, and of a mixture of experts
those that the step's tokens go to, as many as a router without preferences would pick.
"""

import random
from dataclasses import dataclass

from pagedcli.core.prefixes import num_equal
from pagedcli.errors import UsageError
from pagedcli.models.footprint import Footprint
from pagedcli.models.spec import ModelSpec
from pagedcli.planning.cards import Roofline

FIRST_ID, LAST_ID = 10, 10000  # token ids are drawn from [FIRST_ID, LAST_ID)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that all arrive at once. Lengths in tokens."""

    name: str
    about: str
    prompts: list[list[int]]
    output_lens: list[int]
    prefix_caching: bool
    shape: str  # the built-in shape that a preset is defined on

    @property
    def max_len(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(len(prompt) + n for prompt, n in zip(self.prompts, self.output_lens, strict=True))

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


@dataclass(frozen=True, slots=True)
class RandomSpec:
    """A random workload: every prompt is a shared prefix plus its own tokens."""

    num_prompts: int
    input_len: int  # own tokens of a prompt, the most
    output_len: int  # the most
    range_ratio: float = 1.0  # lengths are drawn evenly from [ratio * len, len]
    prefix_len: int = 0  # tokens that all prompts share
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_prompts < 1 or self.input_len < 1 or self.output_len < 1 or self.prefix_len < 0:
            raise UsageError("--num-prompts, --input-len and --output-len must be at least 1, --prefix-len at least 0")
        if not 0 < self.range_ratio <= 1:
            raise UsageError(f"--range-ratio is {self.range_ratio}, allowed: above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class Preset:
    """How a preset is drawn: lengths from [low, high]."""

    about: str
    num_prompts: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    prefix_len: int = 0
    shape: str = "qwen3-0.6b"


PRESETS = {
    "W1": Preset("decode-heavy: 32 requests, 64 in, 128 out", 32, (64, 64), (128, 128)),
    "W2": Preset("mixed: 32 requests, 25-256 in, 25-256 out", 32, (25, 256), (25, 256)),
    "W3": Preset("prefill-heavy: 16 requests, 512 in, 8 out", 16, (512, 512), (8, 8)),
    "W4": Preset("shared prefix: 32 requests, 512 shared + 32 own in, 32 out", 32, (32, 32), (32, 32), 512),
    "W5": Preset("single stream: 1 request, 128 in, 64 out", 1, (128, 128), (64, 64)),
    "W6": Preset("long context: 8 requests, 2048 in, 32 out", 8, (2048, 2048), (32, 32)),
    "W7": Preset(
        "many short ones: 256 requests, 16-64 in, 32 out, small model", 256, (16, 64), (32, 32), 0, "qwen3-small"
    ),
    "nano-vllm": Preset("256 requests, 100-1024 in, 100-1024 out", 256, (100, 1024), (100, 1024)),
}


def preset_workload(name: str, salt: int = 0) -> Workload:
    """A preset by name. `salt` changes the tokens, not the lengths. Raises: UsageError for an unknown name."""
    preset = PRESETS.get(name)
    if preset is None:
        raise UsageError(f"there is no preset {name!r}", hint="use one of " + ", ".join(PRESETS))
    lengths = random.Random(0)
    if name == "nano-vllm":  # its bench.py draws a prompt's length and its tokens in turn, then the output lengths
        prompts = [[lengths.randint(0, 10000) for _ in range(lengths.randint(100, 1024))] for _ in range(256)]
        outputs = [lengths.randint(100, 1024) for _ in range(256)]
        return Workload(name, preset.about, prompts, outputs, True, preset.shape)
    inputs = [_length(lengths, preset.input_len) for _ in range(preset.num_prompts)]
    outputs = [_length(lengths, preset.output_len) for _ in range(preset.num_prompts)]
    prompts = _prompts(random.Random(1000 + salt), inputs, preset.prefix_len)
    return Workload(name, preset.about, prompts, outputs, preset.prefix_len > 0, preset.shape)


def random_workload(spec: RandomSpec, salt: int = 0) -> Workload:
    """The workload of a spec. `salt` changes the tokens, not the lengths."""
    lengths = random.Random(spec.seed)
    low_in, low_out = (max(1, round(spec.range_ratio * n)) for n in (spec.input_len, spec.output_len))
    inputs = [_length(lengths, (low_in, spec.input_len)) for _ in range(spec.num_prompts)]
    outputs = [_length(lengths, (low_out, spec.output_len)) for _ in range(spec.num_prompts)]
    prompts = _prompts(random.Random(1000 + spec.seed + salt), inputs, spec.prefix_len)
    about = f"{spec.num_prompts} requests, {low_in}-{spec.input_len} in, {low_out}-{spec.output_len} out"
    if spec.prefix_len:
        about += f", {spec.prefix_len} shared"
    return Workload("random", about, prompts, outputs, spec.prefix_len > 0, "qwen3-0.6b")


def _length(source: random.Random, bounds: tuple[int, int]) -> int:
    """Draws nothing for equal bounds, so presets with fixed lengths keep their tokens."""
    return bounds[0] if bounds[0] == bounds[1] else source.randint(*bounds)


def _prompts(source: random.Random, lengths: list[int], prefix_len: int) -> list[list[int]]:
    def tokens(count: int) -> list[int]:
        return [source.randrange(FIRST_ID, LAST_ID) for _ in range(count)]

    prefix = tokens(prefix_len)
    return [prefix + tokens(count) for count in lengths]


def within(prompt: list[int], vocab_size: int) -> list[int]:
    """The prompt of a workload for a model with a smaller vocabulary: ids outside of it wrap around."""
    first = min(FIRST_ID, vocab_size - 1)
    return [token if token < vocab_size else first + (token - first) % (vocab_size - first) for token in prompt]


@dataclass(frozen=True, slots=True)
class Floor:
    """Shortest times, in seconds."""

    prefill_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


def workload_floor(
    spec: ModelSpec, weights: Footprint, workload: Workload, roofline: Roofline, *, kv_itemsize: float = 2
) -> Floor:
    """The floor of a workload whose requests all start at once."""

    def linear(tokens: int, sampled: int) -> float:
        flops = 2 * (weights.active_parameters * tokens + weights.head.parameters * sampled)
        return roofline.seconds(weights.active_bytes(tokens) + weights.head.num_bytes, flops)

    sizes = sum(mixer.head_dim for mixer in spec.attentions)
    kept = sum(mixer.num_kv_heads * mixer.head_dim for mixer in spec.attentions if mixer.keeps)

    def attention(distinct_tokens: int, seen_pairs: int) -> float:
        num_bytes = 2 * distinct_tokens * kept * kv_itemsize
        return roofline.seconds(num_bytes, 4 * seen_pairs * spec.num_heads * sizes)

    shared = _shared_prefix(workload.prompts) if workload.prefix_caching else 0
    own = [len(prompt) - shared for prompt in workload.prompts]
    pairs = shared * (shared + 1) // 2 + sum(n * shared + n * (n + 1) // 2 for n in own)
    computed = shared + sum(own)
    prefill_s = linear(computed, len(own)) + attention(computed, pairs)
    decode_s = 0.0
    for step in range(1, max(workload.output_lens)):
        contexts = [n + step for n, out in zip(own, workload.output_lens, strict=True) if out > step]
        decode_s += linear(len(contexts), len(contexts))
        decode_s += attention(shared + sum(contexts), sum(contexts) + shared * len(contexts))
    return Floor(prefill_s, decode_s)


def _shared_prefix(prompts: list[list[int]]) -> int:
    """Leading tokens that all prompts have in common; 0 for a single one."""
    if len(prompts) < 2:
        return 0
    return num_equal(min(prompts), max(prompts))
