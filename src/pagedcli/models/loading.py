"""Chooses the decoder of a model and loads it. The only place that names decoders; a new one is one module and one line
in REGISTRY.
"""

from importlib import import_module

from pagedcli.errors import ConfigError
from pagedcli.models.base import CausalLM, DecoderNeeds, DecoderRequest
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
