"""An expression with one matrix as a list of operations, and one node of torch's graph for all of them.

Every autograd node written in Python costs about 20 us per step, as much as a sum over a small graph. Here an
expression is recorded once for its widths and for what needs a gradient: the operations in order, those that
compute the gradients in reverse order, and what is saved between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from plait.errors import PlanError
from plait.ir import Add, Dense, Expr, Map, MatMul, Scalar, Scale, formula, sort
from plait.kernels import gemm as dense
from plait.runtime.identity import counts_writes
from plait.runtime.twice import differentiable

__all__ = ["Given", "Sums", "Tape", "apply", "is_large"]

# the overload itself: finding it at every call takes longer than the operation on a small graph
_relu_backward: Callable[[Tensor, Tensor, int], Tensor] = torch.ops.aten.threshold_backward.default

# Multiply-adds from which plait's kernels take less time than MKL's, the call from Python included: about as
# long here, half of it at four times this (one thread of an AMD processor, 64 to 1,536 rows).
_FEWEST = 1 << 18


class Sums(Protocol):
    """A matrix whose products with rows are numbers, not recorded by torch."""

    def times(self, x: Tensor, identity: float, bias: Tensor | None) -> Tensor:
        """(matrix + identity) @ x + bias."""
        ...

    def turned_times(self, x: Tensor, identity: float) -> Tensor:
        """(matrix + identity).T @ x."""
        ...


@dataclass(frozen=True, slots=True)
class Given:
    """An input as far as a tape depends on it."""

    name: str
    width: int
    wants: bool
    is_turned: bool = False  # a weight that comes [out, in], as it is stored


Again = Callable[[Sequence[Tensor], Any], Tensor]
"""(inputs, matrix) -> the same value in operations that torch differentiates any number of times."""
Registers = list[Any]
Forward = tuple[int, Callable[[Registers, Any], Tensor]]
"""(the register, what computes it)."""
Backward = Callable[[Registers, Registers, Any], None]


class Tape:
    """The operations of an expression over registers: its inputs, then what is computed, its value last.

    PlanError where the expression cannot be written this way.
    """

    def __init__(self, expr: Expr, inputs: Sequence[Given], again: Again):
        self.inputs, self.again = tuple(inputs), again
        self._of = {given.name: k for k, given in enumerate(inputs)}
        self.wants = [given.wants for given in inputs]
        self._widths = [given.width for given in inputs]
        self.forward: list[Forward] = []
        self._adjoints: list[tuple[Backward, tuple[int, ...]]] = []
        if self._emit(expr) != len(self.wants) - 1 or not self.forward:
            raise PlanError(f"{formula(expr)}: nothing is computed in it")
        self.backward = [run for run, _ in reversed(self._adjoints)]
        read = {k for _, reads in self._adjoints for k in reads}
        self.saved = tuple(sorted(read))
        self.others = tuple(k for k in range(len(inputs)) if k not in read)
        self.blank = [None] * (len(self.wants) - len(inputs))
        self.is_differentiable = self.wants[-1]

    def value(self, values: Sequence[Tensor], matrix: Sums) -> Tensor:
        """The expression's value, of numbers alone."""
        registers: Registers = [*values, *self.blank]
        for place, run in self.forward:
            registers[place] = run(registers, matrix)
        result: Tensor = registers[-1]
        return result

    # Operations ---------------------------------------------------------------------------------------

    def _new(self, width: int, wants: bool, run: Callable[[Registers, Any], Tensor]) -> int:
        """A register for what `run` computes."""
        place = len(self.wants)
        self.wants.append(wants)
        self._widths.append(width)
        self.forward.append((place, run))
        return place

    def _adjoint(self, out: int, run: Backward, reads: Sequence[int]) -> int:
        if self.wants[out]:
            self._adjoints.append((run, tuple(reads)))
        return out

    def _sum(self, x: int, identity: float = 0.0, bias: int | None = None) -> int:
        """(matrix + identity) @ x + bias."""
        to_x, to_bias = self.wants[x], bias is not None and self.wants[bias]

        def run(r: Registers, matrix: Any) -> Tensor:
            made: Tensor = matrix.times(r[x], identity, None if bias is None else r[bias])
            return made

        out = self._new(self._widths[x], to_x or to_bias, run)

        def back(r: Registers, g: Registers, matrix: Any) -> None:
            grad = g[out]
            if to_x:
                _give(g, x, matrix.turned_times(grad, identity))
            if to_bias:
                _give(g, bias, dense.column_sums(grad))

        return self._adjoint(out, back, ())

    def _product(self, x: int, w: int, bias: int | None = None, addend: int | None = None) -> int:
        """x @ w + bias + addend."""
        is_turned = self.inputs[w].is_turned if w < len(self.inputs) else False
        width = self._widths[w]
        to_x, to_w = self.wants[x], self.wants[w]
        to_bias = bias is not None and self.wants[bias]
        to_addend = addend is not None and self.wants[addend]

        def run(r: Registers, matrix: Any) -> Tensor:
            weight = r[w] if is_turned else r[w].t()
            return _linear(
                r[x], weight, None if bias is None else r[bias], None if addend is None else r[addend]
            )

        out = self._new(width, to_x or to_w or to_bias or to_addend, run)

        def back(r: Registers, g: Registers, matrix: Any) -> None:
            grad = g[out]
            if to_x:
                g[x] = _times(grad, r[w] if is_turned else r[w].t(), g[x])
            if to_w:
                made = _weight_gradient(grad, r[x])
                _give(g, w, made if is_turned else made.t())
            if to_bias:
                _give(g, bias, dense.column_sums(grad))
            if to_addend:
                _give(g, addend, grad)

        return self._adjoint(out, back, [*([w] if to_x else []), *([x] if to_w else [])])

    def _scaled(self, factor: Scalar, x: int) -> int:
        """A number times x."""
        constant, place = factor.value, None if factor.value is not None else self._input(factor.name)
        to_x, to_number = self.wants[x], place is not None and self.wants[place]

        def run(r: Registers, matrix: Any) -> Tensor:
            made: Tensor = r[x] * (constant if place is None else r[place].reshape(()))
            return made

        out = self._new(self._widths[x], to_x or to_number, run)

        def back(r: Registers, g: Registers, matrix: Any) -> None:
            grad = g[out]
            if to_x:
                _give(g, x, grad * (constant if place is None else r[place].reshape(())))
            if place is not None and to_number:
                _give(g, place, (grad * r[x]).sum().reshape(r[place].shape))

        reads = [] if place is None else [place, *([x] if to_number else [])]
        return self._adjoint(out, back, reads)

    def _added(self, a: int, b: int) -> int:
        def run(r: Registers, matrix: Any) -> Tensor:
            made: Tensor = r[a] + r[b]
            return made

        out = self._new(self._widths[a], self.wants[a] or self.wants[b], run)

        def back(r: Registers, g: Registers, matrix: Any) -> None:
            for place in (a, b):
                if self.wants[place]:
                    _give(g, place, g[out])

        return self._adjoint(out, back, ())

    def _biased(self, x: int, bias: int) -> int:
        """A row added to every row of x."""

        def run(r: Registers, matrix: Any) -> Tensor:
            made: Tensor = r[x] + r[bias]
            return made

        out = self._new(self._widths[x], self.wants[x] or self.wants[bias], run)

        def back(r: Registers, g: Registers, matrix: Any) -> None:
            if self.wants[x]:
                _give(g, x, g[out])
            if self.wants[bias]:
                _give(g, bias, dense.column_sums(g[out]))

        return self._adjoint(out, back, ())

    def _relu(self, x: int) -> int:
        out = self._new(self._widths[x], self.wants[x], lambda r, matrix: torch.relu(r[x]))

        def back(r: Registers, g: Registers, matrix: Any) -> None:
            _give(g, x, _relu_backward(g[out], r[out], 0))

        return self._adjoint(out, back, (out,))

    # Expressions --------------------------------------------------------------------------------------

    def _input(self, name: str) -> int:
        found = self._of.get(name)
        if found is None:
            raise PlanError(f"{name}: is no input")
        return found

    def _emit(self, expr: Expr) -> int:
        """The register of an expression's value."""
        match expr:
            case Dense(name) if expr.rows != 1:
                return self._input(name)
            case Add(terms):
                return self._total(terms)
            case MatMul(left, _) if sort(left) == "dense":
                return self._total((expr,))
            case MatMul(_, right):
                return self._sum(self._emit(right))
            case Scale(factor, body):
                return self._scaled(factor, self._emit(body))
            case Map("relu", body):
                return self._relu(self._emit(body))
        raise PlanError(f"{formula(expr)}: is not written as a tape")

    def _total(self, terms: Sequence[Expr]) -> int:
        """The sum of terms; a bias goes into the first sum over neighbours or product."""
        biases = [self._input(term.name) for term in terms if isinstance(term, Dense) and term.rows == 1]
        rest = [term for term in terms if not (isinstance(term, Dense) and term.rows == 1)]
        products = [term for term in rest if isinstance(term, MatMul) and sort(term.left) == "dense"]
        others = [self._emit(term) for term in rest if term not in products]
        bias = biases.pop() if biases else None
        left: list[tuple[int, int]] = []  # operands of products that come last, so that they can add
        for term in products:
            w, leaf = self._emit(term.right), _leaf(term.left)
            if leaf is None or self._is_cheaper_first(x := self._input(leaf), w):
                left.append((self._emit(term.left), w))
                continue
            product, matrix = self._product(x, w), _only_sum(term.left)
            if matrix is not None:
                others.append(self._sum(product, matrix, bias))
                bias = None
            else:
                others.append(self._spread(term.left, product))
        total: int | None = None
        for other in others:
            total = other if total is None else self._added(total, other)
        for x, w in left:
            total, bias = self._product(x, w, bias, total), None
        if total is None or biases:
            raise PlanError("terms: a bias alone, or more than one")
        return total if bias is None else self._biased(total, bias)

    def _is_cheaper_first(self, x: int, w: int) -> bool:
        """Whether A @ x before @ w sums fewer columns than A @ (x @ w), gradients included."""
        before, after = self._widths[x], self._widths[w]
        return before * (1 + self.wants[x]) <= after * (1 + (self.wants[x] or self.wants[w]))

    def _spread(self, expr: Expr, x: int) -> int:
        """A linear map of rows as `_leaf` knows it, of another register."""
        identity = _only_sum(expr)
        if identity is not None:
            return self._sum(x, identity)
        match expr:
            case Dense():
                return x
            case MatMul(_, right):
                return self._sum(self._spread(right, x))
            case Scale(factor, body):
                return self._scaled(factor, self._spread(body, x))
            case Add(terms):
                total = self._spread(terms[0], x)
                for term in terms[1:]:
                    total = self._added(total, self._spread(term, x))
                return total
        raise PlanError(f"{formula(expr)}: is no sum over neighbours")


