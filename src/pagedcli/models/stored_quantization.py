"""How a quantized checkpoint stores its linear layers, and the formats that are read. Free of torch.

READABLE and REFUSED are what docs/models.md prints. models.quantization reads config.json, models.packed_formats makes
the layers.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Layout = Literal["gptq", "awq", "pack-quantized", "int-quantized", "float8", "mxfp4"]

# What is read: name -> what of it.
READABLE: Mapping[str, str] = {
    "compressed-tensors pack-quantized": "4 and 8 bits, in groups or per channel, symmetric or not, with act-order",
    "compressed-tensors int-quantized": "int8 weights, per channel or per tensor, symmetric or not",
    "compressed-tensors float-quantized": "FP8 e4m3, per tensor, per channel or in blocks",
    "compressed-tensors mxfp4-pack-quantized": "MXFP4: e2m1 in groups of 32 that share a power of 2",
    "compressed-tensors mixed-precision": "groups of layers, each in one of these formats",
    "gptq": "4 and 8 bits, in groups or per channel, act-order, gptq and gptq_v2; single layers with other bits",
    "awq": "4 bits, in groups, GEMM order",
    "auto-round": "4 and 8 bits in a layout of GPTQ, 4 bits in that of AWQ; single layers with other bits",
    "fp8": "FP8 e4m3, per tensor or in blocks",
    "fbgemm_fp8": "FP8 e4m3, per channel",
    "mxfp4": "MXFP4 experts: e2m1 in groups of 32 that share a power of 2",
}
# packing_format of AutoRound -> the layout that it equals, and what is added to stored zero points.
AUTO_ROUND: Mapping[str, tuple[Layout, int]] = {
    "auto_round:auto_gptq": ("gptq", 1),
    "auto_round": ("gptq", 0),
    "auto_round:gptqmodel": ("gptq", 0),
    "auto_round:auto_awq": ("awq", 0),
}
# What is known and not read: quant_method or compressed-tensors format -> what it is.
REFUSED: Mapping[str, str] = {
    "aqlm": "additive codebooks",
    "bitnet": "1.58-bit weights",
    "bitsandbytes": "4-bit NormalFloat or LLM.int8()",
    "eetq": "int8 in the order of a GPU kernel",
    "exl2": "mixed bits in the order of a GPU kernel",
    "exl3": "trellis codes",
    "fp_quant": "MXFP4 or NVFP4 weights",
    "gguf": "GGUF inside a Hugging Face folder",
    "higgs": "vector quantization",
    "hqq": "half-quadratic quantization",
    "marlin": "weights in the order of a GPU kernel",
    "marlin-24": "2:4 sparse weights in the order of a GPU kernel",
    "modelopt": "FP8 or NVFP4 weights of ModelOpt",
    "mxfp6-pack-quantized": "MXFP6 weights",
    "mxfp8-quantized": "MXFP8 weights",
    "nvfp4-pack-quantized": "NVFP4 weights",
    "quanto": "Quanto's own packings",
    "quark": "Quark's own packings",
    "quip": "codebooks with rotations",
    "sparse-24-bitmask": "2:4 sparse weights",
    "sparse-bitmask": "sparse weights",
    "spqr": "sparse outliers",
    "torchao": "torchao tensor subclasses",
    "vptq": "vector quantization",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """How linear layers of a checkpoint are stored: those that `covers` names."""

    method: str  # quant_method, with the format of compressed-tensors
    layout: Layout
    bits: int  # of a weight
    group_size: int | None = None  # inputs that share a scale; None: all inputs of an output feature
    block: tuple[int, int] | None = None  # float8: outputs and inputs that share a scale
    per_tensor: bool = False  # one scale for a whole module
    symmetric: bool = True
    act_order: bool = False  # the inputs of a group are not neighbours
    zero_offset: int = 0  # added to stored zero points: 1 in checkpoints of the first GPTQ convention
    scale_name: str = "weight_scale"  # of a float8 or int8 module
    targets: tuple[str, ...] = ()  # the only modules; empty: all linear layers
    skipped: tuple[str, ...] = ()  # modules stored unquantized; "re:" begins a regular expression

    def covers(self, module: str) -> bool:
        """Whether a linear layer, by its name in the checkpoint, is stored quantized."""
        if self.targets and not any(_matches(pattern, module) for pattern in self.targets):
            return False
        return not any(_matches(pattern, module) for pattern in self.skipped)

    @property
    def description(self) -> str:
        """What a person should know, e.g. "gptq, 4 bits in groups of 128, act-order"."""
        if self.block is not None:
            scales = f"in blocks of {self.block[0]} x {self.block[1]}"
        elif self.group_size is not None:
            scales = f"in groups of {self.group_size}"
        else:
            scales = "per tensor" if self.per_tensor else "per channel"
        number = {"float8": "FP8 e4m3", "mxfp4": "e2m1"}.get(self.layout, f"{self.bits} bits")
        return f"{self.method}, {number} {scales}{', act-order' if self.act_order else ''}"


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint is quantized: a linear layer has the first format that covers it; without one it is not
    quantized."""

    formats: tuple[StoredQuantization, ...]

    @property
    def method(self) -> str:
        """quant_method, with the format of compressed-tensors."""
        return self.formats[0].method

    @property
    def description(self) -> str:
        """What a person should know of each format."""
        return "; ".join(dict.fromkeys(stored.description for stored in self.formats))

    @property
    def act_order(self) -> bool:
        """Whether some layer groups inputs that are not neighbours."""
        return any(stored.act_order for stored in self.formats)

    def covers(self, module: str) -> bool:
        """Whether a linear layer, by its name in the checkpoint, is stored quantized."""
        return any(stored.covers(module) for stored in self.formats)


