"""The Python interface: `from pagedcli import LLM, SamplingParams`, with the signatures of vLLM and nano-vllm."""

import difflib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pagedcli.batch.chat import Message, read_messages
from pagedcli.batch.detokenizer import StopCheckers
from pagedcli.batch.grammar import Grammars, Guides
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.config import BUILTIN_MODEL, EngineConfig, parse_bytes
from pagedcli.engine import outputs as engine_outputs
from pagedcli.engine.llm_engine import LLMEngine
from pagedcli.engine.sequence import TokenLogprobs
from pagedcli.errors import ConfigError
from pagedcli.events import Emit
from pagedcli.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
_ALIASES = {
    "kvcache_block_size": "block_size",  # nano-vllm
    "num_kvcache_blocks": "num_gpu_blocks_override",  # nano-vllm, where -1 means automatic
    "kv_cache_memory_bytes": "kv_cache_memory",  # vLLM
}


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one position."""

    logprob: float
    rank: int | None  # 1 is the likeliest; None if the token is not among the requested likeliest ones
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None  # with logprobs only
    logprobs: list[dict[int, Logprob]] | None  # token id -> logprob, per output token
    finish_reason: str  # 'stop', 'length', or 'error': see RequestOutput.error
    stop_reason: int | str | None  # the stop token or string

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request. `output["text"]` and `output["token_ids"]`, as in nano-vllm, are its first sample's."""

    request_id: str
    prompt: str | None  # None if the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    metrics: engine_outputs.RequestMetrics
    finished: bool = True
    error: str | None = None  # why it ended early, such as NaN logits; also issued as a warning

    def __getitem__(self, name: str) -> Any:
        return getattr(self.outputs[0], name)


@dataclass(frozen=True, slots=True)
class _Request:
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None
    stop_checkers: StopCheckers | None
    guides: Guides | None