def _leaf(expr: Expr) -> str | None:
    """The leaf of an expression that sums rows of one leaf over neighbours; None for any other one."""
    match expr:
        case Dense(name) if expr.rows != 1:
            return name
        case MatMul(left, right) if sort(left) != "dense":
            return _leaf(right)
        case Scale(_, body):
            return _leaf(body)
        case Add(terms):
            names = {_leaf(term) for term in terms}
            return names.pop() if len(names) == 1 else None
    return None


def _only_sum(expr: Expr) -> float | None:
    """identity, where an expression is (matrix + identity) @ leaf; None for any other one."""
    match expr:
        case MatMul(left, Dense()) if sort(left) != "dense":
            return 0.0
        case Add((MatMul(left, x), Dense() as own)) if x == own and sort(left) != "dense":
            return 1.0
    return None


def _give(g: Registers, place: int | None, grad: Tensor) -> None:
    """Add to the gradient of a register."""
    assert place is not None
    g[place] = grad if g[place] is None else g[place] + grad


def is_large(x: Tensor, weight: Tensor) -> bool:
    """Whether plait's kernels multiply x with a weight, or its gradient, in less time than torch."""
    return x.shape[0] * weight.numel() >= _FEWEST and x.dtype is weight.dtype


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None) -> Tensor:
    """x @ weight.T + bias + addend."""
    if is_large(x, weight):
        out = x.new_empty(x.shape[0], weight.shape[0])
        return dense.gemm(x, weight, out, bias=bias, addend=addend, is_turned=True)
    if addend is None:
        return functional.linear(x, weight, bias)
    made = torch.addmm(addend, x, weight.t())
    return made if bias is None else made.add_(bias)


