"""Fusion: products of the same rows as one pass over blocks in cache (kernels/chain).

A `chain` step gathers a block of rows (or reads it), multiplies it by weights and adds up weight gradients
from it before it leaves the cache. Its roles: matrix, x, source, target, block_addend, block_scale make the
block called `block`; rows0 and w0 (wt0: transposed), rows1 and w1 are the products, summed with addend and
bias to `out`; left0 and right0, ... are the gradients `more` names. The block's name in `more` keeps it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from plait.ops.program import Program, Step

__all__ = ["MOST_PRODUCTS", "MOST_SUMS", "fuse"]

MOST_PRODUCTS = 2
MOST_SUMS = 3


def fuse(program: Program, keep: Collection[str], apart: Collection[str] = ()) -> Program:
    """The program with steps chained where possible.

    `keep` names the values something else reads, `apart` those made or multiplied in another way (sparse
    features, other graph forms): their steps stay as they are.
    """
    fuser = _Fuser(program, frozenset(keep), frozenset(apart))
    for step in program.steps:
        if step.op == "spmm":
            fuser.around_gather(step)
    for step in program.steps:
        if step.op == "gemm":
            fuser.around_rows(step)
    return replace(program, steps=fuser.steps())


@dataclass
class _Chain:
    """A chain while it is put together."""

    gather: Step | None
    products: list[Step] = field(default_factory=list)
    sums: list[Step] = field(default_factory=list)

    @property
    def parts(self) -> list[Step]:
        return [*([self.gather] if self.gather else []), *self.products, *self.sums]

    def operands(self) -> set[str]:
        """Names of the rows that go through it."""
        names = {step["x"] for step in self.products}
        if self.gather is not None:
            names |= {self.gather.out, self.gather["x"]}
        return names


class _Fuser:
    def __init__(self, program: Program, keep: frozenset[str], apart: frozenset[str]):
        self.program = program
        self.keep = keep | frozenset(program.outputs)
        self.apart = apart
        self.place = {step.out: k for k, step in enumerate(program.steps)}
        self.readers: dict[str, list[Step]] = {}
        for step in program.steps:
            for name in {name for _, name in step.reads}:
                self.readers.setdefault(name, []).append(step)
        self.absorbed: dict[str, _Chain] = {}  # by the name a step makes

    # Finding chains -----------------------------------------------------------------------------

    def around_gather(self, gather: Step) -> None:
        if not self._is_free(gather) or gather.get("bias") or gather.get("factor"):
            return
        chain = _Chain(gather)
        block = gather.out
        for step in self.readers.get(block, []):
            if step.op == "gemm" and self._multiplies(step, block) and not chain.products:
                chain.products.append(step)
        self._link_products(chain)
        self._add_sums(chain)
        # a gather with nothing after it is better run by the sparse product's own kernel
        if chain.products or any(block in _operands(step) for step in chain.sums):
            self._take(chain)

    def around_rows(self, product: Step) -> None:
        if not self._is_free(product):
            return
        chain = _Chain(None, [product])
        self._link_products(chain)
        self._add_sums(chain)
        if len(chain.parts) > 1:
            self._take(chain)

    def _is_free(self, step: Step) -> bool:
        names = {step.out, *_operands(step)}
        return step.out not in self.absorbed and not names & self.apart

    def _multiplies(self, step: Step, rows: str) -> bool:
        """A product of these rows that reads them once."""
        return self._is_free(step) and step["x"] == rows and _operands(step).count(rows) == 1

    def _rows_of(self, name: str) -> object:
        return self.program.shapes[name][0]

    def _link_products(self, chain: _Chain) -> None:
        """A product added to the chain's, or that the chain's is added to, where nothing else reads it."""
        if not chain.products:
            return
        (product,) = chain.products
        before = self._maker(product.get("addend"))
        if before is not None and before.op == "gemm" and self._is_link(before, product):
            chain.products.insert(0, before)
            return
        for after in self.readers.get(product.out, []):
            is_added = after.op == "gemm" and after.get("addend") == product.out != after["x"]
            if is_added and self._is_link(product, after):
                chain.products.append(after)

    def _is_link(self, first: Step, second: Step) -> bool:
        alone = len(self.readers.get(first.out, [])) == 1 and first.out not in self.keep
        one_bias = first.get("bias") is None or second.get("bias") is None
        same_rows = self._rows_of(first["x"]) == self._rows_of(second["x"])
        return alone and one_bias and same_rows and self._is_free(first) and self._is_free(second)

    def _maker(self, name: str | None) -> Step | None:
        return self.program.steps[self.place[name]] if name in self.place else None

    def _add_sums(self, chain: _Chain) -> None:
        """Weight and bias gradients computed from rows that are in the chain anyway."""
        rows = self._rows_of(chain.parts[0].out)
        passing = chain.operands()
        for step in self.program.steps:
            sides = _sides(step)
            if not sides or len(chain.sums) == MOST_SUMS or not self._is_free(step):
                continue
            if passing & set(sides) and all(self._rows_of(side) == rows for side in sides):
                chain.sums.append(step)

    # Placing them -------------------------------------------------------------------------------

    def _take(self, chain: _Chain) -> None:
        """Keep the chain if it can run in place of its last part; drop the sums that cannot."""
        while not self._can_run(chain):
            if not chain.sums:
                return
            chain.sums.pop()
        if len(chain.parts) > 1:
            for step in chain.parts:
                self.absorbed[step.out] = chain

    def _can_run(self, chain: _Chain) -> bool:
        inside = {step.out for step in chain.parts}
        last = max(self.place[step.out] for step in chain.parts)
        linked = {step.out for step in chain.products[:-1]}
        block = None if chain.gather is None else chain.gather.out
        for step in chain.parts:
            for name in _operands(step):
                # of the chain's results it reads only the block and its own unfinished product
                if name in inside and name != block and name not in linked:
                    return False
            readers = self.readers.get(step.out, [])
            if any(r.out not in inside and self.place[r.out] < last for r in readers):
                return False
        return True

    def steps(self) -> tuple[Step, ...]:
        """The program's steps, with every chain in the place of its last part."""
        result = []
        for step in self.program.steps:
            chain = self.absorbed.get(step.out)
            if chain is None:
                result.append(step)
            elif step.out == max((s.out for s in chain.parts), key=self.place.__getitem__):
                result.append(self._written(chain))
        return tuple(result)

    def _written(self, chain: _Chain) -> Step:
        reads: list[tuple[str, str]] = []
        made = [step.out for step in chain.sums]
        gather = chain.gather
        if gather is not None:
            names = {"addend": "block_addend", "addend_scale": "block_scale"}
            reads += [(names.get(role, role), name) for role, name in gather.reads]
            reads.append(("block", gather.out))
            inside = {step.out for step in chain.parts}
            elsewhere = any(r.out not in inside for r in self.readers.get(gather.out, []))
            if elsewhere or gather.out in self.keep:
                made.append(gather.out)
        linked = {step.out for step in chain.products[:-1]}
        for k, step in enumerate(chain.products):
            reads += [(f"rows{k}", step["x"]), (f"{'wt' if step.is_transposed else 'w'}{k}", step["w"])]
            reads += [
                (role, name) for role, name in step.reads if role in ("addend", "bias") and name not in linked
            ]
        for k, step in enumerate(chain.sums):
            sides = _sides(step)
            reads += [(f"left{k}", sides[0])] if len(sides) == 2 else []
            reads.append((f"right{k}", sides[-1]))
        out = chain.products[-1].out if chain.products else made[0]
        is_transposed = gather is not None and gather.is_transposed
        return Step("chain", out, tuple(reads), is_transposed, more=tuple(made))


def _operands(step: Step) -> list[str]:
    return [name for _, name in step.reads]


def _sides(step: Step) -> tuple[str, ...]:
    """(left, right) of a weight gradient, (rows,) of a bias gradient, () of anything else."""
    if step.op == "gemm_transposed":
        return step["left"], step["right"]
    return (step["x"],) if step.op == "colsum" else ()
