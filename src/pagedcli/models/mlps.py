"""What follows the mixer of a layer, as data: an MLP, a mixture of experts, or both. Free of torch."""

from dataclasses import dataclass, replace

from pagedcli.layers.kinds import Routing
from pagedcli.models.formats import VECTOR
from pagedcli.models.tensors import Parameter, Tensors, exact

# Numbers that xIELU is made of, see layers.basic.xielu: shape and first value
_XIELU: dict[str, tuple[tuple[int, ...], float]] = {
    "alpha_p": ((1,), 0.2),
    "alpha_n": ((1,), -1.0),
    "beta": ((), 0.5),
    "eps": ((), -1e-6),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """down(activation(gate) * up), or down(activation(up)) without gates."""

    width: int
    activation: str
    gated: bool = True
    bias: bool = False
    # factors of the gate and of the result, by which weights are multiplied when they are read
    factors: tuple[float, float] = (1.0, 1.0)

    @property
    def input_name(self) -> str:
        """What its first linear layer is called here."""
        return "gate_up" if self.gated else "up"

    def split(self, num_ranks: int) -> "Mlp":
        """One rank's part."""
        return replace(self, width=self.width // num_ranks)

    def unsplit_reason(self, projections: tuple[str, ...]) -> str | None:
        """Why it is not split over ranks, in a few words."""
        return "stacks its projections" if self.gated and len(projections) == 2 else None

    def tensors(self, make: Tensors, key: str, name: str, projections: tuple[str, ...]) -> dict[str, Parameter]:
        """Its tensors under the module `name` of the checkpoint. `projections`: two, if gate and up are stacked."""
        *first, down = (f"{name}.{each}" for each in projections)
        rows = dict.fromkeys(first, 2 * self.width // len(first) if self.gated else self.width)
        of_gate, of_result = self.factors
        gate_factors = ((self.width, of_gate), (self.width, 1.0)) if self.gated else ()
        found = make.linear(f"{key}.{self.input_name}", rows, make.width, bias=self.bias, factors=gate_factors)
        factors = ((make.width, of_result),)
        if self.activation == "xielu":
            for part, (shape, init) in _XIELU.items():
                found[f"{key}.{part}"] = exact({f"{name}.act_fn.{part}": shape}, init=init)
        return found | make.linear(f"{key}.down", {down: make.width}, self.width, bias=self.bias, factors=factors)

    def parameters(self, make: Tensors, key: str, layer: str, num_experts: int | None) -> dict[str, Parameter]:
        """Its tensors. `key`: of the layer here, `layer`: in the checkpoint. `num_experts`: see Experts."""
        return self.tensors(make, key, f"{layer}.{make.names.mlp}", make.names.projections)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """How a checkpoint names a mixture of experts within a layer. The defaults are Qwen's."""

    block: str = "mlp"  # "": they are parts of the layer itself
    router: str = "gate"
    router_bias: str = "expert_bias"  # a number per expert, see Experts.has_router_bias
    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "mlp.shared_expert"
    shared_projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # two: gate and up are stacked


_NORMS_BESIDE_MLP = {  # norms of experts that stand next to an MLP, and the norm after that MLP
    "dense_norm_after": "post_feedforward_layernorm_1",
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts_norm_after": "post_feedforward_layernorm_2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts(Routing):
    """A mixture of experts: MLPs of which a router picks some for each token."""

    num_experts: int
    each: Mlp
    has_router_bias: bool = False  # a number per expert is added to the scores for picking alone
    shared: Mlp | None = None  # an expert for every token
    gates_shared: bool = True  # whether the shared expert is weighted by a gate of its own
    has_biases: bool = False  # biases of the router and the experts' projections
    alternating: bool = False  # stacked in the checkpoint as [experts, in, out], in which gates and ups alternate
    beside: Mlp | None = None  # an MLP whose result is added; the router then norms the residual by weights of its own
    names: ExpertNames = ExpertNames()

    @property
    def share(self) -> float:
        """The part of the experts that one token goes to."""
        return self.num_per_token / self.num_experts

    def split(self, num_ranks: int) -> "Experts":
        """One rank's part: of every expert, as its weights say."""
        return self if self.beside is None else replace(self, beside=self.beside.split(num_ranks))

    def unsplit_reason(self, projections: tuple[str, ...]) -> str | None:
        """Why it is not split over ranks, in a few words."""
        if self.shared is not None and (why := self.shared.unsplit_reason(self.names.shared_projections)):
            return why
        return None if self.beside is None else self.beside.unsplit_reason(projections)

    def parameters(self, make: Tensors, key: str, layer: str, num_experts: int | None) -> dict[str, Parameter]:
        """Its tensors. `key`: of the layer here, `layer`: in the checkpoint. `num_experts`: of so many experts only,
        where one stands for all."""
        names, width, count = self.names, make.width, self.num_experts
        block = f"{layer}.{names.block}" if names.block else layer
        router = f"{block}.{names.router}"
        found = {} if self.beside is None else self.beside.parameters(make, key, layer, None)
        found[f"{key}.router"] = Parameter({f"{router}.weight": (count, width)})
        if self.has_biases:
            found[f"{key}.router.bias"] = Parameter({f"{router}.bias": (count,)}, stored=VECTOR)
        if self.has_router_bias:
            found[f"{key}.router_bias"] = exact({f"{block}.{names.router_bias}": (count,)}, init=0.0)
        if self.beside is not None:
            found[f"{key}.router_norm"] = exact({f"{layer}.router.scale": (width,)}, init=1.0)
            found[f"{key}.expert_scales"] = exact({f"{layer}.router.per_expert_scale": (count,)}, init=1.0)
            for norm, stored in _NORMS_BESIDE_MLP.items():
                found[f"{key}.{norm}"] = make.norm({f"{layer}.{stored}": width})
        for i in range(count if num_experts is None else num_experts):
            found |= self.each.tensors(make, f"{key}.experts.{i}", f"{block}.experts.{i}", names.projections)
        if self.shared is not None:
            shared = f"{layer}.{names.shared}"
            found |= self.shared.tensors(make, f"{key}.shared_expert", shared, names.shared_projections)
            if self.gates_shared:
                found[f"{key}.shared_gate"] = Parameter({f"{shared}_gate.weight": (1, width)})
        return found
