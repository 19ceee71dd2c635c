"""A bound step carried out once more as loops over rows and edges, on arrays that count what is done.

The loops follow the order of the passes in `kernels/`, are handed the tensors and edges the kernel is handed,
and give a result that can be compared with the kernel's: what is counted is what was computed.

An exponential is one operation, a comparison too; choosing (`where`), copying and gathering are none. What a
kernel does besides, and what no result depends on, is left out: rescaling a row's sums once for every further
block of 64 edges of it, a running maximum in the backward pass, a factor of 1 where there is no dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from plait.ops.program import Step
from plait.runtime.bind import Binding
from plait.runtime.chain import turned
from plait.runtime.constants import SparseValue

__all__ = ["Tally", "carry_out"]

Array = np.ndarray[Any, Any]


class Tally:
    """How many operations were done on its arrays."""

    def __init__(self) -> None:
        self.flops = 0

    def array(self, value: Any) -> Array:
        """The same numbers, counted."""
        plain = value if isinstance(value, np.ndarray) else value.detach().numpy()
        made = np.asarray(plain).view(_Counting)
        made.tally = self
        return made


class _Counting(np.ndarray):  # type: ignore[type-arg]
    """An array whose arithmetic is counted, number by number; a sum or maximum of k numbers is k of them."""

    tally: Tally

    def __array_finalize__(self, other: Any) -> None:
        if other is not None:
            self.tally = getattr(other, "tally", None)  # type: ignore[assignment]

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        plain = [x.view(np.ndarray) if isinstance(x, _Counting) else x for x in inputs]
        options = {k: (v[0].view(np.ndarray),) if k == "out" else v for k, v in options.items()}
        made = getattr(ufunc, method)(*plain, **options)
        self.tally.flops += int(np.size(plain[0]) if method == "reduce" else np.size(made))
        return self.tally.array(np.asarray(made))


def carry_out(part: Step, binding: Binding, env: dict[str, Any], tally: Tally) -> dict[str, Array]:
    """The values a step makes, by name; `env` has its operands."""
    return _LOOPS[part.op](part, _Operands(binding, env, tally))


class _Operands:
    """The operands of a step as counted arrays, and the constants it was bound to."""

    def __init__(self, binding: Binding, env: dict[str, Any], tally: Tally) -> None:
        self.binding, self.env, self.tally = binding, env, tally

    def __call__(self, name: str) -> Array:
        if name not in self.env and turned(name) in self.env:
            return self.tally.array(self.env[turned(name)]).T
        value = self.tally.array(self.env[name])
        return value if value.ndim == 2 else value.reshape(1, -1)

    def by_head(self, name: str, heads: int, is_shared: Any = False) -> Array:
        rows = self(name)
        shape = (len(rows), 1, -1) if is_shared else (len(rows), heads, -1)
        return rows[:, : rows.shape[1] // heads * heads].reshape(shape)

    def sparse(self, name: str) -> SparseValue | None:
        value = self.env.get(name)
        return value if isinstance(value, SparseValue) else None

    def scale(self, step: Step, role: str) -> Array | None:
        """A diagonal, or a number of the call, as a column."""
        name = step.get(role)
        if name is None:
            return None
        known = name in self.binding.program.constants
        return self.tally.array(self.binding.constant(name) if known else self.env[name]).reshape(-1, 1)

    def zeros(self, *shape: int) -> Array:
        return self.tally.array(np.zeros(shape, np.float32))


# Products ---------------------------------------------------------------------------------------------------


def _sums(pattern: Any, weight: Any, source: Array | None, x: Array, o: _Operands) -> Array:
    """Row by row: the neighbours' rows, multiplied where they have a weight, added up."""
    out = o.zeros(pattern.num_rows, x.shape[1])
    weights = None if weight is None else o.tally.array(weight)
    for i in range(pattern.num_rows):
        edges = slice(pattern.indptr[i], pattern.indptr[i + 1])
        near = pattern.indices[edges]
        rows = x[near]
        if weights is not None:
            rows = weights[edges].reshape(-1, 1) * rows
        elif source is not None:
            rows = source[near] * rows
        out[i] = np.add.reduce(rows, axis=0)
    return out


