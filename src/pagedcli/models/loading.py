"""Which decoder runs a model: load_model. The only place that knows decoders by name; a new one is one module and one
line in REGISTRY.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from pagedcli.attention.base import AttentionBackend
from pagedcli.errors import ConfigError
from pagedcli.layers.parallel import SINGLE, ParallelContext
from pagedcli.models.base import CausalLM, DecoderRequest, LoadFormat
from pagedcli.models.formats import weight_format
from pagedcli.models.refusals import length_refusal, window_refusal
from pagedcli.models.spec import ModelSpec

# In order of preference: modules with refusal(request) and load(request). Imported when they are asked.
REGISTRY = {
    "native in one call": "pagedcli.models.cpu_decoder",
    "native": "pagedcli.models.decoder",
    "transformers": "pagedcli.models.transformers_fallback",
}


def load_model(
    path: Path,
    spec: ModelSpec,
    *,
    backend: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = "auto",
    quantization: str | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
    max_model_len: int | None = None,
    parallel: ParallelContext = SINGLE,
) -> CausalLM:
    """Build the model of a folder with its weights on the device; of a parallel group, this rank's part.

    Units:   max_model_len in tokens (None: the length the model was made for).
    Raises:  ModelError for damaged or missing weights, or for an architecture that cannot run here, with the reason;
             ConfigError if no decoder runs the model as it is asked for.
    """
    max_model_len = max_model_len or spec.max_position_embeddings
    if spec.sliding_window is not None and max_model_len > spec.sliding_window:
        raise window_refusal(spec.architecture, spec.sliding_window, max_model_len)
    limit = spec.rope.exact_length if spec.rope is not None else None
    if limit is not None and max_model_len > limit:
        raise length_refusal(spec.architecture, limit, "longrope", max_model_len)
    request = DecoderRequest(
        path=path,
        spec=spec,
        backend=backend,
        weight_format=weight_format(quantization),
        dtype=dtype,
        device=device,
        load_format=load_format,
        seed=seed,
        trust_remote_code=trust_remote_code,
        max_model_len=max_model_len,
        parallel=parallel,
    )
    model: CausalLM = _choose(request).load(request)
    return model


def runs_in_one_call(backend: type[AttentionBackend], spec: ModelSpec) -> bool:
    """Whether the native library that serves attention can run the whole decoder."""
    reason: str | None = import_module(REGISTRY["native in one call"]).spec_refusal(spec, backend)
    return reason is None


def _choose(request: DecoderRequest) -> Any:
    """The first module of the registry that runs the model. Raises: ConfigError with every decoder's reason."""
    refused = []
    for name, module_name in REGISTRY.items():
        module = import_module(module_name)
        reason = module.refusal(request)
        if reason is None:
            return module
        refused.append(f"{name}: {reason}")
    raise ConfigError(
        f"no decoder runs {request.spec.architecture} with weights {request.weight_format.name}: {'; '.join(refused)}",
        hint="use --device cpu on a machine with a C++ compiler, or no --quantization",
    )
