"""The explicit fallback: any other causal language model of transformers, run over our paged cache.

transformers' AttentionInterface passes its attention calls to us; everything else is transformers' code. Used by
models.loading for families that are not native. Only this module imports transformers.

A model is refused by its config before anything is loaded, then by its attention calls. A probe at load detects what
neither says (ignored positions as with ALiBi, tokens mixed outside of attention, state kept between steps): a few
tokens through the paged cache must give transformers' own logits.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from pagedcli.attention.base import AttentionBackend, PagedBatch
from pagedcli.attention.layer import AttentionLayer
from pagedcli.attention.reference import ReferenceAttention
from pagedcli.attention.select import layer_refusal
from pagedcli.errors import ModelError
from pagedcli.models.base import DecoderNeeds, DecoderRequest, cache_shape
from pagedcli.models.blocks import LayerStep, layer_steps
from pagedcli.models.checkpoint_files import stop_ids
from pagedcli.models.formats import AS_STORED
from pagedcli.models.lengths import length_refusal
from pagedcli.models.mixers.attention import Attention
from pagedcli.models.mlps import Mlp
from pagedcli.models.spec import LayerSpec, ModelSpec, layer_groups
from pagedcli.models.stacking import not_read
from pagedcli.models.tensors import NormStyle


def read_fallback_spec(path: Path, *, trust_remote_code: bool = False) -> ModelSpec:
    """The ModelSpec of a folder whose family is not native, from transformers' config classes.

    load_fallback confirms the sizes of the cache (layers, key/value heads, head size) on the loaded model.
    Raises: ModelError if transformers does not know the architecture, or the config shows that it cannot run here.
    """
    config = read_config(path, trust_remote_code)
    return spec_of(path, config, (config.architectures or [type(config).__name__])[0])


def spec_of(path: Path, config: Any, architecture: str) -> ModelSpec:
    """The ModelSpec of transformers' config. Raises: ModelError if it shows that the model cannot run here."""
    text = config.get_text_config(decoder=True)
    try:
        refuse_by_config(config, text, architecture)
        return _spec(path, config, text, architecture)
    except (AttributeError, RuntimeError) as error:  # a field that is missing, or that differs between layers
        raise refused(architecture, f"has an unusual config ({first_sentence(error)})") from error


def _spec(path: Path, config: Any, text: Any, architecture: str) -> ModelSpec:
    def first(*names: str) -> Any:
        """The first of these fields that is set."""
        return next((value for name in names if (value := getattr(text, name, None)) is not None), None)

    inner = first("intermediate_size", "ffn_dim", "n_inner") or 4 * text.hidden_size
    width, num_layers = max(inner) if isinstance(inner, list) else inner, text.num_hidden_layers
    mixer = Attention(
        num_heads=text.num_attention_heads,
        num_kv_heads=first("num_key_value_heads", "num_attention_heads"),
        head_dim=first("head_dim") or text.hidden_size // text.num_attention_heads,
        soft_cap=first("attn_logit_softcapping"),
    )
    windows, sources = layer_windows(text) or (None,) * num_layers, kv_sources(text) or (None,) * num_layers
    activation = str(first("hidden_act", "hidden_activation", "activation_function"))
    mlp, seen = Mlp(width=width, activation=activation), enumerate(zip(windows, sources, strict=True))
    layers = (LayerSpec(mixer=replace(mixer, window=w, source=s), mlp=mlp, number=i) for i, (w, s) in seen)
    return ModelSpec(
        model_type=config.model_type,
        architecture=architecture,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=width,
        layers=tuple(layers),
        norm=NormStyle(eps=first("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon") or 1e-5),
        tie_word_embeddings=bool(first("tie_word_embeddings")),
        max_position_embeddings=text.max_position_embeddings,
        attention_chunk=attention_chunk(text),
        eos_token_ids=stop_ids(path, first("eos_token_id"), vocab_size=text.vocab_size),
        bos_token_id=first("bos_token_id"),
        dtype=str(config.dtype or first("dtype") or "float32").removeprefix("torch."),
        is_fallback=True,
    )


