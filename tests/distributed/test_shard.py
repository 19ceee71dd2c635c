"""A full graph over 2 and 4 processes: losses are PyG's in one, bytes on the wire are the plan's."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import GCN, ChebConv, GATConv, GCNConv, InstanceNorm, SAGEConv
from torch_geometric.nn.aggr import MeanAggregation

import plait
from plait.distributed import partition
from plait.distributed.peers import Peers
from plait.errors import InputError
from tests.distributed.shards import (
    MODELS,
    OPTIMIZERS,
    SINGLE,
    SINGLE_STEPS,
    Norms,
    Weighted,
    alone,
    everything,
    graph,
    run,
    sharded,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process finds, for the others to compare with."""
    place = tmp_path_factory.mktemp("shards")
    data = graph()
    for name, make in MODELS.items():
        np.save(place / f"{name}.npy", alone(make, graph(dtype=np.float64)))
    for optimizer in OPTIMIZERS:
        for name in SINGLE:
            found = alone(MODELS[name], graph(seed=1), SINGLE_STEPS, optimizer=optimizer)
            np.save(place / f"{name}-{optimizer}.npy", found)
    for name, own in (("norms", Norms), ("weighted", Weighted)):
        np.save(place / f"{name}.npy", alone(own, data, 3))
    partition(data, 4, place / "parts", file=io.StringIO())
    return place


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_lose_what_one_process_loses(folder: Path, size: int) -> None:
    run(everything, size, folder)


def test_receives_are_started_before_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo sends what its receiver has asked for: a request must not wait behind this rank's own rows."""
    started: list[tuple[str, int, int]] = []
    for name in ("irecv", "isend"):

        def start(x: torch.Tensor, rank: int, group: object, name: str = name) -> Any:
            started.append((name, rank, x.numel()))
            return SimpleNamespace(wait=lambda: None)

        monkeypatch.setattr(dist, name, start)
    monkeypatch.setattr(Peers, "_lend", lambda self, halo: ([0, 2, 0, 1], torch.tensor([0, 1, 1])))
    peers = Peers(np.array([0, 2, 4, 6, 7]), np.array([2, 4, 5]))
    receives, sends = [("irecv", 1, 3), ("irecv", 2, 6)], [("isend", 1, 6), ("isend", 3, 3)]
    peers.fetch(torch.ones(2, 3))
    assert started == [*receives, *sends]


def test_one_rank_needs_no_others() -> None:
    data = graph()
    losses, over = sharded(MODELS["gcn"], data, 3)
    np.testing.assert_allclose(losses, alone(MODELS["gcn"], data, 3), atol=1e-5)
    assert (over.rank, over.size, over.num_nodes) == (0, 1, 240)
    assert over.counters.bytes_out == over.plan.bytes_per_step == 0
    assert sorted(over.data.n_id.tolist()) == list(range(240))
    over.close()


def test_half_an_environment_of_torchrun_is_refused_with_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match="RANK and MASTER_PORT not set; start the processes with torchrun"):
        plait.shard(MODELS["gcn"](), graph())


def test_rows_are_gathered_where_a_rank_has_none() -> None:
    _, over = sharded(MODELS["gcn"], graph(), 1)
    over._peers.num_rows = 0  # all of them live elsewhere
    assert over.gather(torch.zeros(0, 3, 2)).shape == (240, 3, 2)
    assert over.gather(torch.zeros(0)).shape == (240,)
    over.close()


def test_the_plan_names_every_layer_and_what_lost() -> None:
    _, over = sharded(MODELS["gcn"], graph(), 1)
    text = str(over.plan)
    assert "convs.0 GCNConv (training): aggregate once before training" in text
    assert "lost: fwd halo x 4" in text
    assert [layer["layer"] for layer in over.plan.to_dict()["layers"]] == [
        f"convs.{k} GCNConv" for k in range(3)
    ]


def test_features_that_change_travel_again() -> None:
    """Only the x it was sharded with stays where it is."""
    _, over = sharded(MODELS["gcn"], graph(), 1)
    with torch.no_grad():
        over.eval()
        first = over(over.data.x, over.data.edge_index)
        other = over(over.data.x + 1, over.data.edge_index)
        over.data.x += 1
        torch.testing.assert_close(over(over.data.x, over.data.edge_index), other)
    assert not torch.equal(first, other)


class _Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(12, 4)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.conv(x, edge_index).mean(0, keepdim=True)


