"""Neighbours of nodes whose edges other ranks hold: each hop is an exchange, and the owner samples.

A question is the key of a hop, its fanout and some nodes; the answer is how many edges each node is given,
and their sources and numbers. Questions of several batches travel in one round.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plait.distributed.rounds import Counters, Pending, Rounds
from plait.errors import ExchangeError
from plait.loader.owned import Drawn, Frontier, OwnedEdges

__all__ = ["FrontierCounters", "FrontierExchange", "Question"]

Array = NDArray[Any]

# Nodes that one rank requests in one round, and edges in the answer where the fanout bounds them.
_MOST_NODES, _MOST_EDGES = 1 << 20, 1 << 23
_HEAD = 4  # key, fanout, whether with replacement, number of nodes


@dataclass
class FrontierCounters(Counters):
    """Counts what this rank requested and answered."""

    nodes_in: int = 0
    nodes_out: int = 0
    edges_in: int = 0
    edges_out: int = 0


class Question(Pending):
    """Nodes of other ranks in one frontier, `at` their places there; `drawn` is the answer, by owner."""

    what = "nodes"

    def __init__(self, frontier: Frontier, at: Array, bounds: Array) -> None:
        super().__init__(int(at.size))
        owner = np.searchsorted(bounds, frontier.nodes[at], side="right") - 1
        order = np.argsort(owner, kind="stable")
        self.at, self.nodes = at[order], frontier.nodes[at[order]]
        self.cuts = np.searchsorted(owner[order], np.arange(bounds.size))
        self.head = np.array([np.uint64(frontier.key).astype(np.int64), frontier.fanout, frontier.replace, 0])
        self.drawn: list[Drawn] = []

    def words(self, rank: int) -> list[Array]:
        """The request to one rank, as it is sent."""
        nodes = self.nodes[self.cuts[rank] : self.cuts[rank + 1]]
        if nodes.size == 0:
            return []
        head = self.head.copy()
        head[3] = nodes.size
        return [head, nodes]


class FrontierExchange(Rounds[Question]):
    """The in-edges of all nodes: those of this rank's from `edges`, the others drawn by their owners."""

    what = "neighbours"
    counters: FrontierCounters

    def __init__(
        self, edges: OwnedEdges, bounds: Array, rank: int = 0, *, timeout_seconds: float = 300.0
    ) -> None:
        super().__init__(bounds, rank, _MOST_NODES, timeout_seconds)
        self.edges, self.num_nodes = edges, int(bounds[-1])
        self.node_type, self.edge_type = edges.node_type, edges.edge_type
        self._kind = np.result_type(self.node_type, self.edge_type)
        self.counters = FrontierCounters()
        self._start()

    def ask(self, frontiers: Sequence[Frontier]) -> list[list[Drawn]]:
        """The edges of every frontier: own ones are drawn while the others are on their way."""
        is_far = [(f.nodes < self.edges.begin) | (f.nodes >= self.edges.end) for f in frontiers]
        questions = [
            self._questions(f, np.flatnonzero(far)) for f, far in zip(frontiers, is_far, strict=True)
        ]
        every = [question for some in questions for question in some]
        if every:
            self._enter(every)
        found = []
        for frontier, far in zip(frontiers, is_far, strict=True):
            near = np.flatnonzero(~far)
            own = Frontier(frontier.nodes[near], frontier.key, frontier.fanout, frontier.replace)
            found.append([Drawn(near, *self.edges.choose(own))])
        self._arrived(every)
        for pieces, asked in zip(found, questions, strict=True):
            pieces.extend(drawn for question in asked for drawn in question.drawn)
        return found

    def _questions(self, frontier: Frontier, far: Array) -> list[Question]:
        """The remote nodes of a frontier, in pieces whose answers the fanout bounds."""
        most = (
            _MOST_NODES if frontier.fanout <= 0 else min(_MOST_NODES, max(1, _MOST_EDGES // frontier.fanout))
        )
        return [Question(frontier, far[k : k + most], self.bounds) for k in range(0, far.size, most)]

    def _longest(self) -> int:
        return 2 * _HEAD * _MOST_NODES  # a question has at least one node

    def _message(self, requests: Sequence[Question]) -> tuple[Tensor, Array, Any]:
        by_rank = [[word for q in requests for word in q.words(rank)] for rank in range(self.size)]
        wanted = np.array([sum(word.size for word in words) for words in by_rank], np.int64)
        flat = [word for words in by_rank for word in words]
        message = np.concatenate(flat) if flat else np.empty(0, np.int64)
        return torch.from_numpy(message), wanted, None

    def _answer(
        self, requests: Sequence[Question], asked: Tensor, wanted: Array, counts: Array, memory: Any
    ) -> None:
        """Counts of edges first, which say how many sources and numbers of edges follow."""
        answers = [self._drawn(words.numpy()) for words in torch.split(asked, counts.tolist())]
        nodes_out = np.array([len(drawn[0]) for drawn in answers], np.int64)
        nodes_in = np.sum([np.diff(q.cuts) for q in requests] or [np.zeros(self.size, np.int64)], axis=0)
        sent = torch.from_numpy(np.concatenate([drawn[0] for drawn in answers]))
        degrees = self._all_to_all(sent, nodes_out, nodes_in).numpy()
        edges_out = np.array([drawn[1].size for drawn in answers], np.int64)
        starts = np.concatenate(([0], np.cumsum(nodes_in)))
        if degrees.size and degrees.min() < 0:
            raise ExchangeError("a rank answered with a negative number of edges; all must run one version")
        edges_in = np.array([degrees[a:b].sum() for a, b in itertools.pairwise(starts)], np.int64)
        ends = [np.concatenate((source, edge), dtype=self._kind) for _, source, edge in answers]
        came = self._all_to_all(torch.from_numpy(np.concatenate(ends)), 2 * edges_out, 2 * edges_in).numpy()
        self._share_out(requests, degrees, starts, came, edges_in)
        counters = self.counters
        counters.nodes_in, counters.nodes_out = (
            counters.nodes_in + degrees.size,
            counters.nodes_out + sent.numel(),
        )
        counters.edges_in += int(edges_in.sum())
        counters.edges_out += int(edges_out.sum())

    def _drawn(self, words: Array) -> tuple[Array, Array, Array]:
        """The answer to one rank's questions: counts, sources and numbers of edges, question by question."""
        found: list[tuple[Array, Array, Array]] = [
            (np.empty(0, np.int32), np.empty(0, self.node_type), np.empty(0, self.edge_type))
        ]
        at = 0
        while at < words.size:
            if (
                words.size - at < _HEAD
                or not 0 < words[at + 3] <= words.size - at - _HEAD
                or words[at + 1] < -1
            ):
                raise ExchangeError("a rank asks for neighbours in another format; all must run one version")
            key, fanout, replace, count = words[at : at + _HEAD]
            nodes = words[at + _HEAD : at + _HEAD + count]
            found.append(self.edges.choose(Frontier(nodes, int(key) % 2**64, int(fanout), bool(replace))))
            at += _HEAD + int(count)
        counts, source, edge = (np.concatenate(column) for column in zip(*found, strict=True))
        return counts.astype(np.int32), source, edge

    def _share_out(
        self, requests: Sequence[Question], degrees: Array, starts: Array, came: Array, edges_in: Array
    ) -> None:
        """Every question's part of the answers, which stand in the order of the questions, rank by rank."""
        at = 0
        for rank in range(self.size):
            count = int(edges_in[rank])
            source, edge = came[at : at + count], came[at + count : at + 2 * count]
            if count and not 0 <= int(source.min()) <= int(source.max()) < self.num_nodes:
                raise ExchangeError(
                    f"rank {rank} answered with nodes that are none; all must read the same parts"
                )
            at += 2 * count
            node, first = int(starts[rank]), 0
            for question in requests:
                begin, end = question.cuts[rank], question.cuts[rank + 1]
                if begin == end:
                    continue
                own = degrees[node : node + end - begin]
                last = first + int(own.sum())
                question.drawn.append(
                    Drawn(question.at[begin:end], own, source[first:last], edge[first:last])
                )
                node, first = node + int(end - begin), last
        for question in requests:
            question.finish()
