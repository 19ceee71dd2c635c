"""PNAConv: several aggregators of linear messages in one pass, degree scalers after the weights.

A message W_a x_i + W_b x_j + b is the neighbour's part shifted by the target's: mean, max and min shift with
it, a sum by degree times it, variance and deviation not at all. The shift is multiplied with the weights as
one small matrix, so the targets' part is never computed. Ties between messages are those of the neighbours'
parts; torch counts its zero-filled output as one more where the extremum is exactly 0, which is not followed.

Edge features are added to the neighbour's part in blocks of edges. Where messages have more than one
layer (pre_layers) nothing shifts out of them: the first layer is split by ends, the others run in blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import PNAConv
from torch_geometric.nn import aggr as pyg
from torch_geometric.nn.aggr import DegreeScalerAggregation, MultiAggregation

from plait.kernels.multi import Layout
from plait.plan.pna import SHIFTED, Towers, ways
from plait.plan.ways import Way
from plait.pyg import active
from plait.pyg.layers.base import has_hooks, is_parametrized, is_plain_linear
from plait.pyg.layers.fused import (
    Run,
    csr_order,
    degrees_of,
    edges_of,
    fused,
    refused_edges,
    refused_features,
)
from plait.pyg.layers.pieces import is_elementwise
from plait.runtime.edges import Edges
from plait.runtime.ways import Programs

__all__ = ["prepare"]

_NAMES = {
    pyg.MeanAggregation: "mean",
    pyg.SumAggregation: "sum",
    pyg.MaxAggregation: "max",
    pyg.MinAggregation: "min",
    pyg.VarAggregation: "var",
    pyg.StdAggregation: "std",
}
_SCALERS = ("identity", "amplification", "attenuation", "linear", "inverse_linear")


@fused(PNAConv)
def prepare(module: Any, given: Mapping[str, Any]) -> Run | str:
    """The call made ready to run, or why it runs in PyG."""
    x, edge_index = given["x"], given["edge_index"]
    if not isinstance(x, Tensor) or x.dim() != 2:
        return ": x is not [nodes, width]"
    attr = given.get("edge_attr")
    reason = refused_edges(edge_index) or refused_features(module, x, attr) or _refused(module, attr)
    if reason is not None:
        return reason
    edges = edges_of(module, edge_index, x.shape[0], x.shape[0])
    return functools.partial(_run, module, edges, x, None if attr is None else csr_order(edges, attr))


def _refused(module: Any, attr: Tensor | None) -> str | None:
    if (attr is None) != (module.edge_dim is None) or (
        attr is not None and (attr.dim() != 2 or attr.shape[1] != module.edge_dim)
    ):
        return f"(edge_dim={module.edge_dim}): edge_attr is not [edges, edge_dim]"
    acts, maps = ([layer for nn in module.pre_nns for layer in nn[k::2]] for k in (1, 2))
    if not all(map(is_elementwise, acts)) or not all(map(is_plain_linear, maps)):
        return ": messages with this activation are not planned, or a layer inside them was replaced"
    scaler = module.aggr_module
    if type(scaler) is not DegreeScalerAggregation or type(scaler.aggr) is not MultiAggregation:
        return ": the aggregation was replaced"
    names = _aggregators(module)
    if scaler.aggr.mode != "cat" or None in names or len(set(names)) < len(names):
        return ": one of the aggregators is not planned, or named twice"
    if any(_is_half(aggr) for aggr in scaler.aggr.aggrs) or any(s not in _SCALERS for s in scaler.scaler):
        return ": half gradients and other scalers are not planned"
    first = [nn[0] for nns in (module.pre_nns, module.post_nns) for nn in nns]
    first += [] if attr is None else [module.edge_encoder]
    watched = [*module.pre_nns, *module.post_nns, scaler, scaler.aggr, *scaler.aggr.aggrs]
    if not all(map(is_plain_linear, [*first, module.lin])) or any(map(has_hooks, watched)):
        return ": a part of the layer has hooks or was replaced"
    if any(layer.bias is None for layer in [*first, *maps, module.lin]):
        return ": a linear layer inside was replaced by one without a bias, which is not planned"
    if is_parametrized(module):
        return ": a weight is parametrized, and PyG computes it at every read"
    return None


def _aggregators(module: Any) -> tuple[str, ...]:
    return tuple(_NAMES.get(type(aggr)) for aggr in module.aggr_module.aggr.aggrs)  # type: ignore[misc]


def _is_half(aggr: Any) -> bool:
    return bool(getattr(getattr(aggr, "var_aggr", aggr), "semi_grad", False))


def _run(module: Any, edges: Edges, x: Tensor, attr: Tensor | None) -> Tensor:
    of = _towers(module, attr)
    call = _Call(module, of, edges, x.dtype)
    inputs = {"X": x} | ({} if attr is None else {"e": attr}) | call.of_messages()
    if of.has_last:
        inputs |= {"L": module.lin.weight.t(), "l": module.lin.bias}
    given = {"message": call.message()} if of.is_in_blocks else None

    def make(wrt: tuple[str, ...] | None) -> list[Way]:
        return ways(of, wrt is not None)

    key = ("aggregators", of, call.wants)
    programs = Programs(active.name_of(module), key, make, call.weights)
    out = programs.value(active.session(), edges, inputs, given)
    return _later_layers(module, out) if len(module.post_nns[0]) > 1 else out


def _towers(module: Any, attr: Tensor | None) -> Towers:
    names = _aggregators(module)
    layout = Layout(names, module.F_in, module.towers)
    return Towers(
        width=module.F_in, outer=module.F_out, towers=module.towers, names=names, kept=layout.kept,
        sections=layout.sections, scalers=len(module.aggr_module.scaler),
        is_divided=module.divide_input and module.towers > 1,
        has_last=module.towers > 1 and len(module.post_nns[0]) == 1,
        edge_width=0 if attr is None else attr.shape[1], message_layers=(len(module.pre_nns[0]) + 1) // 2,
    )  # fmt: skip


def _later_layers(module: Any, out: Tensor) -> Tensor:
    """The towers' layers after the first, the user's own modules, and the last map."""
    outs = list(torch.split(out, module.F_out, dim=1))
    for t, layers in enumerate(module.post_nns):
        for layer in list(layers)[1:]:
            outs[t] = layer(outs[t])
    last: Tensor = module.lin(torch.cat(outs, 1))
    return last


class _Call:
    """The weights of one call as the ways read them; all that is computed here is of the parameters' size."""

    def __init__(self, module: Any, of: Towers, edges: Edges, dtype: torch.dtype):
        self.module, self.of, self.edges, self.dtype = module, of, edges, dtype
        self.project = active.session().project
        self.pre = [(nn[0].weight, nn[0].bias) for nn in module.pre_nns]
        self.post = [(nn[0].weight, nn[0].bias) for nn in module.post_nns]
        self.is_folded = of.towers == 1 and len(module.post_nns[0]) == 1
        scaler = module.aggr_module
        self.averages = (scaler.avg_deg_lin, scaler.avg_deg_log)

    @property
    def wants(self) -> tuple[bool, ...]:
        """Which of the tensors behind `weights` need a gradient."""
        last = [(self.module.lin.weight, self.module.lin.bias)] if self.is_folded else []
        if self.of.edge_width:
            last.append((self.module.edge_encoder.weight, self.module.edge_encoder.bias))
        pairs = [*self.pre, *self.post, *last, self.averages]
        return tuple([tensor.requires_grad for pair in pairs for tensor in pair])

    # Messages ---------------------------------------------------------------------------------

    def of_messages(self) -> dict[str, Tensor]:
        """The inputs that messages are made with."""
        of, width = self.of, self.of.width
        found = self._by_tower("V", [weight[:, width : 2 * width].t() for weight, _ in self.pre])
        if of.edge_width:
            found["E"] = torch.cat([self._edge_map(t) for t in range(of.towers)]).t()
        if of.message_layers > 1:
            found |= self._by_tower("B", [weight[:, :width].t() for weight, _ in self.pre])
            found |= self._by_tower("b", [self._bias(t) for t in range(of.towers)])
            inner = [nn[k] for nn in self.module.pre_nns for k in range(2, len(nn), 2)]
            found |= {f"H{k}": linear.weight for k, linear in enumerate(inner)}
            found |= {f"h{k}": linear.bias for k, linear in enumerate(inner)}
        return found

    def _by_tower(self, name: str, parts: list[Tensor]) -> dict[str, Tensor]:
        if self.of.is_divided:
            return {f"{name}{t}": part for t, part in enumerate(parts)}
        return {name: parts[0] if len(parts) == 1 else torch.cat(parts, -1)}

    def message(self) -> Callable[..., Tensor]:
        """(near rows, far rows, edges' rows, parameters) -> messages of a block of edges."""
        of, pre_nns = self.of, self.module.pre_nns
        split, depth = int(of.edge_width > 0), of.message_layers - 1
        count = of.towers * depth

        def message(near: Tensor | None, far: Tensor, edge: Tensor | None, *w: Tensor) -> Tensor:
            rows = far if edge is None else torch.addmm(far, edge, w[0])
            if near is None:
                return rows
            weights, shifts = w[split : split + count], w[split + count :]
            outs = []
            for t, part in enumerate(torch.split(rows + near, of.width, dim=1)):
                for k in range(depth):
                    part = pre_nns[t][2 * k + 1](part)
                    part = torch.addmm(shifts[t * depth + k], part, weights[t * depth + k].t())
                outs.append(part)
            return torch.cat(outs, 1)

        return message

    def _edge_map(self, t: int) -> Tensor:
        """[width, edge_dim]: edge features to a tower's messages, the encoder folded in."""
        made: Tensor = self.pre[t][0][:, 2 * self.of.width :] @ self.module.edge_encoder.weight
        return made

    def _bias(self, t: int) -> Tensor:
        """What a tower adds to every message."""
        weight, bias = self.pre[t]
        made: Tensor = (
            bias + weight[:, 2 * self.of.width :] @ self.module.edge_encoder.bias
            if self.of.edge_width
            else bias
        )
        return made

    # Outputs ----------------------------------------------------------------------------------

    def weights(self, choice: str) -> dict[str, Tensor]:
        """The inputs of the way of this name alone."""
        found = {"S": self._scales(choice == "after" and self.of.has_summed_shift)}
        if choice == "before" and (self.of.has_shift or self.of.has_summed_shift):
            found["O"] = self._often()
        for t in range(self.of.towers):
            made = self._before(t) if choice == "before" else self._after(t)
            found |= {f"{name}{t}": value for name, value in made.items()}
        return found

    def _after(self, t: int) -> dict[str, Tensor]:
        """Own part and every scaler's weights, with the targets' part as it shifts the aggregates."""
        of = self.of
        weight, bias = self._post(t)
        # [outer, 1 + scalers * aggregators, width]: x, then the aggregators of each scaler
        blocks = weight.reshape(of.outer, -1, of.width)
        by_scaler = blocks[:, 1:].reshape(of.outer, of.scalers, len(of.names), of.width)
        found = {"C": blocks[:, 0].t(), "c": bias}
        found["W"] = by_scaler.permute(2, 3, 1, 0).reshape(len(of.names) * of.width, -1)
        if of.has_shift:
            once = [k for k, name in enumerate(of.names) if name in SHIFTED]
            found["D"], found["d"] = self._shifted(t, by_scaler[:, :, once].sum(2))
        if of.has_summed_shift:
            more, shift = self._shifted(t, by_scaler[:, :, of.names.index("sum")])
            found |= {"C": torch.cat([found["C"], more], 1), "c": torch.cat([bias, shift])}
        return found

    def _shifted(self, t: int, met: Tensor) -> tuple[Tensor, Tensor]:
        """(weight, bias) of the targets' part through the weights it meets, [outer, scalers, width]."""
        own = torch.cat([self.pre[t][0][:, : self.of.width], self._bias(t)[:, None]], 1).t()
        both = self.project(own, met.permute(2, 1, 0).reshape(self.of.width, -1))
        return both[:-1], both[-1]

    def _before(self, t: int) -> dict[str, Tensor]:
        """Own part, the targets' part, and the weights of scaled copies of the aggregates."""
        width = self.of.width
        weight, bias = self._post(t)
        found = {"C": weight[:, :width].t(), "c": bias, "W": weight[:, width:].t()}
        if self.of.has_shift or self.of.has_summed_shift:
            found |= {"U": self.pre[t][0][:, :width].t(), "u": self._bias(t)}
        return found

    def _post(self, t: int) -> tuple[Tensor, Tensor]:
        """(weight, bias) of a tower's first layer after the aggregation, the layer's last map folded in."""
        weight, bias = self.post[t]
        if not (self.of.has_shift or self.of.has_summed_shift or self.of.message_layers > 1):
            bias = bias + 0.0 * self._bias(t).sum()  # deviations ignore a shift: its gradient is 0, not None
        if not self.is_folded:
            return weight, bias
        # on plait's own product: its bits do not depend on the number of threads
        last = self.module.lin
        both = self.project(last.weight, torch.cat([weight, bias[:, None]], 1))
        return both[:, :-1], both[:, -1] + last.bias

    def _often(self) -> Tensor:
        """[nodes, aggregators]: how often the shift enters an aggregate."""
        degree = degrees_of(self.edges, self.dtype)
        once, none = degree.clamp(max=1), torch.zeros_like(degree)
        names = self.of.names
        return torch.stack([degree if n == "sum" else once if n in SHIFTED else none for n in names], 1)

    def _scales(self, has_sums: bool) -> Tensor:
        """[nodes, groups]: what each scaler weighs a node with; then times the degree, for shifts of sums.

        A node without edges has no messages to shift: its weights are 0, as its aggregates are.
        """
        names, (linear, logarithmic) = self.module.aggr_module.scaler, self.averages
        degree = degrees_of(self.edges, self.dtype)
        least = degree.clamp(min=1)
        made = {"identity": torch.ones_like(degree)}
        if "linear" in names or "inverse_linear" in names:
            made |= {"linear": degree / linear, "inverse_linear": linear / least}
        if "amplification" in names or "attenuation" in names:
            made["amplification"] = torch.log(degree + 1) / logarithmic
            made["attenuation"] = logarithmic / torch.log(least + 1)
        columns = torch.stack([made[name] for name in names], 1) * (degree > 0).to(self.dtype)[:, None]
        return torch.cat([columns, columns * degree[:, None]], 1) if has_sums else columns