class _Held(nn.Module):
    def __init__(self, *held: nn.Module) -> None:
        super().__init__()
        self.held = nn.ModuleList(held)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (InstanceNorm(4), "held.0: InstanceNorm looks at all nodes"),
        (nn.SyncBatchNorm(4), "SyncBatchNorm looks at all nodes"),
        (MeanAggregation(), "MeanAggregation looks at all nodes"),
        (SAGEConv(4, 4, aggr="lstm"), "SAGEConv looks further"),
        (GCNConv(4, 4, flow="target_to_source"), "turn the edges round"),
    ],
)
def test_what_is_not_exact_is_refused_by_name(module: nn.Module, said: str) -> None:
    with pytest.raises(InputError, match=said):
        plait.shard(_Held(module), graph())


def test_pooled_results_are_refused() -> None:
    over = plait.shard(_Pooled(), graph())
    with pytest.raises(InputError, match="pooling over the nodes of all ranks"):
        over(over.data.x, over.data.edge_index)


def test_bad_arguments_are_refused() -> None:
    data = graph()
    model = GCN(12, 8, 2, 4)
    for message, given in {
        "not a torch.nn.Module": (GCN, data),
        "data: str": (model, "cora"),
        "0 nodes for 1 ranks": (model, Data(edge_index=torch.empty((2, 0), dtype=torch.long), num_nodes=0)),
        "parts: int64 of shape": (model, data, np.zeros(3, np.int64)),
        "ranks are numbered 0 to 0": (model, data, np.ones(240, np.int64)),
    }.items():
        with pytest.raises(InputError, match=message):
            plait.shard(*given)
    with pytest.raises(InputError, match="network"):
        plait.shard(model, data, network="fast")
    with pytest.raises(InputError, match="split: 'edges'; give one of nodes, features"):
        plait.shard(model, data, split="edges")
    over = plait.shard(model, data)
    with pytest.raises(InputError, match="x is"):
        over(over.data.x[1:], over.data.edge_index)
    with pytest.raises(InputError, match=r"sharded\.data\.edge_index"):
        over(over.data.x, over.data.edge_index.clone())
    with pytest.raises(InputError, match="edge_weight is not this rank's"):
        over(over.data.x, over.data.edge_index, torch.ones(900))


def test_layers_that_look_at_both_ends_of_an_edge_see_all_of_it() -> None:
    """Chebyshev polynomials count a node's outgoing edges, which other ranks may hold."""
    data = graph()
    torch.manual_seed(0)
    conv = ChebConv(12, 4, 3)
    over = plait.shard(conv, data)
    expected = conv(data.x, data.edge_index)
    torch.testing.assert_close(over.gather(over(over.data.x, over.data.edge_index)), expected.detach(),
                               rtol=1e-4, atol=1e-5)  # fmt: skip


def test_attention_weights_are_not_gathered() -> None:
    over = plait.shard(GATConv(12, 4), graph())
    with pytest.raises(InputError, match="attention weights"):
        over(over.data.x, over.data.edge_index, return_attention_weights=True)


def test_a_mean_over_all_is_the_sum_of_shares() -> None:
    _, over = sharded(MODELS["gcn"], graph(), 1)
    values = torch.arange(240.0)
    assert float(over.mean(values)) == values.mean()
    mask = values > 200
    assert float(over.mean(values, mask)) == values[mask].mean()
    assert float(over.mean(values.reshape(120, 2))) == values.mean()
    out, y = torch.randn(240, 4), torch.randint(0, 4, (240,))
    torch.testing.assert_close(
        over.loss(functional.cross_entropy, out, y, mask), functional.cross_entropy(out[mask], y[mask])
    )


def test_losses_are_functions_with_a_reduction_or_modules_of_torch() -> None:
    _, over = sharded(MODELS["gcn"], graph(), 1)
    out, y, mask = torch.randn(240, 4), torch.randint(0, 4, (240,)), torch.arange(240) > 200
    wanted = functional.cross_entropy(out[mask], y[mask])
    criterion = nn.CrossEntropyLoss()
    torch.testing.assert_close(over.loss(criterion, out, y, mask), wanted)
    assert criterion.reduction == "mean"
    for function, said in (
        (lambda a, b: functional.cross_entropy(a, b), "takes no reduction="),
        (nn.CrossEntropyLoss(weight=torch.ones(4)), "weighs classes"),
        (nn.NLLLoss(ignore_index=1), "ignores a label"),
        (partial(functional.cross_entropy, weight=torch.ones(4)), "weighs classes"),
        (nn.Identity(), "has no reduction"),
    ):
        with pytest.raises(InputError, match=f"function: .*{said}.*sharded.mean"):
            over.loss(function, out, y)
