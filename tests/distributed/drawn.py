"""Models drawn at random, over ranks and alone: layers, what torch does with rows between them, a loss."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as models say it
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn import (
    APPNP,
    EdgeConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    JumpingKnowledge,
    LGConv,
    ResGatedGraphConv,
    SAGEConv,
    SGConv,
    TAGConv,
)

import plait

__all__ = ["SEEDS", "compare"]

SEEDS = range(20)
WIDTH = 8
_SLOW = "1mbit,1ms"  # rows without remote neighbours go on before the halo is here
_LAYERS: tuple[Callable[[], nn.Module], ...] = (
    lambda: GCNConv(WIDTH, WIDTH),
    lambda: GCNConv(WIDTH, WIDTH, bias=False, normalize=False),
    lambda: SAGEConv(WIDTH, WIDTH, project=True),
    lambda: SAGEConv(WIDTH, WIDTH, aggr="max"),
    lambda: GINConv(nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH)), train_eps=True),
    lambda: GraphConv(WIDTH, WIDTH),
    lambda: SGConv(WIDTH, WIDTH, K=2),
    lambda: TAGConv(WIDTH, WIDTH, K=2),
    lambda: LGConv(),
    lambda: APPNP(2, 0.1),
    lambda: GATConv(WIDTH, WIDTH // 2, heads=2),
    lambda: GATv2Conv(WIDTH, WIDTH),
    lambda: ResGatedGraphConv(WIDTH, WIDTH),
    lambda: EdgeConv(nn.Linear(2 * WIDTH, WIDTH)),
)
# what stands between layers; `skip` is the input or an earlier h
_LINES = (
    "h = h.relu()", "h = F.leaky_relu(h, 0.1)", "h = F.gelu(h)", "h = F.relu_(h)", "h = h.mul_(0.5)",
    "h += 0.3", "h = -h", "h = 1 - h", "h = h ** 2 / 4", "h = torch.exp(-h.abs())", "h = h.clamp(-3, 3)",
    "h = torch.where(h > 0, h, 0.1 * h)", "h = h.masked_fill(h > 2, 2.0)", "h[:, 0] = 0",
    "h = m.linear(h)", "h = m.linear(h).relu()", "h = h @ m.linear.weight",
    "h = torch.addmm(m.linear.bias, h, m.linear.weight)", "h = torch.einsum('nk,kj->nj', h, m.linear.weight)",
    "h = checkpoint(m.linear, h, use_reentrant=False)", "a = h.relu(); b = m.linear(h); h = a * b",
    "h = m.layer_norm(h)", "h = m.batch_norm(h)", "h = m.prelu(h)", "h = F.normalize(h, dim=1)",
    "h = F.dropout(h, 0.0)", "h = F.log_softmax(h, 1)", "h = h - h.mean(1, keepdim=True)",
    "h = h / (1 + h.abs().amax(dim=1, keepdim=True))", "h = h.sum(1, keepdim=True) + h",
    "skip = h", "h = skip + h", "h = torch.maximum(h, skip)", "h = m.join(torch.cat([h, skip], 1))",
    "h = m.jump([h, skip])", "h = h + 0.1 * h.detach()", "h = h.clone()", "h = h.flatten(1)", "h = h[:]",
    "h = h.t().contiguous().t()", "h = torch.cat([h[:, 4:], h[:, :4]], 1)", "h = h.float().double()",
    "a, b = h.chunk(2, 1); h = torch.cat([b, a * 2], 1)", "h = torch.stack([h, h * 0.5]).sum(0)",
    "h = h.unsqueeze(1).squeeze(1)", "h = F.glu(torch.cat([h, h], 1), 1)",
    "repr(h), len(h), h.shape, h.grad_fn", "float(h.detach().sum())", 
    "h.register_hook(lambda grad: grad * 1.0) if h.requires_grad else None",
    "h.retain_grad() if h.requires_grad else None",
)  # fmt: skip
_LOSSES = ("classes", "classes", "picked", "numbers", "both")


@dataclass(frozen=True)
class _Drawing:
    """A model's layers, its forward pass line by line, and the kind of its loss."""

    layers: tuple[int, ...]
    lines: tuple[str, ...]
    loss: str

    @classmethod
    def of(cls, seed: int) -> _Drawing:
        draw = random.Random(seed)
        layers: list[int] = []
        lines = ["h = skip = x"]
        for _ in range(draw.randint(1, 4)):
            calls = []
            for _ in range(draw.choice((1, 1, 1, 2))):  # two beside each other
                is_again = layers and draw.random() < 0.15
                place = draw.randrange(len(layers)) if is_again else len(layers)
                if not is_again:
                    layers.append(draw.randrange(len(_LAYERS)))
                calls.append(f"m.layers[{place}](h, edge_index)")
            lines.append(f"h = {' + '.join(calls)}")
            lines += (draw.choice(_LINES) for _ in range(draw.randint(0, 4)))
        return cls(tuple(layers), tuple(lines), draw.choice(_LOSSES))


