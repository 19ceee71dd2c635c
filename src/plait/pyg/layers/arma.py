"""ARMA: stacks of S @ X @ W + R @ V + b with an activation between, averaged at the end."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.nn import ARMAConv

from plait.ir import Dense, Expr, total
from plait.pyg.layers.base import Apply, Call, Lowered, NotLowered, bias, features, not_summed, rule, weight
from plait.pyg.layers.matrix import gcn_operator, symmetric
from plait.pyg.operators import Operator

__all__: list[str] = []

_Forms = tuple[tuple[Expr, ...], tuple[Expr, ...]]


@cache
def _forms(operator: Operator, is_weighted: bool, has_bias: bool) -> _Forms:
    """(where the root is X itself, where it is another matrix R)."""
    spread = (symmetric(operator, is_weighted) @ features()) @ weight()
    tail = (bias(),) if has_bias else ()
    same = total(spread, features() @ weight("V"), *tail)
    apart = total(spread, Dense("R", "N", "Kr") @ weight("V", "Kr"), *tail)
    return (same,), (apart,)


@rule(ARMAConv)
def _arma(module: Any, call: Call) -> Lowered | NotLowered:
    stop = not_summed(module, call)
    if stop:
        return stop
    if call.is_sparse:
        return NotLowered("ARMAConv: PyG multiplies stacks of features by edge lists only")
    layers = 1 if module.shared_weights else module.num_layers
    size = (layers, module.num_stacks, 1, module.out_channels)
    if module.bias is not None and tuple(module.bias.shape) != size:
        return NotLowered("ARMAConv: its bias was replaced by one of another size")
    operator = gcn_operator(call, add_self_loops=False)
    return Lowered(operator, partial(_run, _forms(operator, call.is_weighted, module.bias is not None)))


def _run(forms: _Forms, module: Any, apply: Apply, x: Tensor, root: Tensor | None) -> Tensor:
    if module.num_layers == 0:
        return x
    stacks: list[Tensor] = []
    for layer in range(module.num_layers):
        # one mask for all stacks, drawn where PyG draws it
        own = x
        if module.dropout > 0 and module.training:
            own = functional.dropout(x, p=module.dropout, training=True)
        at = 0 if module.shared_weights else layer
        rows = None if module.bias is None else module.bias[at].squeeze(1)
        if layer == 0:
            stacks = _first(forms, module, apply, x, own, rows)
        else:
            weights = module.weight[0 if module.shared_weights else layer - 1]
            roots = module.root_weight[at]
            stacks = [
                apply(forms[1], _values(h, weights[k], own, roots[k], None if rows is None else rows[k]))
                for k, h in enumerate(stacks)
            ]
        if module.act is not None:
            made = module.act(torch.stack(stacks))
            stacks = [
                made[k] for k in range(len(stacks))
            ]  # not unbound: torch lets nobody change those in place
    if len(stacks) > 1:
        return torch.stack(stacks).mean(dim=0)
    # an activation may need its result for its gradient; PyG hands out one that may be changed in place
    return stacks[0] if module.act is None else stacks[0].clone()


def _values(
    x: Tensor, w: Tensor, own: Tensor | None, v: Tensor, row: Tensor | None
) -> dict[str, Tensor | None]:
    values: dict[str, Tensor | None] = {"X": x, "W": w, "V": v}
    if own is not None:
        values["R"] = own
    if row is not None:
        values["b"] = row
    return values


def _first(
    forms: _Forms, module: Any, apply: Apply, x: Tensor, own: Tensor, rows: Tensor | None
) -> list[Tensor]:
    """The first layer of every stack at once: all read x, so their weights stand side by side."""
    w, v = _side_by_side(module.init_weight), _side_by_side(module.root_weight[0])
    row = None if rows is None else rows.reshape(-1)
    is_same = own is x
    out = apply(forms[0] if is_same else forms[1], _values(x, w, None if is_same else own, v, row))
    return [out] if module.num_stacks == 1 else list(out.chunk(module.num_stacks, dim=1))


def _side_by_side(weights: Tensor) -> Tensor:
    """[stacks, in, out] as [in, stacks * out]."""
    return weights[0] if weights.size(0) == 1 else weights.transpose(0, 1).flatten(1)
