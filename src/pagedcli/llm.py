"""The Python interface: `from pagedcli import LLM, SamplingParams`, with the signatures of vLLM and nano-vllm."""

import secrets
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from numbers import Number
from typing import Any

import msgspec
from tqdm.auto import tqdm  # type: ignore[import-untyped,unused-ignore]

from pagedcli.batch.chat_template import read_template
from pagedcli.batch.grammar import Grammars, Guides
from pagedcli.batch.requests import ChatMessage, read_messages
from pagedcli.batch.scoring import Continuation, Score, best_of, encode_pair
from pagedcli.batch.tokenizer import StopCheckers, Tokenizer
from pagedcli.config import BUILTIN_MODEL
from pagedcli.core import requests as engine_outputs
from pagedcli.core.sequence import SampleOutput, TokenLogprobs
from pagedcli.errors import ConfigError, PagedcliError, UsageError
from pagedcli.events import Emit, to_all
from pagedcli.llm_keywords import engine_config, refuse_unsupported, token_ids_of
from pagedcli.models.checkpoint_files import read_json
from pagedcli.models.hub import resolve_model
from pagedcli.printable import plural
from pagedcli.process import Closes
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams, StructuredOutputsParams
from pagedcli.show.notebook import Trace
from pagedcli.trace.fold import EventList

Prompt = str | Sequence[int] | Mapping[str, Any]
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # keys of generation_config.json


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
    cumulative_logprob: float | None  # None without logprobs
    logprobs: list[dict[int, Logprob]] | None  # token id -> logprob, per output token
    finish_reason: str  # 'stop', 'length', or 'error': see RequestOutput.error
    stop_reason: int | str | None  # the stop token or string
    score: float | None = None  # a beam's total log-probability / length ** length_penalty

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
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # per prompt token; None for the first
    finished: bool = True
    error: str | None = None  # why it ended early, such as NaN logits; also issued as a warning

    def __getitem__(self, name: str) -> Any:
        return getattr(self.outputs[0], name)


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """The scores of what may follow one prompt."""

    request_id: str
    prompt: str | None  # None if the prompt was given as token ids
    prompt_token_ids: list[int]
    scores: list[Score]  # one per continuation; empty after an error
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    metrics: engine_outputs.RequestMetrics
    error: str | None = None  # why there are none, such as NaN logits; also issued as a warning

    @property
    def best(self) -> dict[str, int | None]:
        """The index of the best continuation by "logprob", "per_token" and "per_byte"; the smallest if tied."""
        return best_of(self.scores)


@dataclass(frozen=True, slots=True)
class _Request:
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None
    stop_checkers: StopCheckers | None = None
    guides: Guides | None = None
    continuations: list[list[int]] | None = None  # None: it generates


