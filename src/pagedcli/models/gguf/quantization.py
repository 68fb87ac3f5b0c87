"""Which types a GGUF file stores its linear layers in. Free of torch."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pagedcli.models.gguf.names import stored_module
from pagedcli.models.gguf.types import BY_NAME, GgmlType


@dataclass(frozen=True, slots=True)
class GgufQuantization:
    """The types of a file's tensors, of which some linear layers are quantized."""

    types: Mapping[str, str] = field(hash=False)  # tensor -> name of its type
    sizes: Mapping[str, int] = field(hash=False)  # tensor -> numbers in it
    normed_before: bool = True  # see names.stored_module

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
    def output(self) -> str:
        """The module whose tensor the output layer is."""
        return "lm_head" if "output.weight" in self.types else "model.embed_tokens"

    def type_of(self, module: str) -> GgmlType:
        """The type of a linear layer, by the name that transformers gives it; F32 if the file lacks it."""
        name, _ = stored_module(module, normed_before=self.normed_before)
        return BY_NAME[self.types.get(f"{name}.weight", "F32")]

    def covers(self, module: str) -> bool:
        """Whether a linear layer is stored quantized."""
        return not self.type_of(module).is_float
