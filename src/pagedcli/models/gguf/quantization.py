"""Which types a GGUF file stores its linear layers in. Free of torch."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pagedcli.models.gguf.names import stored_tensor
from pagedcli.models.gguf.types import BY_NAME, CODEBOOK, GgmlType
from pagedcli.printable import plural

# what is computed with as numbers, and the last parts of its tensors' names
_WIDENED = {
    "routers": ("ffn_gate_inp", "ffn_gate_inp_shexp"),
    "the inputs of layers": ("per_layer_token_embd", "per_layer_model_proj", "inp_gate", "proj"),
    "K's and V's matrices of latents": ("attn_k_b", "attn_v_b", "attn_kv_b"),
    "gates of states": ("ssm_ba", "ssm_alpha", "ssm_beta", "ssm_f_a", "ssm_f_b"),
}


def _part(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class GgufQuantization:
    """The types of a file's tensors, of which some linear layers are quantized."""

    types: Mapping[str, str] = field(hash=False)  # tensor -> name of its type
    sizes: Mapping[str, int] = field(hash=False)  # tensor -> numbers in it

    method = "gguf"
    act_order = False  # groups are neighbours

    @property
    def description(self) -> str:
        """The types by how much they store, e.g. "GGUF: Q4_K 71 %, Q6_K 29 %"."""
        totals: Counter[str] = Counter()
        for name, kind in self.types.items():
            if not BY_NAME[kind].is_float:
                totals[kind] += self.sizes[name]
        whole = sum(totals.values())
        return "GGUF: " + ", ".join(f"{kind} {100 * count / whole:.0f} %" for kind, count in totals.most_common())

    @property
    def widened(self) -> str:
        """What CPU kernels do not keep as stored, e.g. "the embedding, gate and up of 2 layers"; empty if nothing."""
        embedding = self.types.get("token_embd.weight", "F32")
        parts = ["the embedding"] if self.output == "lm_head" and not BY_NAME[embedding].is_float else []
        for what, names in _WIDENED.items():
            if any(not BY_NAME[kind].is_float and _part(name) in names for name, kind in self.types.items()):
                parts.append(what)
        parts += self._differing("gate and up", "ffn_gate", "ffn_up")
        return ", ".join(parts)

    @property
    def widened_in_triton(self) -> str:
        """What Triton kernels do not keep as stored, e.g. "the embedding and output, q, k and v of 2 layers"."""
        parts = ["the embedding and output", *self._differing("gate and up", "ffn_gate", "ffn_up")]
        parts += self._differing("q, k and v", "attn_q", "attn_k", "attn_v")
        unknown = {kind for kind in self.types.values() if not BY_NAME[kind].is_float and not BY_NAME[kind].in_triton}
        return ", ".join([*parts, *sorted(unknown)])

    def _differing(self, what: str, own: str, *others: str) -> list[str]:
        """E.g. ["gate and up of 2 layers"]: those in which tensors that are computed as one have different types."""
        layers = {
            name.split(".")[1]
            for name, kind in self.types.items()
            if f".{own}" in name and name.endswith(".weight") and "norm" not in name
            for other in others
            if self.types.get(name.replace(own, other), kind) != kind
        }
        return [f"{what} of {plural(len(layers), 'layer')}"] if layers else []

    @property
    def output(self) -> str:
        """The module whose tensor the output layer is."""
        return "lm_head" if "output.weight" in self.types else "model.embed_tokens"

    def type_of(self, module: str) -> GgmlType:
        """The type of a linear layer, by the name that transformers gives it; F32 if the file lacks it."""
        return BY_NAME[self.types.get(stored_tensor(f"{module}.weight", self.types).name, "F32")]

    def scales(self, module: str) -> bool:
        """Whether a number of its own multiplies all of a linear layer of NVFP4."""
        if self.type_of(module).name != "NVFP4":
            return False
        name = stored_tensor(f"{module}.scale", self.types).name
        # Gemma 4 calls the factors of its router's weights so
        is_of_router = name.endswith("ffn_down_exps.scale") and name.replace("down_exps", "gate_inp") in self.types
        return name in self.types and not is_of_router

    @property
    def codebooks(self) -> str:
        """The types whose codes number vectors, e.g. "IQ2_XXS, IQ3_S"; empty if there are none."""
        return ", ".join(sorted({kind for kind in self.types.values() if BY_NAME[kind].codes == CODEBOOK}))

    @property
    def has_input_scales(self) -> bool:
        """Whether the file has scales of activations."""
        return any(name.endswith(".input_scale") for name in self.types)

    def covers(self, module: str) -> bool:
        """Whether a linear layer is stored quantized."""
        return not self.type_of(module).is_float