def _matches(pattern: str, module: str) -> bool:
    """A pattern from the name's beginning, or a run of whole parts of the name."""
    if pattern.startswith("re:"):
        return name_pattern(pattern[3:]).matches(module)
    return f".{pattern.strip('.')}." in f".{module}."


# ---------------------------------------------------------------------- patterns


_TOKEN = re.compile(
    r"(?P<atom>\\[dDwWsS]|\\[^A-Za-z0-9]|\[\^?\]?(?:[^\]\[\\]|\\.)*\]|[^\\\[\](){}|^$*+?])"
    r"|(?P<open>\((?:\?:|(?!\?)))|(?P<close>\))|(?P<or>\|)|(?P<anchor>[\^$])|(?P<repeat>[*+?])\??",
    re.DOTALL,
)
_MAX_PATTERN, _MAX_DEPTH = 2000, 50
_Build = Callable[[int], int]  # the state after a part of a pattern -> the state before it


class NamePattern:
    """A regular expression that begins where a name begins, matched in time that is linear in the name whatever the
    pattern: of all states that are possible after each character, which are kept from name to name.

    Made of characters, `.`, classes, groups, `|`, `*`, `+`, `?`, `^` and `$`: what files of checkpoints use.
    """

    def __init__(self, pattern: str) -> None:
        """Raises: ValueError that names what is not supported."""
        if len(pattern) > _MAX_PATTERN:
            raise ValueError(f"longer than {_MAX_PATTERN:,} characters")
        # by state: what it consumes, None if nothing; the states after it; "^" or "$" if it holds only there
        self._tests: list[Callable[[str], object] | None] = []
        self._next: list[tuple[int, ...]] = []
        self._anchors: list[str] = []
        self._tokens = [(kind, text, place) for kind, text, place in _tokens(pattern)][::-1]
        self._end = self._state()
        start = self._alternatives(0)(self._end)
        if self._tokens:
            raise ValueError(f"a ')' without '(' at character {self._tokens[-1][2]}")
        self._start = self._reachable({start}, "^")
        self._steps: dict[tuple[frozenset[int], str], frozenset[int]] = {}

    def matches(self, name: str) -> bool:
        """Whether the pattern matches a beginning of the name."""
        states = self._start
        for character in name:
            if self._end in states:
                return True
            key = (states, character)
            if key not in self._steps:
                after = {
                    target
                    for state in states
                    if (test := self._tests[state]) is not None and test(character)
                    for target in self._next[state]
                }
                self._steps[key] = self._reachable(after, "")
            states = self._steps[key]
        return self._end in self._reachable(states, "$" if name else "^$")

    def _reachable(self, states: Iterable[int], anchors: str) -> frozenset[int]:
        """With what follows without a character, where `anchors` hold."""
        found, todo = set(states), list(states)
        while todo:
            state = todo.pop()
            if self._tests[state] is None and self._anchors[state] in anchors:
                new = [target for target in self._next[state] if target not in found]
                found.update(new)
                todo += new
        return frozenset(found)

    def _state(self, *after: int, test: Callable[[str], object] | None = None, anchor: str = "") -> int:
        self._tests.append(test)
        self._next.append(after)
        self._anchors.append(anchor)
        return len(self._next) - 1

    def _alternatives(self, depth: int) -> _Build:
        if depth > _MAX_DEPTH:
            raise ValueError(f"more than {_MAX_DEPTH} groups within each other")
        options = [self._sequence(depth)]
        while self._tokens and self._tokens[-1][0] == "or":
            self._tokens.pop()
            options.append(self._sequence(depth))
        return lambda after: self._state(*(option(after) for option in options))

    def _sequence(self, depth: int) -> _Build:
        parts: list[_Build] = []
        while self._tokens and self._tokens[-1][0] not in ("or", "close"):
            kind, text, place = self._tokens.pop()
            if kind == "repeat":
                raise ValueError(f"nothing to repeat at character {place}")
            if kind == "open":
                part = self._alternatives(depth + 1)
                if not self._tokens:
                    raise ValueError(f"a '(' without ')' at character {place}")
                self._tokens.pop()
            else:
                part = self._single(kind, text)
            if self._tokens and self._tokens[-1][0] == "repeat":
                part = self._repeated(part, self._tokens.pop()[1])
            parts.append(part)
        return lambda after: functools.reduce(lambda state, part: part(state), parts[::-1], after)

    def _single(self, kind: str, text: str) -> _Build:
        if kind == "anchor":
            return lambda after: self._state(after, anchor=text)
        try:
            test = re.compile(text).fullmatch
        except re.error as error:
            raise ValueError(f"{text}: {error}") from error
        return lambda after: self._state(after, test=test)

    def _repeated(self, part: _Build, how: str) -> _Build:
        def build(after: int) -> int:
            if how == "?":
                return self._state(part(after), after)
            again = self._state()
            first = part(again)
            self._next[again] = (first, after)
            return again if how == "*" else first

        return build


def _tokens(pattern: str) -> Iterator[tuple[str, str, int]]:
    place = 0
    while place < len(pattern):
        token = _TOKEN.match(pattern, place)
        if token is None or token.lastgroup is None:
            raise ValueError(f"{pattern[place : place + 3]!r} at character {place}")
        yield token.lastgroup, token[token.lastgroup], place
        place = token.end()


@functools.cache
def name_pattern(pattern: str) -> NamePattern:
    """The pattern, kept for the process. Raises: as NamePattern."""
    return NamePattern(pattern)