# Models that see and hear, which are loaded without what only that needs: their text runs as a model of its own, whose
# tensors lie in `model.language_model`.
_TEXT_ALONE = frozenset({"gemma3n"})
NESTED_TEXT = {r"^model\.language_model\.": "model."}


def read_config(path: Path, trust_remote_code: bool) -> Any:
    """transformers' config of a folder. Raises: ModelError if this version does not know it."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, ImportError, StrictDataclassError) as error:
        raise ModelError(
            f"{path / 'config.json'}: transformers {transformers.__version__} cannot read it: {first_sentence(error)}",
            hint="check model_type; a newer transformers may know it; a folder with own code needs --trust-remote-code",
        ) from error
    return text_alone(config)


def text_alone(config: Any) -> Any:
    """The config of the language model, of those whose text runs alone."""
    if config.model_type not in _TEXT_ALONE:
        return config
    text = config.text_config
    text.dtype = text.dtype or config.dtype
    return text


def first_sentence(error: BaseException) -> str:
    """The beginning of an error message of transformers, which can be a page long."""
    return str(error).strip().split("\n")[0].split(". ")[0]


_ATTENTION_LAYERS = frozenset({"attention", "full_attention", "sliding_attention", "chunked_attention"})
# arguments of an attention call that change its result and that no backend supports -> what the model does
_UNKNOWN_TO_BACKENDS = {
    "s_aux": "uses attention sinks (s_aux)",
    "position_bias": "adds a position bias to its attention scores",
}


def refused(architecture: str, reason: str) -> ModelError:
    """The error of every refusal except those of length."""
    return ModelError(
        f"{architecture} cannot run over the paged cache: it {reason}",
        hint="use a decoder model such as Llama, Mistral, Qwen3, Gemma 3, Phi-3, OLMo2, Granite, SmolLM3 or Mixtral",
    )


def refuse_by_config(config: Any, text: Any, architecture: str) -> None:
    """Refuse what the config shows. `text` is the config of the language model within `config`."""
    other_layers = sorted(set(getattr(text, "layer_types", None) or ()) - _ATTENTION_LAYERS)
    if config.is_encoder_decoder:
        raise refused(architecture, "is an encoder-decoder model")
    if not isinstance(getattr(text, "num_attention_heads", None), int):
        raise refused(architecture, "has no attention heads, or not the same number in every layer")
    if other_layers:
        raise refused(architecture, f"has layers that are not plain attention ({', '.join(other_layers)})")
    if getattr(text, "kv_lora_rank", None) is not None:
        raise refused(architecture, "compresses keys and values (multi-head latent attention)")
    sources = kv_sources(text)
    if any(source is None for source in sources[len(sources) - (getattr(text, "num_kv_shared_layers", 0) or 0) :]):
        raise refused(architecture, "reads keys and values of another model")
    max_positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(max_positions, int) or max_positions < 1:
        raise refused(architecture, "does not specify max_position_embeddings, or not as a positive number")


def layer_windows(text: Any) -> tuple[int | None, ...]:
    """The window of each layer in tokens; empty when none has one. AttentionTrace.confirm holds the model to it."""
    window, unused = getattr(text, "sliding_window", None), getattr(text, "use_sliding_window", None) is False
    layer_types = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    slides = [bool(window) and not unused and kind == "sliding_attention" for kind in layer_types]
    return tuple(window if each else None for each in slides) if any(slides) else ()


def kv_sources(text: Any) -> tuple[int | None, ...]:
    """Per layer an earlier one whose K and V it reads, the last one of its kind; empty: none does."""
    num_shared = getattr(text, "num_kv_shared_layers", 0) or 0
    if not num_shared:
        return ()
    num_layers = text.num_hidden_layers
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * num_layers
    own = range(max(0, num_layers - num_shared))
    last_own = {kinds[i]: i for i in own}
    return tuple(None if i in own else last_own.get(kinds[i]) for i in range(num_layers))


def attention_chunk(text: Any) -> int | None:
    """The chunk in tokens within which some layer attends; None: there is no such layer."""
    chunk: int | None = getattr(text, "attention_chunk_size", None)
    layer_types = getattr(text, "layer_types", None)
    return chunk if layer_types is None or "chunked_attention" in layer_types else None


def refuse_length(text: Any, spec: ModelSpec, max_model_len: int) -> None:
    """Refuse lengths in tokens at which the rope angles of one sequence begin to depend on its neighbours."""
    rope = getattr(text, "rope_parameters", None) or {}
    by_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in by_layer_type or [rope]:
        rope_type = str(parameters.get("rope_type"))
        limit = {
            "dynamic": spec.max_position_embeddings,
            "longrope": parameters.get("original_max_position_embeddings"),
        }.get(rope_type)
        if limit is not None and max_model_len > limit:
            raise length_refusal(spec.architecture, limit, rope_type, max_model_len)


class AttentionTrace:
    """Replaces PagedStep for one forward: records each attention call and refuses what no backend supports."""

    def __init__(self, architecture: str, max_model_len: int) -> None:
        self._architecture = architecture
        self._max_model_len = max_model_len
        self._heads: dict[int, tuple[int, int, int]] = {}  # layer -> (H, G, D)
        self._layers: dict[int, AttentionLayer] = {}

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, **kwargs: Any
    ) -> Tensor:
        """Arguments and result shape of PagedStep.attend; the result is zero."""
        self._refuse_by_arguments(module, kwargs)
        if not q.shape[-1] == k.shape[-1] == v.shape[-1]:
            sizes = f"query {q.shape[-1]}, key {k.shape[-1]}, value {v.shape[-1]}"
            raise refused(self._architecture, f"has heads of different sizes ({sizes})")
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self._heads:
            raise refused(self._architecture, "does not number its attention layers, or attends twice in one")
        self._heads[layer] = (q.shape[1], k.shape[1], q.shape[-1])
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        window = kwargs.get("sliding_window")
        if window is not None and window >= self._max_model_len:
            window = None
        self._layers[layer] = AttentionLayer(scale=scale, window=window, soft_cap=kwargs.get("softcap"))
        return torch.zeros_like(q).transpose(1, 2)

    def confirm(self, spec: ModelSpec) -> tuple[AttentionLayer, ...]:
        """The layers' requirements. Raises ModelError unless every layer attended, with the heads that the backend and
        the cache expect."""
        if not self._heads:
            raise refused(self._architecture, "does not call transformers' attention interface")
        if sorted(self._heads) != list(range(spec.num_layers)):
            raise refused(self._architecture, f"attends in {len(self._heads)} of its {spec.num_layers} layers only")
        expected = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        if others := sorted(set(self._heads.values()) - {expected}):
            numbers = "{} query heads and {} key/value heads of size {}"
            raise refused(
                self._architecture,
                f"has layers with {numbers.format(*others[0])}, where its config says {numbers.format(*expected)}",
            )
        sources = [layer.source for layer in spec.attention_layers]
        layers = tuple(replace(self._layers[i], source=source) for i, source in enumerate(sources))
        if [layer.window for layer in layers] != [layer.window for layer in spec.attention_layers]:
            raise refused(self._architecture, "asks for other windows in its layers than its config says")
        return layers

    def _refuse_by_arguments(self, module: nn.Module, kwargs: dict[str, Any]) -> None:
        for name, reason in _UNKNOWN_TO_BACKENDS.items():
            if kwargs.get(name) is not None:
                raise refused(self._architecture, reason)
        if kwargs.get("attention_mask") is not None:
            raise refused(self._architecture, "makes an attention mask of its own")
        if kwargs.get("dropout"):
            raise refused(self._architecture, "drops attention weights at random")
        if False in (kwargs.get("is_causal"), getattr(module, "is_causal", None)):
            raise refused(self._architecture, "also attends to later tokens")


_ATTENTION_NAME = "pagedcli"
_AUTO_MODEL: Any = AutoModelForCausalLM  # transformers is only partly typed


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One forward's arguments for each attention call, passed through transformers' keyword arguments."""

    backend: AttentionBackend
    layers: list[LayerStep]

    def attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, **_: Any) -> Tensor:
        """Shapes: q [1, H, T, D]; k, v [1, G, T, D]; returns [1, T, H, D]. Changes: the cache of the module's layer."""
        layer: LayerStep = self.layers[module.layer_idx]
        q, k, v = (heads[0].transpose(0, 1).contiguous() for heads in (q, k, v))
        if layer.layer.source is None:
            layer.write(self.backend, k, v)
        return layer.attend(self.backend, q)[None]


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    paged_step: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function registered with transformers. Stateless: the step is an argument."""
    if paged_step is None:
        raise refused(type(module).__name__, "does not receive the keyword arguments of the model's forward")
    return paged_step.attend(module, query, key, value, scaling, attention_mask=attention_mask, **kwargs), None


class TransformersLM:
    """A CausalLM (see models.base) whose layers are transformers'. The new tokens of a step go in as one row [1, T]."""

    __slots__ = ("_backend", "_body", "_model", "attention_layers", "notes", "spec", "weight_bytes")

    def __init__(
        self,
        model: Any,
        spec: ModelSpec,
        *,
        backend: AttentionBackend,
        notes: tuple[str, ...],
        attention_layers: tuple[AttentionLayer, ...],
    ) -> None:
        """Takes ownership of `model`, which from now on only maps hidden states to logits."""
        self.spec = spec
        self.notes = notes
        self.attention_layers = attention_layers
        self.weight_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        self._backend = backend
        self._body = model.base_model
        # A model's forward may scale, cap or bias its logits, so it runs here, with the given hidden states instead of
        # its body's.
        setattr(model, model.base_model_prefix, _GivenHidden())
        self._model = model

    def forward(self, input_ids: Tensor, positions: Tensor, batch: PagedBatch, kv_cache: Tensor) -> Tensor:
        """See CausalLM.forward."""
        return self.forward_through(self._backend, input_ids, positions, batch, kv_cache)

    def forward_through(
        self, backend: AttentionBackend, input_ids: Tensor, positions: Tensor, batch: PagedBatch, kv_cache: Tensor
    ) -> Tensor:
        """forward, on a cache with another backend's layout."""
        step = PagedStep(backend, layer_steps(batch, kv_cache, backend, self.attention_layers))
        return _run_body(self._body, input_ids, positions, step)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See CausalLM.compute_logits."""
        logits: Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float()


class _GivenHidden(nn.Module):
    """Replaces a model's body: returns the hidden states that it receives."""

    @property
    def decoder(self) -> "_GivenHidden":
        """OPT's head calls the decoder within the body."""
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> "_HiddenOutput":
        return _HiddenOutput(inputs_embeds)


