"""Chooses the decoder of a model and loads it. The only place that names decoders; a new one is one module and one line
in REGISTRY.
"""

from importlib import import_module

from pagedcli.errors import ConfigError, ModelError
from pagedcli.models.base import CausalLM, DecoderNeeds, DecoderRequest, length_refusal
from pagedcli.models.formats import FORMATS, WeightFormat
from pagedcli.models.spec import ModelSpec

IN_ONE_CALL = "native in one call"
# In order of preference: modules with refusal(needs) and load(request), imported lazily.
REGISTRY = {
    IN_ONE_CALL: "pagedcli.models.cpu_decoder",
    "native": "pagedcli.models.decoder",
    "transformers": "pagedcli.models.transformers_fallback",
}


def load_decoder(name: str, request: DecoderRequest) -> CausalLM:
    """Load a model onto its device with the decoder of this name; in a parallel group, this rank's part.

    Raises:  ModelError for damaged or missing weights, or for an architecture that cannot run here, with the reason.
    """
    model: CausalLM = import_module(REGISTRY[name]).load(request)
    return model


def weight_format(quantization: str | None, spec: ModelSpec) -> WeightFormat:
    """The format of a model's weights: that of its checkpoint, or the one that --quantization names.

    Raises: ConfigError for an unknown one, and for a checkpoint that is quantized already.
    """
    if quantization not in FORMATS:
        names = ", ".join(name for name in FORMATS if name is not None)
        raise ConfigError(f"quantization {quantization!r} is unknown", hint=f"choose one of {names}")
    if spec.quantization is None:
        return FORMATS[quantization]
    if quantization is not None:
        raise ConfigError(
            f"quantization is {quantization}, but the checkpoint is quantized already: {spec.quantization.name}",
            hint="leave --quantization out: the checkpoint's own format is used",
        )
    return spec.quantization


def choose_decoder(needs: DecoderNeeds) -> str:
    """The first decoder of the registry that can run the model. Raises: ConfigError with every decoder's reason."""
    refused = []
    for name, module_name in REGISTRY.items():
        reason = import_module(module_name).refusal(needs)
        if reason is None:
            return name
        refused.append(f"{name}: {reason}")
    raise ConfigError(
        f"no decoder runs {needs.spec.architecture} with weights {needs.weight_format.name}: {'; '.join(refused)}",
        hint="use --device cpu on a machine with a C++ compiler, or no --quantization",
    )


def check_length(spec: ModelSpec, max_model_len: int) -> None:
    """Raises: ModelError if the model cannot serve requests of max_model_len tokens."""
    if (chunk := spec.attention_chunk) is not None and max_model_len > chunk:
        raise ModelError(
            f"{spec.architecture} has layers that attend within chunks of {chunk} tokens, which is not implemented,"
            f" and max_model_len {max_model_len} is longer",
            hint=f"use --max-model-len {chunk}: up to there the chunks change nothing",
        )
    rope = spec.rope
    if rope is not None and rope.extends(max_model_len) and not rope.long_factor:
        assert rope.exact_length is not None, "only then it extends"
        raise length_refusal(spec.architecture, rope.exact_length, "longrope", max_model_len)