class LLM:
    """A model ready to generate.

    `model` is a folder, a hub id or 'builtin'; further keywords are the fields of EngineConfig (those of vLLM and
    nano-vllm). `emit` receives every change of the KV cache as an event, see pagedcli.events.
    Raises: TypeError for an unknown keyword; ConfigError, ModelError.
    """

    def __init__(self, model: str = BUILTIN_MODEL, *, emit: Emit | None = None, **engine_options: Any) -> None:
        config = engine_config(str(model), engine_options)
        self.llm_engine = LLMEngine(config, emit=emit)
        self._tokenizer: Tokenizer | None = None
        self._grammars: Grammars | None = None
        self._num_requests = 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, loaded lazily; not needed for token ids."""
        if self._tokenizer is None:
            config = self.llm_engine.config
            self._tokenizer = Tokenizer(self.llm_engine.model_path, trust_remote_code=config.trust_remote_code)
        return self._tokenizer

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; the results are in the order of the prompts.

        A prompt is text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}, the last two optionally
        with a "cache_salt". `sampling_params` is one for all, one per prompt, or None for SamplingParams().
        Raises: RequestError, before anything is generated, if a request can never be served; ValueError, TypeError.
        """
        prompts = _as_list(prompts)
        all_params = _per_prompt(sampling_params, len(prompts))
        return self._run([self._request(*pair) for pair in zip(prompts, all_params, strict=True)], use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the tokenizer's chat template.

        Raises: RequestError if the messages are malformed or there is no chat template; otherwise as generate.
        """
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        arguments = {"add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {})}
        prompts = [self.tokenizer.encode_chat(read_messages(list(each)), arguments) for each in conversations]
        all_params = _per_prompt(sampling_params, len(prompts))
        return self._run([self._request(*pair) for pair in zip(prompts, all_params, strict=True)], use_tqdm)

    def _request(self, prompt: Prompt, params: SamplingParams) -> _Request:
        cache_salt = None
        if isinstance(prompt, Mapping):
            cache_salt = prompt.get("cache_salt")
            if "prompt_token_ids" not in prompt and "prompt" not in prompt:
                raise ValueError("a prompt given as a mapping needs 'prompt' or 'prompt_token_ids'")
            prompt = prompt.get("prompt_token_ids") or prompt["prompt"]
        text = prompt if isinstance(prompt, str) else None
        token_ids = self.tokenizer.encode(text) if text is not None else [int(token_id) for token_id in prompt]
        checkers = StopCheckers(self.tokenizer, token_ids, params) if params.stop_strings else None
        guides = self._grammars_of_model().guides(params) if params.guided else None
        return _Request(text, token_ids, params, cache_salt, checkers, guides)

    def _grammars_of_model(self) -> Grammars:
        if self._grammars is None:
            spec = self.llm_engine.spec
            self._grammars = Grammars(self.tokenizer, end_token_ids=spec.eos_token_ids, vocab_size=spec.vocab_size)
        return self._grammars

    def _run(self, requests: list[_Request], use_tqdm: bool) -> list[RequestOutput]:
        engine = self.llm_engine
        request_ids = [str(self._num_requests + place) for place in range(len(requests))]
        self._num_requests += len(requests)
        finished: dict[str, engine_outputs.RequestOutput] = {}
        advance, close = _progress(len(requests)) if use_tqdm else (lambda num_tokens: None, lambda: None)
        try:
            for request_id, request in zip(request_ids, requests, strict=True):
                engine.add_request(
                    request_id,
                    request.prompt_token_ids,
                    request.params,
                    cache_salt=request.cache_salt,
                    make_stop_checker=request.stop_checkers,
                    make_guide=request.guides,
                )
            while len(finished) < len(requests):
                for output in engine.step():
                    finished[output.request_id] = output
                    advance(sum(len(sample.token_ids) for sample in output.samples))
        except BaseException:
            for request_id in request_ids:  # leave the engine clean, also after Ctrl-C
                engine.abort(request_id)
            raise
        finally:
            close()
        return [self._output(finished[each], request) for each, request in zip(request_ids, requests, strict=True)]

    def _output(self, output: engine_outputs.RequestOutput, request: _Request) -> RequestOutput:
        if output.error is not None:
            warnings.warn(f"request {output.request_id}: {output.error.message}", stacklevel=4)
        elif request.guides is not None:
            request.guides.check()
        return RequestOutput(
            request_id=output.request_id,
            prompt=request.prompt,
            prompt_token_ids=output.prompt_token_ids,
            outputs=[self._completion(sample, request) for sample in output.samples],
            num_cached_tokens=output.num_cached_tokens,
            metrics=output.metrics,
            error=None if output.error is None else output.error.message,
        )

    def _completion(self, sample: engine_outputs.SampleOutput, request: _Request) -> CompletionOutput:
        positions = sample.logprobs
        return CompletionOutput(
            index=sample.index,
            text=self._text(sample, request),
            token_ids=sample.token_ids,
            cumulative_logprob=None if positions is None else sum(position.logprob for position in positions),
            logprobs=None if positions is None else [self._logprobs(position) for position in positions],
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
        )

    def _text(self, sample: engine_outputs.SampleOutput, request: _Request) -> str:
        if not request.params.detokenize:
            return ""
        if request.stop_checkers is not None:
            return request.stop_checkers.text(sample.index, sample.token_ids)
        return self.tokenizer.decode_output(
            request.prompt_token_ids, sample.token_ids, skip_special_tokens=request.params.skip_special_tokens
        )

    def _logprobs(self, position: TokenLogprobs) -> dict[int, Logprob]:
        text_of = self.tokenizer.token_text
        found = {
            token_id: Logprob(logprob, rank, text_of(token_id))
            for rank, (token_id, logprob) in enumerate(position.top, 1)
        }
        sampled = position.token_id
        return {sampled: Logprob(position.logprob, None, text_of(sampled))} | found


def engine_config(model: str, options: dict[str, Any]) -> EngineConfig:
    """An EngineConfig from keywords. Raises: TypeError, ConfigError."""
    known = EngineConfig.__struct_fields__
    values: dict[str, Any] = {"model": model}
    for name, value in options.items():
        key = _ALIASES.get(name, name)
        if key not in known:
            nearest = difflib.get_close_matches(name, [*known, *_ALIASES], n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(known)}"
            raise TypeError(f"LLM() got an unexpected keyword argument {name!r}; {hint}")
        if value is not None and not (name == "num_kvcache_blocks" and value < 0):
            values[key] = parse_bytes(value) if key == "kv_cache_memory" and isinstance(value, str) else value
    try:
        return msgspec.convert(values, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt or many as a list of prompts."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise ValueError(f"{num_prompts} prompts, but {len(params)} sampling_params")
    return list(params)


def _progress(num_requests: int) -> tuple[Callable[[int], None], Callable[[], None]]:
    """A progress bar on stderr. Returns functions to advance it by a request of that many tokens, and to close it."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped,unused-ignore]

    num_generated = 0
    bar = tqdm(total=num_requests, desc="Generating", unit="req")

    def advance(num_tokens: int) -> None:
        nonlocal num_generated
        num_generated += num_tokens
        elapsed_s = max(bar.format_dict["elapsed"], 1e-9)
        bar.set_postfix_str(f"{num_generated / elapsed_s:,.0f} tok/s", refresh=False)
        bar.update()

    return advance, bar.close


__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"]