def _spmm(step: Step, o: _Operands) -> dict[str, Array]:
    pattern, weight = o.binding.matrix(step).operands(step.is_transposed)
    out = _sums(pattern, weight, o.scale(step, "source"), o(step["x"]), o)
    target = o.scale(step, "target")
    return {step.out: _joined(step, out if target is None else target * out, o)}


def _joined(step: Step, out: Array, o: _Operands) -> Array:
    """What is added to a product after it."""
    if step.get("addend") is not None:
        scale = o.scale(step, "addend_scale")
        out = out + (o(step["addend"]) if scale is None else scale * o(step["addend"]))
    return out if step.get("bias") is None else out + o(step["bias"])


def _product(left: Array, right: Array, o: _Operands) -> Array:
    """One rank-one term after the other, added to what is there."""
    out = o.zeros(len(left), right.shape[1])
    for k in range(left.shape[1]):
        out = out + left[:, k : k + 1] * right[k : k + 1]
    return out


def _gemm(step: Step, o: _Operands) -> dict[str, Array]:
    w, sparse = o(step["w"]), o.sparse(step["x"])
    w = w.T if step.is_transposed else w
    out = _product(o(step["x"]), w, o) if sparse is None else _sums(*sparse.operands(False), None, w, o)
    return {step.out: _joined(step, out, o)}


def _gemm_transposed(step: Step, o: _Operands) -> dict[str, Array]:
    right, sparse = o(step["right"]), o.sparse(step["left"])
    if sparse is not None:
        return {step.out: _sums(*sparse.operands(True), None, right, o)}
    left = o(step["left"])
    out = o.zeros(left.shape[1], right.shape[1])
    for i in range(len(left)):
        out = out + left[i : i + 1].T * right[i : i + 1]
    return {step.out: out}


# Row by row -------------------------------------------------------------------------------------------------


def _scale_rows(step: Step, o: _Operands) -> dict[str, Array]:
    scale = o.scale(step, "scale")
    assert scale is not None
    return {step.out: scale * o(step["x"])}


