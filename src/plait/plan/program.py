"""Programs from expressions: the kernel calls that compute one, and those that compute its gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from plait.errors import PlanError
from plait.ir import (
    Add,
    Aggregate,
    Concat,
    Dense,
    Diagonal,
    Expr,
    Fold,
    Map,
    MatMul,
    Scalar,
    Scale,
    Sparse,
    formula,
    shape,
    sort,
    walk,
)
from plait.ops.operation import operation
from plait.ops.program import Program, Shape, Step

__all__ = ["apart", "differentiate", "hoist", "schedule"]


@dataclass
class _Writer:
    """Collects steps while an expression is walked."""

    fuse: bool
    steps: list[Step] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)
    constants: dict[str, Expr] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    memo: dict[Expr, str] = field(default_factory=dict)

    # Operands ---------------------------------------------------------------------------------

    def constant(self, expr: Expr) -> str:
        name = formula(expr)
        self.constants.setdefault(name, expr)
        return name

    def input(self, leaf: Dense | Scalar) -> str:
        self.shapes[leaf.name] = shape(leaf)
        if leaf.name not in self.inputs:
            self.inputs.append(leaf.name)
        return leaf.name

    def weight(self, expr: Expr) -> str:
        """A weight leaf, or weights stacked on top of each other (a `stack` step, small)."""
        if isinstance(expr, Dense):
            return self.input(expr)
        if isinstance(expr, Concat):
            if expr not in self.memo:
                parts = tuple((f"part{k}", self.weight(part)) for k, part in enumerate(expr.parts))
                self.memo[expr] = self.add("stack", parts, shape(expr))
            return self.memo[expr]
        raise PlanError(f"{formula(expr)}: a weight must be a leaf or stacked leaves")

    def add(self, op: str, reads: Iterable[tuple[str, str | None]], out: Shape, **extra: object) -> str:
        name = f"v{len(self.steps)}"
        given = tuple((role, operand) for role, operand in reads if operand is not None)
        self.steps.append(Step(op, name, given, **extra))  # type: ignore[arg-type]
        self.shapes[name] = out
        return name

    # Expressions ------------------------------------------------------------------------------

    def emit(self, expr: Expr) -> str:
        if isinstance(expr, Dense):
            return self.input(expr)
        if expr not in self.memo:
            self.memo[expr] = self.write(expr, None, None, None)
        return self.memo[expr]

    def write(self, expr: Expr, addend: str | None, addend_scale: str | None, bias: str | None) -> str:
        """Emit a product with an added term and a bias fused in (spmm, gemm), or any other expression."""
        match expr:
            case MatMul(left, right) if sort(left) in ("sparse", "diagonal") and sort(right) == "dense":
                return self.pattern_product(expr, addend, addend_scale, bias)
            case MatMul(x, w) if sort(x) == "dense":
                if addend_scale is not None:
                    raise PlanError("a dense product takes its added term unscaled")
                reads = [("x", self.emit(x)), ("w", self.weight(w)), ("addend", addend), ("bias", bias)]
                return self.add("gemm", reads, shape(expr))
        if addend or bias:
            raise PlanError(f"{formula(expr)} takes no added term")
        return self.other(expr)

    def other(self, expr: Expr) -> str:
        match expr:
            case Add(terms):
                return self.sum(terms, shape(expr))
            case Aggregate(reduce, graph, body) if reduce in ("max", "min"):
                reads = [("matrix", self.constant(graph)), ("x", self.emit(body))]
                return self.extremum(reads, shape(expr), reduce)
            case Scale(Scalar(_, value) as factor, body) if value is not None:
                if isinstance(body, MatMul) and sort(body.left) in ("sparse", "diagonal") and self.fuse:
                    return self.pattern_product(body, None, None, None, factor=factor)
                return self.add("combine", [("x0", self.emit(body))], shape(expr), factors=(value,))
            case Scale(factor, MatMul() as body) if self.is_fusable(expr):
                return self.pattern_product(body, None, None, None, factor=factor)
            case Scale(factor, body):
                reads = [("scalar", self.input(factor)), ("x", self.emit(body))]
                return self.add("scale", reads, shape(expr))
            case Concat(parts, 1):
                reads = [(f"x{k}", self.emit(part)) for k, part in enumerate(parts)]
                return self.add("concat", reads, shape(expr))
            case Map("relu", body):
                return self.add("relu", [("x", self.emit(body))], shape(expr))
        raise PlanError(f"{formula(expr)}: no kernel computes {type(expr).__name__}; this layer runs in PyG")

    def extremum(self, reads: list[tuple[str, str]], out: Shape, reduce: str) -> str:
        """A maximum or minimum; the pass that finds it also counts how many neighbours attain it."""
        name = self.add("extremum", reads, out, reduce=reduce)
        ties = f"{name}|ties"
        self.steps[-1] = replace(self.steps[-1], more=(ties,))
        self.shapes[ties] = out
        return name

    def pattern_product(
        self,
        expr: MatMul,
        addend: str | None,
        addend_scale: str | None,
        bias: str | None,
        factor: Scalar | None = None,
    ) -> str:
        """target @ (matrix @ (source @ x)), fused into one step where asked; a lone diagonal scales rows."""
        target: Expr | None = None
        inner: Expr = expr
        if sort(expr.left) == "diagonal":
            target = expr.left
            inner = expr.right
            if not (isinstance(inner, MatMul) and sort(inner.left) == "sparse" and self.fuse):
                # a named factor occurs only with fused products
                scale = target if factor is None else Fold(Scale(factor, _bare(target)))
                reads = [("scale", self.constant(scale)), ("x", self.emit(inner))]
                value = self.add("scale_rows", reads, shape(expr))
                if addend is None and bias is None:
                    return value
                return self.combined([value], addend, addend_scale, bias, shape(expr))
        assert isinstance(inner, MatMul)
        x, source = inner.right, None
        is_plain = _is_unweighted(inner.left)
        if self.fuse and is_plain and isinstance(x, MatMul) and sort(x.left) == "diagonal":
            source, x = x.left, x.right
        named = None
        if factor is not None and factor.value is None:
            named = self.input(factor)
        elif factor is not None:
            size = shape(inner)[0]
            target = Fold(Scale(factor, _bare(target) if target is not None else Diagonal("ones", size)))
        operands: list[tuple[str, str | None]] = [
            ("matrix", self.constant(inner.left)),
            ("x", self.emit(x)),
            ("source", None if source is None else self.constant(source)),
            ("target", None if target is None else self.constant(target)),
            ("factor", named),
            ("addend", addend),
            ("addend_scale", addend_scale),
            ("bias", bias),
        ]
        return self.add("spmm", operands, shape(expr))

    def combined(
        self, values: list[str], addend: str | None, addend_scale: str | None, bias: str | None, out: Shape
    ) -> str:
        if addend_scale is not None and addend is not None:
            addend = self.add("scale_rows", [("scale", addend_scale), ("x", addend)], out)
        terms = [v for v in (*values, addend) if v is not None]
        reads = [(f"x{k}", v) for k, v in enumerate(terms)]
        return self.add("combine", [*reads, ("bias", bias)], out, factors=(1.0,) * len(terms))

    # Sums -------------------------------------------------------------------------------------

    def sum(self, terms: tuple[Expr, ...], out: Shape) -> str:
        """A chain: every product takes the sum so far as its added term, the last one the bias."""
        biases = [t for t in terms if isinstance(t, Dense) and t.rows == 1]
        # a term that is part of another one is computed once for both
        inner = {part for term in terms for part in walk(term) if part is not term}
        plain = [t for t in terms if t not in biases and (t in inner or not self.is_fusable(t))]
        products = [t for t in terms if t not in biases and t not in plain]
        if len(biases) > 1:
            raise PlanError("a sum takes one bias")
        bias = self.input(biases[0]) if biases else None
        # a sparse product last: it adds for free when it writes its result, also with a scaling per row
        products.sort(key=lambda term: sort(_product(term).left) != "dense")
        pending, scale = self.plain_terms(plain, bool(products) and self.takes_scale(products[0]), out)
        if not products:
            assert pending is not None
            return self.combined([], pending, scale, bias, out) if bias or scale else pending
        for k, term in enumerate(products):
            last_bias = bias if k == len(products) - 1 else None
            if isinstance(term, Scale):
                body = _product(term)
                pending = self.pattern_product(body, pending, scale, last_bias, factor=term.factor)
            else:
                pending = self.write(term, pending, scale, last_bias)
            scale = None
        assert pending is not None
        return pending

    def takes_scale(self, term: Expr) -> bool:
        return sort(_product(term).left) == "sparse" or (
            sort(_product(term).left) == "diagonal" and isinstance(_product(term).right, MatMul)
        )

    def plain_terms(self, terms: list[Expr], may_scale: bool, out: Shape) -> tuple[str | None, str | None]:
        """The terms no product can be fused with, as one value and perhaps its scaling by rows."""
        if len(terms) == 1 and may_scale and self.fuse:
            match terms[0]:
                case MatMul(d, x) if sort(d) == "diagonal":
                    return self.emit(x), self.constant(d)
                case Scale(Scalar(_, value) as factor, x) if value is not None:
                    ones = Diagonal("ones", out[0])
                    return self.emit(x), self.constant(Fold(Scale(factor, ones)))
                case Scale(factor, x):
                    return self.emit(x), self.input(factor)
        if not terms:
            return None, None
        factors, values = [], []
        for term in terms:
            match term:
                case Scale(Scalar(_, value), body) if value is not None:
                    factors.append(value)
                    values.append(self.emit(body))
                case _:
                    factors.append(1.0)
                    values.append(self.emit(term))
        if len(values) == 1 and factors[0] == 1.0:
            return values[0], None
        reads = [(f"x{k}", v) for k, v in enumerate(values)]
        return self.add("combine", reads, out, factors=tuple(factors)), None

    def is_fusable(self, term: Expr) -> bool:
        """A product not computed yet that can take an added term."""
        if term in self.memo:
            return False
        if isinstance(term, Scale):
            # the gradient of a learned factor reads the product without it
            is_learned = term.factor.role == "learnable"
            if is_learned or not self.fuse or not isinstance(term.body, MatMul):
                return False
            return term.body not in self.memo and self._is_sparse_product(term.body)
        if not isinstance(term, MatMul) or sort(term) != "dense":
            return False
        return sort(term.left) == "dense" or self._is_sparse_product(term)

    def _is_sparse_product(self, term: MatMul) -> bool:
        if sort(term.left) == "sparse":
            return True
        inner = term.right
        return (
            self.fuse
            and sort(term.left) == "diagonal"
            and isinstance(inner, MatMul)
            and sort(inner.left) == "sparse"
        )


def _product(term: Expr) -> MatMul:
    body = term.body if isinstance(term, Scale) else term
    assert isinstance(body, MatMul)
    return body


def _bare(expr: Expr) -> Expr:
    return expr.body if isinstance(expr, Fold) else expr


def _is_unweighted(matrix: Expr) -> bool:
    """Whether a source scaling may be fused: the kernel takes edge weights or source scalings, not both."""
    match matrix:
        case Sparse(_, _, _, is_weighted):
            return not is_weighted
        case Fold(Add(terms)):
            return all(_is_unweighted(t) for t in terms if isinstance(t, Sparse))
    return False


def schedule(expr: Expr, fuse: bool = True) -> Program:
    """The kernel calls that compute an expression, scalings and sums fused into products where `fuse`."""
    writer = _Writer(fuse)
    out = writer.emit(expr)
    return Program(tuple(writer.steps), (out,), writer.shapes, writer.constants, tuple(writer.inputs))


def hoist(program: Program, constant_inputs: frozenset[str]) -> tuple[Program, Program]:
    """(what can be computed once, the rest) if these inputs stay the same from call to call."""
    known = set(constant_inputs)
    once, each = [], []
    for step in program.steps:
        operands = {name for _, name in step.reads if name not in program.constants}
        if operands <= known and operation(step.op).may_hoist:
            known.add(step.out)
            once.append(step)
        else:
            each.append(step)
    read = {name for step in each for _, name in step.reads}
    needed = tuple(step.out for step in once if step.out in program.outputs or step.out in read)
    return replace(program, steps=tuple(once), outputs=needed), replace(program, steps=tuple(each))


def apart(program: Program, constant_inputs: frozenset[str]) -> Program | None:
    """The program with products that never change as steps of their own, so that they are computed once.

    In A @ X + e * X with a learned or scheduled e the sum changes and the product does not. None where what
    is added is as constant as the product.
    """
    known = {*constant_inputs, *program.constants}
    shapes = dict(program.shapes)
    steps = [part for step in program.steps for part in _apart(step, known, shapes)]
    if len(steps) == len(program.steps):
        return None
    return replace(program, steps=tuple(steps), shapes=shapes)


def _apart(step: Step, known: set[str], shapes: dict[str, Shape]) -> list[Step]:
    """A product with the graph and what is added to it, where only the product is known."""
    reads = dict(step.reads)
    if known.issuperset(reads.values()):
        known |= {step.out} if operation(step.op).may_hoist else set()
        return [step]
    added = {role: reads.pop(role) for role in ("addend", "addend_scale", "bias") if role in reads}
    if step.op != "spmm" or not known.issuperset(reads.values()):
        return [step]
    product, terms = f"{step.out}@product", [f"{step.out}@product"]
    shapes[product] = shapes[step.out]
    steps = [replace(step, out=product, reads=tuple(reads.items()))]
    if "addend" in added:
        terms.append(added["addend"])
    if "addend_scale" in added:
        scale, terms[1] = added["addend_scale"], f"{step.out}@added"
        shapes[terms[1]] = shapes[step.out]
        op, role = ("scale_rows", "scale") if scale in known else ("scale", "scalar")
        steps.append(Step(op, terms[1], ((role, scale), ("x", added["addend"]))))
    joined = [(f"x{k}", name) for k, name in enumerate(terms)]
    joined += [("bias", added["bias"])] if "bias" in added else []
    return [*steps, Step("combine", step.out, tuple(joined), factors=(1.0,) * len(terms))]


# Gradients -----------------------------------------------------------------------------------------


@dataclass
class _Reverse:
    """Collects the backward steps; a gradient is a value, perhaps still to be scaled, per forward value."""

    forward: Program
    needed: set[str]
    steps: list[Step] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)
    grads: dict[str, tuple[str, str | None, float]] = field(default_factory=dict)
    parts: dict[str, list[tuple[int, str]]] = field(default_factory=dict)  # gradients of some columns
    count: int = 0

    def fresh(self, of: str, shaped: Shape) -> str:
        name = f"d{self.count}_{of}"
        self.count += 1
        self.shapes[name] = shaped
        return name

    def add(
        self, op: str, of: str, reads: Iterable[tuple[str, str | None]], shaped: Shape, **extra: object
    ) -> str:
        name = self.fresh(of, shaped)
        given = tuple((role, operand) for role, operand in reads if operand is not None)
        self.steps.append(Step(op, name, given, **extra))  # type: ignore[arg-type]
        return name

    def shape_of(self, name: str) -> Shape:
        return self.shapes.get(name) or self.forward.shapes[name]

    def part(self, name: str, start: int, value: str) -> None:
        """The columns of `name` from `start` on have this gradient."""
        if name in self.needed:
            self.parts.setdefault(name, []).append((start, value))

    def _join(self, name: str) -> None:
        """Put the gradients of a value's columns side by side; columns without one get zeros."""
        parts = sorted(self.parts.pop(name))
        reads = [(f"part{k}", value) for k, (_, value) in enumerate(parts)]
        starts = tuple(start for start, _ in parts)
        whole = self.add("join", name, reads, self.forward.shapes[name], options=(("starts", starts),))
        self.share(name, whole)

    def settled(self, name: str) -> str | None:
        """The gradient of a value as one finished value."""
        if name in self.parts:
            self._join(name)
        if name not in self.grads:
            return None
        value, scale, factor = self.grads[name]
        if scale is not None:
            op = "scale" if scale in self.forward.shapes else "scale_rows"
            role = "scalar" if op == "scale" else "scale"
            value = self.add(op, name, [(role, scale), ("x", value)], self.shape_of(value))
        if factor != 1.0:
            value = self.add("combine", name, [("x0", value)], self.shape_of(value), factors=(factor,))
        self.grads[name] = (value, None, 1.0)
        return value

    def share(self, name: str | None, value: str, scale: str | None = None, factor: float = 1.0) -> None:
        """Adds `factor * scale * value` to the gradient of `name`; lazily, if it is the only part."""
        if name is None or name not in self.needed:
            return
        if name not in self.grads:
            self.grads[name] = (value, scale, factor)
            return
        first = self.settled(name)
        self.grads[name] = (value, scale, factor)
        second = self.settled(name)
        assert first is not None
        assert second is not None
        total = self.add(
            "combine", name, [("x0", first), ("x1", second)], self.shape_of(first), factors=(1.0, 1.0)
        )
        self.grads[name] = (total, None, 1.0)

    def product(self, name: str, op: str, reads: list[tuple[str, str | None]], **extra: object) -> None:
        """Adds a product to the gradient of `name`; an earlier part becomes its added term."""
        shaped = self.forward.shapes[name]
        addend = scale = None
        if name in self.grads:
            value, scale, factor = self.grads[name]
            if factor != 1.0 or (scale is not None and op != "spmm"):
                value, scale = self.settled(name) or value, None
            addend = value
        more = [("addend", addend), ("addend_scale", scale)]
        self.grads[name] = (self.add(op, name, [*reads, *more], shaped, **extra), None, 1.0)

    def step(self, step: Step) -> None:
        grad = self.settled(step.out)
        if grad is None:
            return
        gradient = operation(step.op).gradient
        if gradient is None:
            raise PlanError(f"step {step.op} -> {step.out}: the operation has no gradient")
        gradient(self, step, grad)


def differentiate(forward: Program, wrt: Iterable[str]) -> Program:
    """The program that computes the gradients of the inputs `wrt` from the gradient `grad` of the output.

    Nothing is computed for inputs not in `wrt`. The runtime must keep the values of the forward pass that it
    reads; `outputs` are the gradients in the order of `wrt` ("" where an input has none).
    """
    wanted = list(wrt)
    needed = set(wanted)
    for step in forward.steps:
        if any(name in needed for _, name in step.reads):
            needed.add(step.out)
    reverse = _Reverse(forward, needed)
    out = forward.outputs[0]
    reverse.shapes["grad"] = forward.shapes[out]
    reverse.grads[out] = ("grad", None, 1.0)
    for step in reversed(forward.steps):
        if step.out in needed:
            reverse.step(step)
    outputs = tuple(reverse.settled(name) or "" for name in wanted)
    shapes = {**forward.shapes, **reverse.shapes}
    return Program(tuple(reverse.steps), outputs, shapes, forward.constants, ("grad",))