class _HiddenOutput:
    """The body's output as its head reads it; every optional field (router logits, caches) is None."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def _run_body(body: Any, input_ids: Tensor, positions: Tensor, step: PagedStep | AttentionTrace) -> Tensor:
    """Hidden states [T, E] of one row of tokens [T]."""
    output = body(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, paged_step=step)
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def refusal(needs: DecoderNeeds) -> str | None:
    """Why this fallback does not run a model; None if it does."""
    if needs.num_ranks > 1:
        return "runs on one rank only"
    if not needs.spec.is_fallback:
        return f"leaves {needs.spec.architecture} to the native decoders"
    if needs.weight_format is not AS_STORED:
        return f"has no {needs.weight_format.name} weights"
    return None


def load(request: DecoderRequest) -> TransformersLM:
    """Load a model through transformers, and check on a few tokens that the paged cache gives the same logits.

    Raises:  ModelError with the reason, if the weights are incomplete or the architecture cannot run here.
    """
    path, spec, dtype, max_model_len = request.path, request.spec, request.dtype, request.max_model_len
    trust_remote_code = request.trust_remote_code
    if request.adapter is not None:
        raise ModelError(
            f"{spec.architecture} runs through transformers, and takes no adapter", hint="merge it with peft"
        )
    config = read_config(path, trust_remote_code)
    refuse_length(config.get_text_config(decoder=True), spec, max_model_len)
    # transformers' own attention first, for the logits to compare with
    options = {"dtype": dtype, "attn_implementation": "eager", "trust_remote_code": trust_remote_code}
    notes = [
        f"{spec.architecture} has no native decoder here: it runs through transformers {transformers.__version__} over "
        "the same paged cache, slower than a native one"
    ]
    try:
        if request.load_format == "dummy":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(request.seed)
                model = _AUTO_MODEL.from_config(config, **options)
        else:
            model, num_unused = _from_pretrained(path, config, options)
            notes += [not_read(num_unused, "checkpoint", "of which transformers makes no use")] if num_unused else []
    except (ImportError, ValueError) as error:  # ValueError: transformers has no such causal language model
        hint = "install the package that it names, with pip" if isinstance(error, ImportError) else None
        raise ModelError(f"transformers cannot load {spec.architecture}: {first_sentence(error)}", hint=hint) from error
    model.eval().to(request.device)
    try:
        refuse_by_class(model, spec)
        expected = own_logits(model, spec.vocab_size)
        layers = trace_attention(model, spec, max_model_len)
        _refuse_by_backend(layers, spec, request.backend)
        paged = TransformersLM(model, spec, backend=request.backend, notes=tuple(notes), attention_layers=layers)
        check_equal(paged, expected, dtype)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        # any failure of model code that was not written for this is a reason to refuse it
        raise refused(spec.architecture, f"fails there ({type(error).__name__}: {first_sentence(error)})") from error
    return paged


def trace_attention(model: Any, spec: ModelSpec, max_model_len: int) -> tuple[AttentionLayer, ...]:
    """Route the model's attention to paged_attention, and record the requirements of each of its calls.

    Raises: ModelError for what no backend supports.
    """
    AttentionInterface.register(_ATTENTION_NAME, paged_attention)
    model.set_attn_implementation(_ATTENTION_NAME)
    trace = AttentionTrace(spec.architecture, max_model_len)
    with torch.inference_mode():
        tokens = torch.arange(3, device=model.device)
        _run_body(model.base_model, tokens, tokens, trace)
    return trace.confirm(spec)


def _from_pretrained(path: Path, config: Any, options: dict[str, Any]) -> tuple[Any, int]:
    """The model with its weights, and the number of unused checkpoint tensors.

    transformers would initialize missing tensors randomly: here that is an error.
    """
    options = {"use_safetensors": True, "local_files_only": True, "ignore_mismatched_sizes": True, **options}
    if str(config.model_type).endswith("_text"):
        options["key_mapping"] = NESTED_TEXT
    try:
        with _quiet():
            model, found = _AUTO_MODEL.from_pretrained(path, config=config, output_loading_info=True, **options)
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"the weights in {path} are missing, damaged or cut short: {first_sentence(error)}",
            hint="download the *.safetensors files again, or use --load-format dummy for random weights",
        ) from error
    hint = "the folder is incomplete, or config.json describes another model"
    if missing := sorted(found["missing_keys"]):
        raise ModelError(f"{path}: {len(missing)} tensors are missing, the first is {missing[0]!r}", hint=hint)
    if mismatched := sorted(found["mismatched_keys"]):
        name, stored, expected = mismatched[0]
        raise ModelError(
            f"{path}: tensor {name!r} has shape {list(stored)}, but config.json asks for {list(expected)}", hint=hint
        )
    return model, len(found["unexpected_keys"])


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar and no load report: problems with the weights become errors of ours."""
    logging: Any = transformers.utils.logging
    had_progress_bar, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_progress_bar:
            logging.enable_progress_bar()


