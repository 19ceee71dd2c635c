"""plait.shard: an unmodified PyG model trained and evaluated exactly on a graph spread over ranks."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

from plait.analysis.network import network_in_use
from plait.distributed import norms
from plait.distributed.peers import Peers, WireCounters
from plait.distributed.rounds import naming
from plait.distributed.session import TIMEOUT_SECONDS, join
from plait.distributed.shardplan import ShardPlan
from plait.distributed.share import assigned, data_of, whole_of
from plait.errors import InputError
from plait.graph import Graph
from plait.graph.division import Portion, divide, portion
from plait.kernels.compiled import cache_folder
from plait.plan.exchange import Link, checked_split
from plait.pyg.planned import install
from plait.pyg.shard import OverRanks, Share, refused
from plait.pyg.view import view_of
from plait.runtime.halves import Ahead, rows_ahead
from plait.runtime.session import Session
from plait.runtime.spread import Runs

__all__ = ["Sharded", "shard"]

# losses that treat rows alone: of a class for each row, and of as many numbers as the result has
_OF_CLASSES = (functional.cross_entropy, functional.nll_loss)
_OF_NUMBERS = (
    functional.cross_entropy, functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss,
    functional.huber_loss, functional.binary_cross_entropy, functional.binary_cross_entropy_with_logits,
)  # fmt: skip
_AS_FUNCTIONS: dict[type, Callable[..., Tensor]] = {
    nn.CrossEntropyLoss: functional.cross_entropy,
    nn.NLLLoss: functional.nll_loss,
    nn.MSELoss: functional.mse_loss,
    nn.L1Loss: functional.l1_loss,
    nn.BCEWithLogitsLoss: functional.binary_cross_entropy_with_logits,
}
_OWN_MEAN = "give sharded.mean the loss of every row instead"


def shard(
    model: nn.Module,
    data: Any = None,
    parts: Any = None,
    *,
    network: Any = None,
    split: str | None = None,
    method: str = "metis",
    seed: int = 0,
    sync_gradients: bool = True,
    timeout_seconds: float = TIMEOUT_SECONDS,
    interface: str | None = None,
) -> Sharded:
    """The model over the ranks of torchrun, each with its own part of the graph; without torchrun, one rank.

    Call the result as the model is called, with the attributes of `sharded.data`: this rank's x, edge_index,
    y and masks. Losses are shares of the loss over all nodes (`sharded.mean`), gradients are summed over
    ranks at the end of `backward()`, and all ranks start from rank 0's parameters.

    data: the whole graph as a PyG Data, the same on every rank; METIS divides it.
    parts: the rank of every node, or the folder of `plait partition`, from which each rank reads its own
        features; instead of dividing `data`.
    network: what is between the ranks ("10gbit", "1gbit,50us"); the planner decides by it what is sent. The
        default is what `wire.measure_network(keep=True)` measured, and 10gbit where nothing is kept.
    split: "nodes" or "features", for every layer that can be split this way, instead of the planner's choice.
    """
    checked_split(split)
    if not isinstance(model, nn.Module):
        raise InputError(f"model: {type(model).__name__} is not a torch.nn.Module; pass the model itself")
    reason = refused(model) or norms.refused(model, lambda m: isinstance(m, MessagePassing))
    if reason is not None:
        raise InputError(f"model: {reason}")
    linked = network_in_use(network, cache_folder())
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    ends_group = join(timeout_seconds, interface, backend)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    group = None
    if size > 1:
        group = dist.new_group(backend=backend, timeout=timedelta(seconds=timeout_seconds))
    whole = whole_of(data, parts, rank, size)
    part = _agreed(assigned(whole, size, method, seed) if rank == 0 else None, whole.num_nodes, size, group)
    mine = portion(whole.edges_of(rank, part), part, size, rank, lambda marks: _added(marks, group))
    peers = Peers(mine.bounds, mine.halo, rank, group)
    link = Link(linked.bytes_per_s, linked.latency, size - 1, linked.meeting)
    share = data_of(whole, mine, device)
    peers.to(device)
    weights = None if whole.data is None else whole.data.get("edge_weight")

    def graph_of_all() -> Graph:
        return divide(*whole.edges(), part, size).graph

    over = Share(graph_of_all, share.edge_index, share.get("x"), share.get("edge_weight"), weights)
    return Sharded(model, share, mine, peers, link, over, sync_gradients, ends_group, split)


def _added(marks: Any, group: Any) -> Any:
    """The sum over ranks of an array that this rank gives away."""
    if group is None:
        return marks
    summed = torch.from_numpy(marks)
    dist.all_reduce(summed, group=group)
    return summed.numpy()


def _agreed(part: Any, count: int, size: int, group: Any) -> Any:
    """Rank 0's division of the nodes, on every rank."""
    if size == 1:
        return part
    division = torch.zeros(count, dtype=torch.int64) if part is None else torch.from_numpy(part)
    dist.broadcast(division, 0, group=group)
    return division.numpy()