def _times(grad: Tensor, weight: Tensor, addend: Tensor | None) -> Tensor:
    """grad @ weight + addend."""
    if is_large(grad, weight):
        return dense.gemm(grad, weight, grad.new_empty(grad.shape[0], weight.shape[1]), addend=addend)
    return torch.mm(grad, weight) if addend is None else torch.addmm(addend, grad, weight)


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """grad.T @ x; vector lanes run over the wider operand."""
    if x.numel() * grad.shape[1] < _FEWEST or x.dtype is not grad.dtype:
        return torch.mm(grad.t(), x)
    return (
        dense.gemm_transposed(grad, x) if x.shape[1] >= grad.shape[1] else dense.gemm_transposed(x, grad).t()
    )


# Under autograd -------------------------------------------------------------------------------------------


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tape: Tape, matrix: Sums, *values: Tensor) -> Tensor:
        registers: Registers = [*values, *tape.blank]
        for place, run in tape.forward:
            registers[place] = run(registers, matrix)
        ctx.tape, ctx.matrix = tape, matrix
        ctx.save_for_backward(*[registers[k] for k in tape.saved])
        # read by a derivative of the derivative alone: until one is asked for they may change
        others = [values[k] for k in tape.others]
        try:
            ctx.others = [(value, value._version) for value in others]
        except RuntimeError:  # made under inference_mode
            ctx.others = [(value, _version(value)) for value in others]
        result: Tensor = registers[-1]
        return result

    @staticmethod
    @differentiable(lambda ctx, grad, saved: _in_torch(ctx, saved))
    def backward(ctx: Any, grad: Tensor) -> Any:
        tape: Tape = ctx.tape
        count = len(tape.wants)
        registers: Registers = [None] * count
        for k, value in zip(tape.saved, ctx.saved_tensors, strict=True):
            registers[k] = value
        grads: Registers = [None] * count
        grads[-1], matrix = grad, ctx.matrix
        for run in tape.backward:
            run(registers, grads, matrix)
        return (None, None, *grads[: len(tape.inputs)])


# without the wrapper in Python, which serves torch.func only: see runtime/deferred.py
_node: Callable[..., Tensor] = super(torch.autograd.Function, _Node).apply


def apply(tape: Tape, matrix: Sums, values: Sequence[Tensor]) -> Tensor:
    """The expression's value, differentiable where the tape says so."""
    return _node(tape, matrix, *values) if tape.is_differentiable else tape.value(values, matrix)


def _in_torch(ctx: Any, saved: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    """(the value in torch's operations, the inputs it was computed from)."""
    tape: Tape = ctx.tape
    found: dict[int, Any] = dict(zip(tape.saved, saved, strict=True))
    for k, (value, version) in zip(tape.others, ctx.others, strict=True):
        if _version(value) != version:
            raise RuntimeError(
                f"{tape.inputs[k].name} was modified by an inplace operation before a derivative of its "
                "gradient was computed; clone it first"
            )
        found[k] = value.view_as(value) if value.requires_grad else value
    inputs = [found[k] for k in range(len(tape.inputs))]
    return tape.again(inputs, ctx.matrix), (None, None, *inputs)


def _version(value: Tensor) -> int:
    return value._version if counts_writes(value) else 0