def _refuse_by_backend(layers: tuple[AttentionLayer, ...], spec: ModelSpec, backend: AttentionBackend) -> None:
    for layer in dict.fromkeys(layers):
        if reason := layer_refusal(backend.capabilities, layer):
            raise ModelError(
                f"{spec.architecture} cannot run on attention backend '{backend.name}', which {reason}",
                hint="use attention_backend: reference",
            )


def refuse_by_class(model: Any, spec: ModelSpec) -> None:
    """Refuse what the model's class shows. Raises: ModelError."""
    if not model._supports_attention_backend:
        raise refused(spec.architecture, "does not call transformers' attention interface")
    if model.base_model is model:
        raise refused(spec.architecture, "does not separate its layers from its head")
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise refused(spec.architecture, "takes no position ids")


_CHUNKS = ((4, 3), (2, 3))  # two sequences of 7 and 5 tokens, each computed in two steps
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}  # relative error of a token's logits
# In 16 bits a mixture of experts may route a token or two differently after rounding.
_ALLOWED_OUTLIERS = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 2}


@torch.inference_mode()
def own_logits(model: Any, vocab_size: int) -> Tensor:
    """Logits [12, V] of the probe by transformers' own attention, one call per sequence."""
    ids = _probe_ids(vocab_size, model.device)
    return torch.cat([model(input_ids=sequence[None], use_cache=False).logits[0] for sequence in ids])


