"""How one request is sampled. The names and defaults are vLLM's, so that scripts and batch files carry over.

Used everywhere from the configuration to the sampler; needs no torch.
"""

from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import xxhash

from pagedcli.config_keys import check_ranges, key
from pagedcli.errors import ParameterError

GREEDY_BELOW = 1e-5  # lower temperatures mean greedy: dividing by them would overflow
# the sampler computes in float32 and int32: an overflow would fail the whole batch
LARGEST = 1e6
MAX_TOP_K = 2**31 - 1
MAX_SAMPLES = 1024  # limit of n: a typo must not queue a million sequences
MAX_BEAMS = 256
LARGEST_PENALTY = 16.0  # the exponent of a length
_key = partial(key, "Sampling")


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the output must match: exactly one field is set. The names are vLLM's.

    Raises: ParameterError (also a ValueError).
    """

    json: dict[str, Any] | str | None = None  # a JSON schema, or its text
    regex: str | None = None
    choice: list[str] | None = None  # one of these texts
    grammar: str | None = None  # Lark syntax with the rule `start`
    json_object: bool | None = None  # any JSON object

    def __post_init__(self) -> None:
        given = [name for name in self.__struct_fields__ if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            what = ", ".join(given) if given else "none"
            raise ParameterError(f"structured_outputs needs exactly one of its fields, given: {what}")
        if self.choice is not None and not (self.choice and all(self.choice)):
            raise ParameterError(f"structured_outputs.choice is {self.choice}, allowed: non-empty texts")

    @property
    def kind(self) -> str:
        """What the grammar is, for messages."""
        if self.json is not None or self.json_object:
            return "schema"
        return next(name for name in ("regex", "choice", "grammar") if getattr(self, name) is not None)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of one request; validated on construction.

    Raises: ParameterError (also a ValueError) naming the field, the value and the allowed range.
    """

    max_tokens: Annotated[int | None, _key("Maximum tokens to generate", default="as many as fit", at_least=1)] = 16
    min_tokens: Annotated[
        int, _key("Generate at least this many tokens before stopping", at_least=0, has_flag=False)
    ] = 0
    temperature: Annotated[float, _key("Sampling temperature; 0: greedy", at_least=0, at_most=LARGEST)] = 1.0
    top_p: Annotated[
        float, _key("Sample from the smallest set of tokens whose probabilities reach this sum", above=0, at_most=1)
    ] = 1.0
    top_k: Annotated[
        int, _key("Sample from the k most likely tokens; 0 or -1: all", at_least=-1, at_most=MAX_TOP_K)
    ] = 0
    min_p: Annotated[
        float, _key("Drop tokens whose probability is below this fraction of the top token's", at_least=0, at_most=1)
    ] = 0.0
    presence_penalty: Annotated[
        float, _key("Subtracted once from the logit of every generated token", at_least=-2, at_most=2, has_flag=False)
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        _key("Subtracted from a token's logit each time it was generated", at_least=-2, at_most=2, has_flag=False),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        _key(
            "Penalty for tokens of the prompt and output; 1: off", at_least=1 / LARGEST, at_most=LARGEST, has_flag=False
        ),
    ] = 1.0
    stop: Annotated[list[str] | str | None, _key("Stop at this string and cut it off (repeatable)", metavar="TEXT")] = (
        None
    )
    stop_token_ids: Annotated[list[int] | None, _key("Stop at this token id", has_flag=False)] = None
    include_stop_str_in_output: Annotated[bool, _key("Keep the stop string in the output", has_flag=False)] = False
    n: Annotated[int, _key("Number of samples per prompt, or of beams to return", at_least=1, at_most=MAX_SAMPLES)] = 1
    beam_width: Annotated[
        int | None, _key("Beam search with this many beams", default="no beam search", at_least=1, at_most=MAX_BEAMS)
    ] = None
    length_penalty: Annotated[
        float,
        _key(
            "Exponent p that ranks beams by log-probability / length ** p",
            at_least=-LARGEST_PENALTY,
            at_most=LARGEST_PENALTY,
            has_flag=False,
        ),
    ] = 1.0
    early_stopping: Annotated[
        bool | Literal["never"],
        _key("true: stop a beam search at beam_width finished beams; never: once no beam can improve", has_flag=False),
    ] = False
    logprobs: Annotated[
        int | None, _key("Return log-probabilities of the N most likely tokens", at_least=0, at_most=100)
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        _key(
            "Return log-probabilities of each prompt token and the N most likely ones; computes the whole prompt",
            at_least=0,
            at_most=100,
        ),
    ] = None
    regex: Annotated[str | None, _key("Constrain the output to match this regular expression", metavar="REGEX")] = None
    response_format: Annotated[
        dict[str, Any] | None,
        _key(
            "JSON schema for the output, or OpenAI's {type: json_object | json_schema, ...}",
            metavar="JSON|@FILE",
            reads="json",
        ),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputsParams | None,
        _key("vLLM's: one of json, regex, choice, grammar (Lark), json_object", has_flag=False),
    ] = None
    logit_bias: Annotated[
        dict[int, float] | None, _key("Numbers to add to logits: {token id: number}", has_flag=False)
    ] = None
    ignore_eos: Annotated[bool, _key("Continue past end-of-sequence tokens")] = False
    seed: Annotated[
        int | None,
        _key(
            "One seed for all rows; draws depend only on seed, sample and position",
            default="a different one per row",
            has_flag=False,
        ),
    ] = None
    skip_special_tokens: Annotated[bool, _key("Omit special tokens from the text", has_flag=False)] = True
    detokenize: Annotated[bool, _key("Turn the tokens into text", has_flag=False)] = True

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise ParameterError(f"{name} is {getattr(self, name)!r}, allowed: {allowed}")

        check_ranges(self)
        require(self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens", "at most max_tokens")
        require(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer")
        require(all(self.stop_strings), "stop", "non-empty strings")
        biases = (self.logit_bias or {}).values()
        require(all(abs(bias) <= LARGEST for bias in biases), "logit_bias", f"numbers from {-LARGEST:g} to {LARGEST:g}")
        if self.response_format is not None:
            _check_response_format(self.response_format)
        require(self.regex is None or not self._wants_json, "regex", "none together with a response_format")
        alone = self.structured_outputs is None or (self.regex is None and not self._wants_json)
        require(alone, "structured_outputs", "none together with a regex or response_format")
        if self.beam_width is not None:
            self._check_beams(self.beam_width)

    def _check_beams(self, width: int) -> None:
        """Beam search takes the likeliest continuations: what draws at random or ends in the middle of a token is
        refused."""
        if self.n > width:
            raise ParameterError(f"n is {self.n}, but beam_width is {width}: a beam search returns at most its beams")
        allowed: dict[str, tuple[Any, ...]]
        allowed = {"temperature": (0, 1), "top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,), "stop": (None, [])}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                hint = "; use stop_token_ids" if name == "stop" else ""
                raise ParameterError(f"{name} is {getattr(self, name)!r}, which beam search does not support{hint}")
        if self.guided:
            raise ParameterError("a grammar (regex, response_format, structured_outputs) does not work with beam_width")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def num_sequences(self) -> int:
        """Sequences that a request runs: its beams, or its samples."""
        return self.beam_width or self.n

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def guided(self) -> bool:
        """Whether a grammar restricts the next token."""
        return self.structure is not None

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """What the output must match, from whichever field says so."""
        if self.regex is not None:
            return StructuredOutputsParams(regex=self.regex)
        if self._wants_json and self.response_format is not None:
            described = self.response_format.get("json_schema", {})
            return StructuredOutputsParams(json=described.get("schema", {"type": "object"}))
        return self.structured_outputs

    @property
    def _wants_json(self) -> bool:
        return self.response_format is not None and self.response_format["type"] != "text"

    @property
    def penalized(self) -> bool:
        """Whether logits depend on the tokens generated before."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


def seed_for(seed: int, index: int) -> int:
    """The seed of a request without one, derived from the run's seed and the request's number in the run."""
    return xxhash.xxh64_intdigest(f"{seed}:{index}".encode()) >> 1


def _check_response_format(wanted: dict[str, Any]) -> None:
    """Raises: ParameterError for anything outside OpenAI's response_format."""
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