class _Drawn(nn.Module):
    def __init__(self, drawing: _Drawing) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_LAYERS[k]() for k in drawing.layers)
        self.linear, self.join = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.layer_norm, self.batch_norm = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.prelu, self.jump = nn.PReLU(), JumpingKnowledge("max")
        self.code = compile("\n".join(drawing.lines), "forward", "exec")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        names = {
            "m": self,
            "x": x,
            "edge_index": edge_index,
            "torch": torch,
            "F": F,
            "checkpoint": checkpoint,
        }
        exec(self.code, names)
        out: Tensor = names["h"]  # type: ignore[assignment]
        return out


def compare(data: Data, seeds: Iterable[int]) -> int:
    """How many drawn models had layers in halves; losses and outputs are those of one process."""
    data.x = data.x[:, :WIDTH].contiguous()
    count = 0
    for seed in seeds:
        drawing = _Drawing.of(seed)
        try:
            alone, expected, _ = _trained(drawing, data, is_sharded=False)
        except RuntimeError:  # a write in place to what a gradient reads
            continue
        if not np.isfinite(alone).all():
            continue
        losses, out, has_halves = _trained(drawing, data, is_sharded=True)
        count += has_halves
        what = f"seed {seed}: {drawing}"
        np.testing.assert_allclose(losses, alone, rtol=1e-7, atol=1e-7, err_msg=what)
        torch.testing.assert_close(
            out, expected, rtol=1e-6, atol=1e-6, msg=lambda text, w=what: f"{w}\n{text}"
        )
    return count


def _trained(drawing: _Drawing, data: Data, is_sharded: bool) -> tuple[list[float], Tensor, bool]:
    """(losses of some steps, the outputs in the end, whether a layer ran in halves)."""
    torch.manual_seed(0)
    model: Any = _Drawn(drawing).to(data.x.dtype)
    over: Any = plait.shard(model, data, network=_SLOW) if is_sharded else None
    given, call = (over.data, over) if is_sharded else (data, model)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = _loss(drawing.loss, over, call(given.x, given.edge_index), given)
        loss.backward()
        optimizer.step()
        losses.append(float(over.total(loss)) if is_sharded else float(loss.detach()))
    call.eval()
    with torch.no_grad():
        rows = call(given.x, given.edge_index)
    if not is_sharded:
        return losses, rows, False
    return losses, over.gather(rows), any(choice.halves for choice in over.plan.choices.values())


def _loss(kind: str, over: Any, out: Tensor, data: Data) -> Tensor:
    def mean(function: Callable[..., Tensor], target: Tensor, mask: Tensor | None = None) -> Tensor:
        if over is not None:
            found: Tensor = over.loss(function, out, target, mask)
            return found
        return function(out, target) if mask is None else function(out[mask], target[mask])

    if kind == "classes":
        return mean(F.cross_entropy, data.y)
    if kind == "picked":
        return mean(F.cross_entropy, data.y, data.train_mask.nonzero().flatten())
    if kind == "numbers":
        return mean(F.mse_loss, data.x)
    return mean(nn.CrossEntropyLoss(), data.y, data.train_mask) + 0.5 * mean(F.smooth_l1_loss, data.x)