@torch.inference_mode()
def check_equal(paged: TransformersLM, expected: Tensor, dtype: torch.dtype) -> None:
    """Raise ModelError if the paged cache gives logits different from `expected`, the result of own_logits.

    Uses the reference backend: this tests whether the model suits a paged cache, not the kernels.
    """
    actual = _paged_logits(paged, dtype, expected.device).float()
    errors = (actual - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    num_wrong = int((~(errors <= _TOLERANCE[dtype])).sum())  # NaN counts as wrong
    if num_wrong > _ALLOWED_OUTLIERS[dtype]:
        raise refused(
            paged.spec.architecture,
            f"gives other results there than by itself ({num_wrong} of {len(errors)} tokens differ, by up to "
            f"{errors.max().item():.2%}), so it mixes tokens outside of attention or ignores position ids",
        )


def _paged_logits(paged: TransformersLM, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Compute the logits of both sequences together, in two steps over a paged cache."""
    spec, backend, block_size = paged.spec, ReferenceAttention(), 2
    ids = _probe_ids(spec.vocab_size, device)
    width = -(-max(len(sequence) for sequence in ids) // block_size)
    table = torch.arange(2 * width, dtype=torch.int32).flip(0).view(2, width)
    groups = layer_groups(paged.attention_layers)
    shape = cache_shape(paged, backend, 2 * width * len(groups), block_size)
    kv_cache = torch.zeros(shape, dtype=dtype, device=device)
    rows: list[Tensor] = []
    starts = [0, 0]
    for chunk in zip(*_CHUNKS, strict=True):
        ends = [start + num_new for start, num_new in zip(starts, chunk, strict=True)]
        spans = list(zip(starts, ends, strict=True))
        tokens = torch.cat([sequence[start:end] for sequence, (start, end) in zip(ids, spans, strict=True)])
        positions = torch.cat([torch.arange(start, end) for start, end in spans])
        owners = torch.repeat_interleave(torch.arange(2), torch.tensor(chunk))
        slots = table[owners, positions // block_size] * block_size + positions % block_size
        cu_q = [0, chunk[0], sum(chunk)]
        batch = PagedBatch(
            cu_q=torch.tensor(cu_q, dtype=torch.int32, device=device),
            num_tokens=torch.tensor(ends, dtype=torch.int32, device=device),
            block_table=table.to(device),
            slots=slots.to(device, torch.int32),
            max_new=max(chunk),
            max_total=max(ends),
            cu_q_host=cu_q,
            num_tokens_host=ends,
        )
        batch.others = tuple(_of_group(batch, group, 2 * width, block_size) for group in range(1, len(groups)))
        logits = paged.compute_logits(paged.forward_through(backend, tokens, positions.to(device), batch, kv_cache))
        rows += torch.split(logits, list(chunk))
        starts = ends
    return torch.cat(rows[0::2] + rows[1::2])  # grouped by sequence again


def _of_group(batch: PagedBatch, group: int, num_blocks: int, block_size: int) -> PagedBatch:
    """The batch of another group of layers: the same tables, further back in the cache."""
    offset = group * num_blocks
    return replace(batch, block_table=batch.block_table + offset, slots=batch.slots + offset * block_size)


def _probe_ids(vocab_size: int, device: torch.device) -> list[Tensor]:
    """Token ids spread over the vocabulary, [7] and [5]."""
    lengths = [sum(chunks) for chunks in _CHUNKS]
    return [(torch.arange(length, device=device) * 7919 + 31 * length) % vocab_size for length in lengths]