def _combine(step: Step, o: _Operands) -> dict[str, Array]:
    terms = [o(name) for role, name in step.reads if role != "bias"]
    parts = [x if f == 1.0 else np.float32(f) * x for f, x in zip(step.factors, terms, strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return {step.out: total if step.get("bias") is None else total + o(step["bias"])}


def _relu(step: Step, o: _Operands) -> dict[str, Array]:
    return {step.out: np.maximum(o(step["x"]), np.float32(0))}


def _relu_backward(step: Step, o: _Operands) -> dict[str, Array]:
    is_up = o(step["made"]) > 0
    return {step.out: o.tally.array(np.where(is_up, o(step["x"]), np.float32(0)))}


def _colsum(step: Step, o: _Operands) -> dict[str, Array]:
    return {step.out: np.add.reduce(o(step["x"]), axis=0).reshape(1, -1)}


def _columns(step: Step, o: _Operands) -> dict[str, Array]:
    start = step.option("start")
    return {step.out: o(step["x"])[:, start : start + step.option("width")]}


def _join(step: Step, o: _Operands) -> dict[str, Array]:
    return {step.out: o.tally.array(np.concatenate([o(name) for _, name in step.reads], axis=1))}


# Attention (kind "gat"; forward also "dot") ----------------------------------------------------------------


def _leaky(total: Array, slope: float, o: _Operands) -> Array:
    return o.tally.array(np.where(total > 0, total, np.float32(slope) * total))


def _bent(to_score: Array, total: Array, slope: float, o: _Operands) -> Array:
    return to_score * o.tally.array(np.where(total > 0, np.float32(1), np.float32(slope)))


class _Edges:
    """What the passes of one attention layer read, its numbers by head."""

    def __init__(self, step: Step, o: _Operands) -> None:
        assert step.option("kind") == "gat"
        self.heads, self.slope, self.o = step.option("heads"), step.option("slope"), o
        self.near, self.far = o(step["near"])[:, : self.heads], o(step["far"])[:, : self.heads]
        self.value = o.by_head(step["value"], self.heads, step.option("is_shared"))
        orders = o.binding.orders
        self.pattern = orders.transpose if step.is_transposed else orders.pattern
        self.order = orders.order
        if step.get("statistics") is not None:
            kept = o.tally.array(o.env[step["statistics"]].reshape(len(self.near), 4, -1))[:, :, : self.heads]
            self.most, self.inverse, self.dots = kept[:, 1], kept[:, 2], kept[:, 3]
            self.grad = o.by_head(step["grad"], self.heads)

    def weights(self, total: Array, most: Array, inverse: Array) -> Array:
        return np.exp(_leaky(total, self.slope, self.o) - most) * inverse

    def rows(self) -> list[tuple[int, slice, Array]]:
        """Each row with its edges and what lies at their other end."""
        pointer, indices = self.pattern.indptr, self.pattern.indices
        cuts = [slice(int(pointer[i]), int(pointer[i + 1])) for i in range(self.pattern.num_rows)]
        return [(i, cut, indices[cut]) for i, cut in enumerate(cuts)]


def _attend_dot(step: Step, o: _Operands) -> dict[str, Array]:
    assert step.option("heads") == 1
    near, far, value = (o(step[role]) for role in ("near", "far", "value"))
    out = o.zeros(len(near), value.shape[1])
    for i, _, sources in _by_row(o):
        if len(sources):
            scores = np.add.reduce(near[i] * far[sources], axis=1).reshape(-1, 1)
            powers = np.exp(scores - np.maximum.reduce(scores, axis=0))
            inverse = np.float32(1) / np.add.reduce(powers, axis=0)
            out[i] = np.add.reduce(powers * value[sources], axis=0) * inverse
    return {step.out: _joined(step, out, o)}


def _attend(step: Step, o: _Operands) -> dict[str, Array]:
    if step.option("kind") == "dot":
        return _attend_dot(step, o)
    e = _Edges(step, o)
    out = o.zeros(e.pattern.num_rows, e.heads, e.value.shape[2])
    for i, _, sources in e.rows():
        if len(sources):
            scores = _leaky(e.far[sources] + e.near[i], e.slope, o)
            powers = np.exp(scores - np.maximum.reduce(scores, axis=0))
            inverse = np.float32(1) / np.add.reduce(powers, axis=0)
            summed = np.add.reduce(powers[:, :, None] * e.value[sources], axis=0)
            out[i] = summed * inverse[:, None]
    return {step.out: _joined(step, out.reshape(len(out), -1), o)}


def _attend_dots(step: Step, o: _Operands) -> dict[str, Array]:
    out, heads = o(step["out"]), step.option("heads")
    if step.get("addend") is not None:
        out = out - o(step["addend"])
    if step.get("bias") is not None:
        out = out - o(step["bias"])
    made = np.add.reduce((o(step["grad"]) * out).reshape(len(out), heads, -1), axis=2)
    return {f"{step.out}|dots": made}


def _attend_again(step: Step, o: _Operands) -> dict[str, Array]:
    e, kept = _Edges(step, o), step.option("kept")
    out = o.zeros(e.pattern.num_rows, e.heads)
    held = o.zeros(e.pattern.num_edges, 2, e.heads)
    for i, cut, sources in e.rows():
        total = e.far[sources] + e.near[i]
        a = e.weights(total, e.most[i], e.inverse[i])
        to_weight = np.add.reduce(e.grad[i] * e.value[sources], axis=2)
        if kept is None:
            to_score = a * (to_weight - e.dots[i])
        else:  # all edges of the row are here: the sum term is found from them
            parts = a * to_weight
            to_score = parts - a * np.add.reduce(parts, axis=0)
        bent = _bent(to_score, total, e.slope, o)
        out[i] = np.add.reduce(bent, axis=0)
        held[cut, 0], held[cut, 1] = a, bent
    return {step.out: out, **({} if kept is None else {f"{kept}|{e.heads}": held})}


def _attend_sources(step: Step, o: _Operands) -> dict[str, Array]:
    e, to_far, kept = _Edges(step, o), step.option("to_far"), step.get("kept")
    out, far = o.zeros(*e.value.shape), o.zeros(len(e.value), e.heads)
    for j, cut, targets in e.rows():
        if kept is not None:
            lanes = o.tally.array(o.env[kept].reshape(e.pattern.num_edges, 2, -1))[:, :, : e.heads]
            a, bent = lanes[e.order[cut], 0], lanes[e.order[cut], 1]
        else:
            total = e.near[targets] + e.far[j]
            a = e.weights(total, e.most[targets], e.inverse[targets])
            to_weight = np.add.reduce(e.grad[targets] * e.value[j], axis=2)
            bent = _bent(a * (to_weight - e.dots[targets]), total, e.slope, o)
        given = a[:, :, None] * e.grad[targets]
        out[j] = np.add.reduce(given, axis=0 if e.value.shape[1] == e.heads else (0, 1))
        if to_far is not None:
            far[j] = np.add.reduce(bent, axis=0)
    return {step.out: out.reshape(len(out), -1), **({} if to_far is None else {to_far: far})}


def _attend_targets(step: Step, o: _Operands) -> dict[str, Array]:
    e = _Edges(step, o)
    slopes, place = o(step["slopes"])[:, : e.heads], o.binding.orders.inverse
    out = o.zeros(e.pattern.num_rows, e.heads)
    for i, cut, _ in e.rows():
        out[i] = np.add.reduce(slopes[place[cut]], axis=0)
    return {step.out: out}


# Single passes over edges -----------------------------------------------------------------------------------


def _by_row(o: _Operands) -> list[tuple[int, slice, Array]]:
    pattern = o.binding.orders.pattern
    cuts = [slice(int(a), int(b)) for a, b in zip(pattern.indptr[:-1], pattern.indptr[1:], strict=True)]
    return [(i, cut, pattern.indices[cut]) for i, cut in enumerate(cuts)]


def _edge_dots(step: Step, o: _Operands) -> dict[str, Array]:
    near, far = o(step["near"]), o(step["far"])
    out = o.zeros(o.binding.orders.pattern.num_edges, 1)
    for i, cut, sources in _by_row(o):
        out[cut, 0] = np.add.reduce(near[i] * far[sources], axis=1)
    return {step.out: out}


def _edge_sums(step: Step, o: _Operands) -> dict[str, Array]:
    weight, far = o(step["weight"])[:, :1], o(step["far"])
    out = o.zeros(o.binding.orders.pattern.num_rows, far.shape[1])
    for i, cut, sources in _by_row(o):
        out[i] = np.add.reduce(weight[cut] * far[sources], axis=0)
    return {step.out: out}


def _gate(step: Step, o: _Operands) -> dict[str, Array]:
    near, far = o(step["near"]), o(step["far"])
    out = o.zeros(*near.shape)
    for i, _, sources in _by_row(o):
        total = near[i] + far[sources]
        if step.option("act", "sigmoid") == "relu":
            messages = np.maximum(total, np.float32(0))
        else:
            messages = np.float32(1) / (np.float32(1) + np.exp(-total)) * o(step["value"])[sources]
        out[i] = np.add.reduce(messages, axis=0)
    return {step.out: _joined(step, out, o)}


def _extremum(step: Step, o: _Operands) -> dict[str, Array]:
    assert step.reduce == "max"
    pattern, _ = o.binding.matrix(step).operands(step.is_transposed)
    x = o(step["x"])
    out = o.zeros(pattern.num_rows, x.shape[1])
    for i in range(pattern.num_rows):
        near = pattern.indices[pattern.indptr[i] : pattern.indptr[i + 1]]
        if len(near):
            out[i] = np.maximum.reduce(x[near], axis=0)
    return {step.out: out}


_LOOPS: dict[str, Callable[[Step, _Operands], dict[str, Array]]] = {
    "spmm": _spmm,
    "gemm": _gemm,
    "gemm_transposed": _gemm_transposed,
    "scale_rows": _scale_rows,
    "combine": _combine,
    "relu": _relu,
    "relu_backward": _relu_backward,
    "colsum": _colsum,
    "columns": _columns,
    "join": _join,
    "edge_dots": _edge_dots,
    "edge_sums": _edge_sums,
    "gate": _gate,
    "extremum": _extremum,
    "attend": _attend,
    "attend_dots": _attend_dots,
    "attend_again": _attend_again,
    "attend_sources": _attend_sources,
    "attend_targets": _attend_targets,
}
