"""How one request is sampled. The names and defaults are vLLM's, so that scripts and batch files carry over.

Used by everyone from the configuration to the sampler; knows no torch.
"""

from typing import Any

import msgspec
import xxhash

from pagedcli.errors import ParameterError

GREEDY_BELOW = 1e-5  # a lower temperature means greedy, as dividing by it would overflow
# the sampler computes in float32 and int32: no request may overflow them, which would end all others with it
LARGEST = 1e6
MAX_TOP_K = 2**31 - 1
MAX_SAMPLES = 1024  # of one request: a typo in n must not queue a million sequences


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of one request; validated on construction.

    Raises: ParameterError (also a ValueError) naming the field, the value and the allowed range.
    """

    n: int = 1  # samples per prompt
    max_tokens: int | None = 16  # tokens to generate; None: as many as model length and pool allow
    min_tokens: int = 0  # no end-of-sequence or stop before this many
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # smallest set of tokens with at least this probability
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0  # drop tokens below this share of the likeliest one
    presence_penalty: float = 0.0  # subtracted once if the token was generated before
    frequency_penalty: float = 0.0  # subtracted per earlier generation
    repetition_penalty: float = 1.0  # divides (or multiplies, if negative) logits of tokens in prompt or output
    logit_bias: dict[int, float] | None = None  # added to logits by token id
    seed: int | None = None  # draws depend on (seed, sample index, position) alone
    stop: list[str] | str | None = None  # the text is cut before the first of these
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None  # log-probabilities of this many likeliest tokens besides the sampled one
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    response_format: dict[str, Any] | None = None  # OpenAI's: type text, json_object or json_schema
    regex: str | None = None  # the whole text matches it

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise ParameterError(f"{name} is {getattr(self, name)}, allowed: {allowed}")

        require(1 <= self.n <= MAX_SAMPLES, "n", f"1 to {MAX_SAMPLES}")
        require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "1 or more")
        require(self.min_tokens >= 0, "min_tokens", "0 or more")
        require(self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens", "at most max_tokens")
        require(0 <= self.temperature <= LARGEST, "temperature", f"0 to {LARGEST:g}")
        require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        require(-1 <= self.top_k <= MAX_TOP_K, "top_k", f"-1 or 0 (all), or 1 to {MAX_TOP_K}")
        require(0 <= self.min_p <= 1, "min_p", "0 to 1")
        require(-2 <= self.presence_penalty <= 2, "presence_penalty", "-2 to 2")
        require(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "-2 to 2")
        smallest = 1 / LARGEST
        require(smallest <= self.repetition_penalty <= LARGEST, "repetition_penalty", f"{smallest:g} to {LARGEST:g}")
        require(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer")
        require(self.logprobs is None or 0 <= self.logprobs <= 100, "logprobs", "0 to 100")
        require(all(self.stop_strings), "stop", "non-empty strings")
        biases = (self.logit_bias or {}).values()
        require(all(abs(bias) <= LARGEST for bias in biases), "logit_bias", f"numbers from {-LARGEST:g} to {LARGEST:g}")
        if self.response_format is not None:
            _check_response_format(self.response_format)
        require(self.regex is None or not self._wants_json, "regex", "none together with a response_format")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def guided(self) -> bool:
        """Whether a grammar decides which tokens may come next."""
        return self.regex is not None or self._wants_json

    @property
    def _wants_json(self) -> bool:
        return self.response_format is not None and self.response_format["type"] != "text"

    @property
    def penalized(self) -> bool:
        """Whether logits depend on the tokens generated before."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


def seed_for(seed: int, index: int) -> int:
    """The seed of a request that brings none, from that of the run and the number of the request in it."""
    return xxhash.xxh64_intdigest(f"{seed}:{index}".encode()) >> 1


def _check_response_format(wanted: dict[str, Any]) -> None:
    """Raises: ParameterError for what OpenAI's response_format does not have."""
    kind = wanted.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise ParameterError(f"response_format.type is {str(kind)[:40]!r}, known: text, json_object, json_schema")
    unknown = wanted.keys() - {"type", "json_schema"} if kind == "json_schema" else wanted.keys() - {"type"}
    if unknown:
        raise ParameterError(f"response_format of type {kind!r} has no field {min(unknown)[:40]!r}")
    if kind != "json_schema":
        return
    described = wanted.get("json_schema")
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
        raise ParameterError("response_format.json_schema needs a 'schema' that is an object")
    unknown = described.keys() - {"name", "description", "schema", "strict"}
    if unknown:
        raise ParameterError(f"response_format.json_schema has no field {min(unknown)[:40]!r}")