class Sharded(nn.Module):
    """What `shard` returns: called as the model is, on this rank's share of the graph.

    `module` is the model itself, `data` this rank's share (`data.n_id` are its nodes by the caller's
    numbers), `plan` what travels and why, `counters` what was sent.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        division: Portion,
        peers: Peers,
        link: Link,
        share: Share,
        sync_gradients: bool = True,
        ends_group: bool = False,
        split: str | None = None,
    ) -> None:
        super().__init__()
        install()
        self.module = model
        self.data, self.division, self._peers, self._link = data, division, peers, link
        self._ends_group = ends_group
        self._runs = OverRanks(share, peers, Runs(peers, link, split))
        session = Session()
        session.over_ranks = self._runs
        self._session = session
        self._view = [view_of(model, session)]  # in a list: the view is not one more child
        self._equalise()
        if peers.rank:
            torch.manual_seed((torch.initial_seed() + peers.rank) % 2**63)  # masks of dropout differ by rank
        self._gradients = _Gradients(model.parameters(), peers)
        if sync_gradients and peers.size > 1:
            self._gradients.attach()

    @property
    def rank(self) -> int:
        """This process among the others."""
        return self._peers.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._peers.size

    @property
    def num_nodes(self) -> int:
        """Nodes of all ranks."""
        return self._peers.num_nodes

    @property
    def counters(self) -> WireCounters:
        """What this rank has exchanged so far."""
        return self._peers.counters

    @property
    def plan(self) -> ShardPlan:
        """What travels in every layer that has run, with what lost and why."""
        choices = {**self._runs.runs.choices, **self._runs.choices}
        return ShardPlan(self._peers.rank, self._peers.size, self._link, self.division.bounds, choices)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result for this rank's nodes."""
        with norms.exact(self.module, self._peers):
            out = self._view[0](*args, **kwargs)
        if isinstance(out, Tensor) and out.dim() and out.shape[0] != self._peers.num_rows:
            raise InputError(
                f"model: it returned {out.shape[0]} rows for {self._peers.num_rows} nodes; pooling over the "
                "nodes of all ranks is not exact: return rows and pool them with sharded.mean"
            )
        return out

    def mean(self, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """This rank's share of the mean of `values` over all ranks: their sum here by how many there are.

        The shares of all ranks add up to the mean; `backward()` of one's own share gives the gradients of the
        mean, because gradients are summed over ranks. `mask` picks rows.
        """
        chosen = values if mask is None else values[mask]
        count = self.total(torch.tensor(float(chosen.numel()), dtype=torch.float64, device=chosen.device))
        return chosen.sum() / count.clamp(min=1).to(chosen.dtype)

    def loss(
        self, function: Callable[..., Tensor], out: Tensor, target: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """This rank's share of a mean loss over all ranks: a function with `reduction`, or a module of torch.

        Every entry counts once: where classes are weighted or labels ignored, add up and divide on your own.
        """
        entries = _entries(function)
        rows = rows_ahead(out) if _is_by_rows(function, out, target, mask) else None
        if rows is not None:
            return self._loss_ahead(entries, rows, target, mask)
        picked = (out, target) if mask is None else (out[mask], target[mask])
        return self.mean(entries(*picked))

    def _loss_ahead(
        self, entries: Callable[..., Tensor], rows: Ahead, target: Tensor, mask: Tensor | None
    ) -> Tensor:
        """The same, first of the rows that wait for no halo: with their gradient it hides an exchange."""
        ends = (slice(0, rows.rows.count), slice(rows.rows.count, None))

        def values(out: Tensor, end: slice) -> Tensor:
            wanted, part = target[end], None if mask is None else mask[end]
            return entries(out, wanted) if part is None else entries(out[part], wanted[part])

        first = values(rows.held, ends[0])
        chosen = len(target) if mask is None else int(mask.sum())
        count = torch.tensor(float(chosen * first.shape[1:].numel()), dtype=torch.float64)
        summed = self._peers.adding(count)
        total = first.sum() + values(rows.others(), ends[1]).sum()
        return total / summed().clamp(min=1).to(total.dtype)

    @torch.no_grad()
    def total(self, value: Tensor) -> Tensor:
        """The sum of a number or tensor over all ranks, on every rank: a loss to print, counts, accuracy."""
        return self._peers.add(value.detach().clone())

    def sum_gradients(self) -> None:
        """Replaces the parameters' gradients by their sums over ranks; for sync_gradients=False."""
        self._gradients.add_up()

    def gather(self, rows: Tensor) -> Tensor:
        """Rows of all nodes in the caller's order, on every rank: predictions, embeddings."""
        out = rows.new_zeros((self.num_nodes, *rows.shape[1:]))  # a rank may have no rows
        begin = self._peers.begin
        out[torch.from_numpy(self.division.nodes[begin : begin + self._peers.num_rows])] = rows.detach()
        return self._peers.add(out)

    def close(self) -> None:
        """Destroys the process group if `shard` made it."""
        if self._ends_group and dist.is_initialized():
            dist.destroy_process_group()
        self._ends_group = False

    def _equalise(self) -> None:
        """Copies rank 0's parameters and buffers to every rank."""
        if self._peers.size > 1:
            with naming(self._peers.rank, "broadcast"), torch.no_grad():
                for tensor in self.module.state_dict().values():
                    if isinstance(tensor, Tensor):
                        dist.broadcast(tensor, 0, group=self._peers.group)


def _entries(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The loss of every entry, which ranks add up and divide by the entries of all ranks."""
    named = getattr(function, "keywords", {})  # of functools.partial
    weight, ignored = (named.get(name, getattr(function, name, None)) for name in ("weight", "ignore_index"))
    if weight is not None or ignored not in (None, -100):
        raise InputError(
            "function: it weighs classes or ignores a label, so that its mean is not one over all entries; "
            f"{_OWN_MEAN}"
        )
    if isinstance(function, nn.Module):
        if not hasattr(function, "reduction"):
            raise InputError(f"function: {type(function).__name__} has no reduction; {_OWN_MEAN}")
        entries: Any = copy.copy(function)
        entries.reduction = "none"
        return entries  # type: ignore[no-any-return]
    try:
        taken = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of code that is not Python's
        taken = []
    if taken and all(p.name != "reduction" and p.kind is not p.VAR_KEYWORD for p in taken):
        raise InputError(f"function: it takes no reduction=; {_OWN_MEAN}")
    return functools.partial(function, reduction="none")


def _is_by_rows(function: Any, out: Tensor, target: Tensor, mask: Tensor | None) -> bool:
    """Whether every row of a loss without reduction is of the same row of its arguments alone."""
    function = _AS_FUNCTIONS.get(type(function), function)
    has_classes = function in _OF_CLASSES and target.shape == out.shape[:1]
    has_all = mask is None or (mask.dtype == torch.bool and mask.shape == out.shape[:1])
    return has_all and (has_classes or (function in _OF_NUMBERS and target.shape == out.shape))


class _Gradients:
    """Sums the gradients of one backward pass over ranks, all parameters in one all-reduce at its end."""

    def __init__(self, parameters: Iterable[nn.Parameter], peers: Peers) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._peers = peers
        self._fresh: dict[int, tuple[Tensor, Tensor | None]] = {}  # this pass's gradient, and what was there

    def attach(self) -> None:
        for number, parameter in enumerate(self._parameters):
            hook = functools.partial(self._arrived, number)
            parameter.register_hook(hook)  # type: ignore[no-untyped-call]  # torch's own lack

    def _arrived(self, number: int, grad: Tensor) -> None:
        if not self._fresh:
            engine: Any = torch.autograd.Variable._execution_engine  # as torch's own DDP does
            engine.queue_callback(self._end)
        before = self._parameters[number].grad
        self._fresh[number] = (grad, None if before is None else before.clone())

    def _end(self) -> None:
        """At the end of the pass, replaces what it added by the sum over ranks, bitwise equal on all."""
        fresh, self._fresh = self._fresh, {}
        numbers = sorted(fresh)
        flat = self._peers.add(torch.cat([fresh[number][0].reshape(-1) for number in numbers]))
        sums = torch.split(flat, [fresh[number][0].numel() for number in numbers])
        for number, total in zip(numbers, sums, strict=True):
            parameter, before = self._parameters[number], fresh[number][1]
            total = total.view_as(parameter)
            if parameter.grad is not None:  # None: called by torch.autograd.grad, which gets this rank's own
                parameter.grad.copy_(total if before is None else before + total)

    def add_up(self) -> None:
        """The present gradients, summed."""
        held = [p.grad for p in self._parameters if p.grad is not None]
        if held and self._peers.size > 1:
            flat = self._peers.add(torch.cat([grad.reshape(-1) for grad in held]))
            for grad, total in zip(held, torch.split(flat, [g.numel() for g in held]), strict=True):
                grad.copy_(total.view_as(grad))
