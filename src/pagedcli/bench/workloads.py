"""Lists of token-id prompts with output lengths, the same on every machine, and the shortest time that a machine's
memory and arithmetic allow for each. Free of torch.

W1-W7 are those that other engines were measured on; nano-vllm's is its own bench.py.
"""

import random
from dataclasses import dataclass

from pagedcli.core.prefixes import num_equal
from pagedcli.errors import UsageError
from pagedcli.models.footprint import Footprint
from pagedcli.models.spec import ModelSpec
from pagedcli.planning.cards import Roofline
from pagedcli.planning.floors import StepFloor
from pagedcli.printable import plural

FIRST_ID, LAST_ID = 10, 10000  # token ids are drawn from [FIRST_ID, LAST_ID)


@dataclass(frozen=True, slots=True)
class BenchWorkload:
    """Requests that all arrive at once. Lengths in tokens."""

    name: str
    about: str
    prompts: list[list[int]]
    output_lens: list[int]
    prefix_caching: bool
    shape: str  # built-in shape of its model

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
class Draw:
    """How a workload is drawn: every prompt is a shared prefix plus its own tokens."""

    about: str
    num_prompts: int
    input_len: tuple[int, int]  # fewest and most own tokens of a prompt, drawn evenly
    output_len: tuple[int, int]
    prefix_len: int = 0  # tokens that all prompts share
    shape: str = "qwen3-0.6b"
    seed: int = 0

    def workload(self, name: str, salt: int = 0) -> BenchWorkload:
        """`salt` changes the tokens, not the lengths."""
        lengths, source = random.Random(self.seed), random.Random(1000 + self.seed + salt)
        inputs = _lengths(lengths, self.num_prompts, self.input_len)
        outputs = _lengths(lengths, self.num_prompts, self.output_len)
        prefix = _tokens(source, self.prefix_len)
        prompts = [prefix + _tokens(source, count) for count in inputs]
        return BenchWorkload(name, self.about, prompts, outputs, self.prefix_len > 0, self.shape)


def _lengths(source: random.Random, count: int, bounds: tuple[int, int]) -> list[int]:
    """Draws nothing for equal bounds, so presets with fixed lengths keep their tokens."""
    return [bounds[0] if bounds[0] == bounds[1] else source.randint(*bounds) for _ in range(count)]


def _tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(FIRST_ID, LAST_ID) for _ in range(count)]


PRESETS = {
    "W1": Draw("decode-heavy: 32 requests, 64 in, 128 out", 32, (64, 64), (128, 128)),
    "W2": Draw("mixed: 32 requests, 25-256 in, 25-256 out", 32, (25, 256), (25, 256)),
    "W3": Draw("prefill-heavy: 16 requests, 512 in, 8 out", 16, (512, 512), (8, 8)),
    "W4": Draw("shared prefix: 32 requests, 512 shared + 32 own in, 32 out", 32, (32, 32), (32, 32), 512),
    "W5": Draw("single stream: 1 request, 128 in, 64 out", 1, (128, 128), (64, 64)),
    "W6": Draw("long context: 8 requests, 2048 in, 32 out", 8, (2048, 2048), (32, 32)),
    "W7": Draw(
        "many short ones: 256 requests, 16-64 in, 32 out, small model", 256, (16, 64), (32, 32), 0, "qwen3-small"
    ),
    "nano-vllm": Draw("256 requests, 100-1024 in, 100-1024 out", 256, (100, 1024), (100, 1024)),
}


def preset_workload(name: str, salt: int = 0) -> BenchWorkload:
    """A preset by name. `salt` changes the tokens, not the lengths. Raises: UsageError for an unknown name."""
    preset = PRESETS.get(name)
    if preset is None:
        raise UsageError(f"there is no preset {name!r}", hint="use one of " + ", ".join(PRESETS))
    if name != "nano-vllm":
        return preset.workload(name, salt)
    lengths = random.Random(0)  # its bench.py draws a prompt's length and its tokens in turn, then the output lengths
    prompts = [[lengths.randint(0, 10000) for _ in range(lengths.randint(100, 1024))] for _ in range(256)]
    outputs = [lengths.randint(100, 1024) for _ in range(256)]
    return BenchWorkload(name, preset.about, prompts, outputs, True, preset.shape)


def random_draw(
    num_prompts: int, input_len: int, output_len: int, *, range_ratio: float = 1.0, prefix_len: int = 0, seed: int = 0
) -> Draw:
    """Lengths are drawn evenly from [range_ratio * length, length]. Raises: UsageError."""
    if num_prompts < 1 or input_len < 1 or output_len < 1 or prefix_len < 0:
        raise UsageError("--num-prompts, --input-len and --output-len must be at least 1, --prefix-len at least 0")
    if not 0 < range_ratio <= 1:
        raise UsageError(f"--range-ratio is {range_ratio}, allowed: above 0 and at most 1")
    low_in, low_out = (max(1, round(range_ratio * n)) for n in (input_len, output_len))
    about = f"{plural(num_prompts, 'request')}, {low_in}-{input_len} in, {low_out}-{output_len} out"
    about += f", {prefix_len} shared" if prefix_len else ""
    return Draw(about, num_prompts, (low_in, input_len), (low_out, output_len), prefix_len, seed=seed)


def within(prompt: list[int], vocab_size: int) -> list[int]:
    """The prompt of a workload for a model with a smaller vocabulary: ids outside of it wrap around."""
    first = min(FIRST_ID, vocab_size - 1)
    return [token if token < vocab_size else first + (token - first) % (vocab_size - first) for token in prompt]


def workload_floor(
    spec: ModelSpec, weights: Footprint, workload: BenchWorkload, roofline: Roofline, *, kv_dtype: str = "bfloat16"
) -> float:
    """The floor in seconds of a workload whose requests all start at once, all prompts in one packed step."""
    floor = StepFloor.of(spec, weights, roofline, kv_dtype=kv_dtype)
    shares = workload.prefix_caching and len(workload.prompts) > 1
    shared = num_equal(min(workload.prompts), max(workload.prompts)) if shares else 0
    own = [len(prompt) - shared for prompt in workload.prompts]
    first = [(0, shared)] if shared else []
    queries = [*first, *((shared, num_tokens) for num_tokens in own)]
    total_s = floor.seconds(queries, len(own), num_repeated=shared * len(own))
    for step in range(1, max(workload.output_lens)):
        lengths = zip(own, workload.output_lens, strict=True)
        queries = [(shared + num_tokens + step - 1, 1) for num_tokens, num_output in lengths if num_output > step]
        total_s += floor.seconds(queries, len(queries), num_repeated=shared * (len(queries) - 1))
    return total_s