class LLM(Closes):
    """A model ready to generate.

    `model` is a folder, a hub id or 'builtin', and `tokenizer` another folder or hub id; further keywords are the
    fields of EngineConfig (those of vLLM and nano-vllm). `emit` receives every change of the KV cache as an event, see
    pagedcli.events; `record` keeps them, with the tokens, for `trace`. Calls from several threads are served one after
    the other. `with LLM(...) as llm:` or close() ends the processes of a tensor-parallel group before the program does.
    Raises: TypeError for an unknown keyword; ConfigError, ModelError.
    """

    def __init__(
        self,
        model: str = BUILTIN_MODEL,
        *,
        tokenizer: str | None = None,
        emit: Emit | None = None,
        record: bool = False,
        **engine_options: Any,
    ) -> None:
        config = engine_config(str(model), engine_options)
        self._recorded = EventList() if record else None
        self.llm_engine = LLMEngine(config, emit=to_all(self._recorded, emit), trace_tokens=record, with_store=True)
        self._tokenizer_name = tokenizer
        self._num_resets = 0  # resets of the prefix cache
        self._process = secrets.token_hex(8)
        self._num_requests = 0
        self._turn = threading.Lock()  # held by the thread whose call is served

    def __repr__(self) -> str:
        plan = self.llm_engine.plan
        pool = f"{plural(plan.num_blocks, 'block')} of {plural(plan.limits.block_size, 'token')}"
        return f"LLM({self.llm_engine.config.model!r}, device={plan.device!r}, dtype={plan.dtype!r}, {pool})"

    def close(self) -> None:
        """End the processes of a tensor-parallel group; generate() and chat() fail afterwards."""
        self.llm_engine.close()

    @property
    def trace(self) -> Trace:
        """What the KV cache did so far, as of a recorded run. Raises: UsageError without `record=True`."""
        if self._recorded is None:
            raise UsageError("this LLM records nothing", hint="create it with LLM(..., record=True)")
        with self._turn:
            events = EventList(self._recorded.events)
        return Trace(lambda: events, "this run", decode=lambda token_ids: self.tokenizer.decode(token_ids))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, loaded lazily; not needed for token ids."""
        config, folder = self.llm_engine.config, self.llm_engine.model_path
        if self._tokenizer_name is not None:
            folder = resolve_model(str(self._tokenizer_name), weights=False)
        return Tokenizer(folder, trust_remote_code=config.trust_remote_code)

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters that the model's generation_config.json recommends, otherwise SamplingParams()."""
        path = self.llm_engine.model_path / "generation_config.json"
        found = read_json(path) if path.is_file() else {}
        values = {name: found[name] for name in _GENERATION_KEYS if found.get(name) is not None}
        if found.get("max_new_tokens") is not None:
            values["max_tokens"] = found["max_new_tokens"]
        try:
            return msgspec.convert(values, SamplingParams)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{path}: {error}", hint="pass sampling_params") from error

    def reset_prefix_cache(self) -> bool:
        """Let no later request find blocks of earlier ones. Returns True.

        Implemented by a salt: the blocks stay until their space is needed, as any cached block does.
        """
        with self._turn:
            self._num_resets += 1
        return True

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        **unsupported: Any,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; the results are in the order of the prompts.

        A prompt is text, token ids (a list, or a NumPy array or tensor of one dimension), {"prompt": text} or
        {"prompt_token_ids": ids}, the last two optionally with a "cache_salt"; `prompt_token_ids` takes token ids
        instead of `prompts`. `sampling_params` is one for all, one per prompt, or None for
        get_default_sampling_params().
        Raises: RequestError, before anything is generated, if a request can never be served; ValueError; TypeError for
        an unknown or unsupported keyword.
        """
        refuse_unsupported("generate", unsupported)
        if (prompts is None) == (prompt_token_ids is None):
            raise ValueError("generate() needs either prompts or prompt_token_ids")
        with self._turn:
            given = _as_list(prompts if prompts is not None else prompt_token_ids)
            return self._generate(given, sampling_params, use_tqdm)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Sequence[Continuation] | Sequence[Sequence[Continuation]],
        use_tqdm: bool = True,
    ) -> list[ScoreOutput]:
        """How likely each of the given continuations of a prompt is; the results are in the order of the prompts.

        Prompts are those of generate(), one or many; `continuations` has a list for each, or is the list of the single
        one: texts, or token ids. Texts after a text are tokenized together with it: whitespace at its end belongs to
        the continuations. Prompts are computed in the order of their tokens, so that what they share is computed once,
        and each once for all its continuations.
        Raises: RequestError, before anything is computed, if a prompt or continuation is empty or too long; ValueError.
        """
        one, several = _is_one(prompts), _as_list(prompts)
        of_each: Any = [continuations] if one else continuations
        if any(isinstance(given, str) for given in of_each):
            raise ValueError(f"{'a prompt' if one else 'each prompt of a list'} has a list of continuations, not text")
        if len(of_each) != len(several):
            raise ValueError(f"{plural(len(several), 'prompt')}, but {plural(len(of_each), 'list')} of continuations")
        pairs: list[tuple[Prompt, list[Continuation]]] = [
            (prompt, list(given)) for prompt, given in zip(several, of_each, strict=True)
        ]
        with self._turn:
            requests = _each(self._score_request, pairs, len(pairs))
            keys = [(request.cache_salt or "", request.prompt_token_ids) for request in requests]
            order = sorted(range(len(requests)), key=keys.__getitem__)
            outputs = self._run([requests[i] for i in order], use_tqdm, order)
        found = dict(zip(order, outputs, strict=True))
        return [self._score_output(found[i], requests[i], given) for i, (_, given) in enumerate(pairs)]

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **unsupported: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through a chat template: Jinja text or a file, by default the
        tokenizer's own. `tools` are shown to the model; calls in its answer are text.

        Raises: RequestError if the messages are malformed or there is no chat template; otherwise as generate.
        """
        if unsupported.get("chat_template_content_format") in ("auto", "string"):
            del unsupported["chat_template_content_format"]
        refuse_unsupported("chat", unsupported)
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        arguments = {
            "chat_template": None if chat_template is None else read_template(chat_template),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
        }
        arguments = {name: value for name, value in arguments.items() if value is not None}
        arguments |= chat_template_kwargs or {}
        with self._turn:
            encode, prompts = partial(self.tokenizer.encode_chat, num_allowed=self._most_tokens), []
            for place, each in enumerate(conversations):
                with _naming(place, len(conversations)):
                    prompts.append(encode(read_messages(list(each)), arguments))
            return self._generate(prompts, sampling_params, use_tqdm)

    def _request(self, prompt: Prompt, params: SamplingParams) -> _Request:
        given, cache_salt = self._read_prompt(prompt)
        text = given if isinstance(given, str) else None
        token_ids = self._encoded(text) if text is not None else token_ids_of(given)
        if text is not None and self.tokenizer.has_two_bos(token_ids):
            warnings.warn("a prompt begins with two BOS tokens: its text has one, the tokenizer adds one", stacklevel=4)
        checkers = StopCheckers(self.tokenizer, token_ids, params) if params.stop_strings else None
        guides = self._grammars.guides(params) if params.guided else None
        return _Request(text, token_ids, params, cache_salt, checkers, guides)

    @property
    def _most_tokens(self) -> int:
        return self.llm_engine.limits.max_model_len

    def _encoded(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode_within(text, self._most_tokens, add_special_tokens=add_special_tokens)

    def _score_request(self, prompt: Prompt, given: list[Continuation]) -> _Request:
        context, cache_salt = self._read_prompt(prompt)
        texts = [each for each in given if isinstance(each, str)]
        if texts and len(texts) < len(given):
            raise ValueError("continuations of one prompt are all texts or all token ids")
        if isinstance(context, str) and texts:
            token_ids, continuations = encode_pair(self.tokenizer, context, texts, self._most_tokens)
        else:
            encode = partial(self._encoded, add_special_tokens=False) if texts else token_ids_of
            token_ids = self._encoded(context) if isinstance(context, str) else token_ids_of(context)
            continuations = [encode(each) for each in given]
        text = context if isinstance(context, str) else None
        return _Request(text, token_ids, SamplingParams(), cache_salt, continuations=continuations)

    def _read_prompt(self, prompt: Prompt) -> tuple[Any, str | None]:
        """A prompt's text or token ids, and its cache salt."""
        cache_salt = None
        if isinstance(prompt, Mapping):
            cache_salt = prompt.get("cache_salt")
            unknown = [name for name, value in prompt.items() if name not in _PROMPT_KEYS and value is not None]
            if unknown:
                raise ValueError(f"a prompt has no field {unknown[0]!r}, known: {', '.join(_PROMPT_KEYS)}")
            if "prompt_token_ids" not in prompt and "prompt" not in prompt:
                raise ValueError("a prompt given as a mapping needs 'prompt' or 'prompt_token_ids'")
            given = prompt.get("prompt_token_ids")
            prompt = prompt["prompt"] if given is None else given
        if self._num_resets:  # not the salt of another process, whose blocks may be in a prefix store
            cache_salt = f"reset {self._num_resets} of {self._process} {cache_salt or ''}"
        return prompt, cache_salt

    def _per_prompt(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * num_prompts
        if not isinstance(params, Sequence):
            raise TypeError(f"sampling_params are SamplingParams, one or a list, not {type(params).__name__}")
        if len(params) != num_prompts:
            raise ValueError(f"{plural(num_prompts, 'prompt')}, but {len(params)} sampling_params")
        return list(params)

    @cached_property
    def _grammars(self) -> Grammars:
        spec = self.llm_engine.spec
        return Grammars(self.tokenizer, end_token_ids=spec.eos_token_ids, vocab_size=spec.vocab_size)

    def _generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, use_tqdm: bool
    ) -> list[RequestOutput]:
        pairs = zip(prompts, self._per_prompt(params, len(prompts)), strict=True)
        requests = _each(self._request, pairs, len(prompts))
        outputs = self._run(requests, use_tqdm)
        return [self._output(output, request) for output, request in zip(outputs, requests, strict=True)]

    def _run(
        self, requests: list[_Request], use_tqdm: bool, places: Sequence[int] | None = None
    ) -> list[engine_outputs.FinishedRequest]:
        """`places`: of the requests among the prompts that were given; None: they are in their order."""
        engine = self.llm_engine
        request_ids = [str(self._num_requests + place) for place in range(len(requests))]
        self._num_requests += len(requests)
        finished: dict[str, engine_outputs.FinishedRequest] = {}
        scores = bool(requests) and requests[0].continuations is not None
        what = "Scoring" if scores else "Generating"
        bar, num_generated = tqdm(total=len(requests), desc=what, unit="req", disable=not use_tqdm), 0
        try:
            for place, request_id, request in zip(places or range(len(requests)), request_ids, requests, strict=True):
                with _naming(place, len(requests)):
                    engine.add_request(
                        request_id,
                        request.prompt_token_ids,
                        request.params,
                        cache_salt=request.cache_salt,
                        make_stop_checker=request.stop_checkers,
                        make_guide=request.guides,
                        continuations=request.continuations,
                    )
            while len(finished) < len(requests):
                for output in engine.step():
                    finished[output.request_id] = output
                    num_generated += sum(len(sample.token_ids) for sample in output.samples)
                    elapsed_s = max(bar.format_dict["elapsed"], 1e-9)
                    if not scores:
                        bar.set_postfix_str(f"{num_generated / elapsed_s:,.0f} tok/s", refresh=False)
                    bar.update()
        except BaseException:
            for request_id in request_ids:  # leave the engine clean, also after Ctrl-C
                engine.abort(request_id)
            raise
        finally:
            bar.close()
        return [finished[request_id] for request_id in request_ids]

    def _score_output(
        self, output: engine_outputs.FinishedRequest, request: _Request, given: list[Continuation]
    ) -> ScoreOutput:
        if output.error is not None:
            warnings.warn(f"request {output.request_id}: {output.error.message}", stacklevel=3)
        num_bytes = [len(each.encode()) if isinstance(each, str) else None for each in given]
        return ScoreOutput(
            request_id=output.request_id,
            prompt=request.prompt,
            prompt_token_ids=output.prompt_token_ids,
            scores=[Score.of(i, found, num_bytes[i]) for i, found in enumerate(output.scores or ())],
            num_cached_tokens=output.num_cached_tokens,
            metrics=output.metrics,
            error=None if output.error is None else output.error.message,
        )

    def _output(self, output: engine_outputs.FinishedRequest, request: _Request) -> RequestOutput:
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
            prompt_logprobs=None
            if output.prompt_logprobs is None
            else [None if position is None else self._logprobs(position) for position in output.prompt_logprobs],
            error=None if output.error is None else output.error.message,
        )

    def _completion(self, sample: SampleOutput, request: _Request) -> CompletionOutput:
        positions = sample.logprobs
        return CompletionOutput(
            index=sample.index,
            text=self._text(sample, request),
            token_ids=sample.token_ids,
            cumulative_logprob=None if positions is None else sum(position.logprob for position in positions),
            logprobs=None if positions is None else [self._logprobs(position) for position in positions],
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            score=sample.score,
        )

    def _text(self, sample: SampleOutput, request: _Request) -> str:
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


@contextmanager
def _naming(place: int, count: int) -> Iterator[None]:
    """Within this context an error about one of several prompts says which one."""
    try:
        yield
    except (PagedcliError, TypeError, ValueError) as error:
        if count > 1:
            error.args = (f"prompts[{place}]: {error}",)
            if isinstance(error, PagedcliError):
                error.message = str(error)
        raise


def _each(make: Callable[..., _Request], pairs: Iterable[tuple[Any, Any]], count: int) -> list[_Request]:
    requests = []
    for place, pair in enumerate(pairs):
        with _naming(place, count):
            requests.append(make(*pair))
    return requests


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt or many as a list of prompts."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes | bytearray):
        raise TypeError(f"a prompt is text or token ids, not {type(prompts).__name__}")
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)
    return [prompts] if _is_one(prompts) else prompts


def _is_one(prompts: Any) -> bool:
    """Whether it is one prompt, and not a list of them."""
    if isinstance(prompts, str | Mapping):
        return True
    return len(prompts) > 0 and (isinstance(prompts[0], Number) or getattr(prompts[0], "ndim", None) == 0)


__all__ = [
    "LLM",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "Score",
    "ScoreOutput",
    "StructuredOutputsParams",
]
