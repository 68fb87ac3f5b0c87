"""The explicit fallback: any other causal language model of transformers, run over our paged cache.

transformers' AttentionInterface passes its attention calls to us; everything else is transformers' code. Used by
models.loading for families that are not native. Only this module and fallback_*.py import transformers.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM

from pagedcli.attention.base import AttentionBackend, PagedBatch
from pagedcli.attention.layer import AttentionLayer
from pagedcli.attention.select import layer_refusal
from pagedcli.errors import ModelError
from pagedcli.models import fallback_probe
from pagedcli.models.base import DecoderNeeds, DecoderRequest
from pagedcli.models.fallback_refusals import AttentionTrace, refuse_length
from pagedcli.models.fallback_refusals import refusal as refused
from pagedcli.models.fallback_spec import first_sentence, read_config
from pagedcli.models.formats import AS_STORED
from pagedcli.models.layer_step import LayerStep, layer_steps
from pagedcli.models.spec import ModelSpec

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
        return logits.to(hidden.dtype)


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
            notes += [f"{num_unused} tensors of the checkpoint are not used by it"] if num_unused else []
    except ValueError as error:  # how transformers reports that it has no such causal language model
        raise ModelError(f"transformers cannot load {spec.architecture}: {first_sentence(error)}") from error
    model.eval().to(request.device)
    try:
        refuse_by_class(model, spec)
        expected = fallback_probe.own_logits(model, spec.vocab_size)
        layers = trace_attention(model, spec, max_model_len)
        _refuse_by_backend(layers, spec, request.backend)
        paged = TransformersLM(model, spec, backend=request.backend, notes=tuple(notes), attention_layers=layers)
        fallback_probe.check_equal(paged, expected, dtype)
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
