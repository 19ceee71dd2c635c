"""What is sent, computed first and from few rows: less of a step comes before a send or after a receive.

Rows of a product with a weight need the same rows of its operand alone, and products are associative. So the
rows that other ranks need are multiplied first and all rows while those are being sent (`rows(X) W`); what
goes back along the edges of the halo is multiplied by the weight afterwards, on the rows of the halo instead
of all (`(Rᵀ G) Wᵀ`); and what came is multiplied before it is added up, and added last, so that a rank's own
sums can be multiplied before (`own W + R (halo W)`). The numbers sent are the same: each rank decides on its
own. Some rows are multiplied twice, which the planner weighs against the time that is hidden.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from plait.ops.program import Program, Shape, Step

__all__ = ["early", "early_backward"]


def early(forward: Program) -> Program:
    """The program whose sends read products of the rows to be sent alone, and whose own sums do not wait.

    A sum that is multiplied by parts is left out: `early_backward` makes it where gradients need it.
    """
    writer = _Writer(forward)
    for step in forward.steps:
        if step.op == "send" and not step.is_transposed:
            writer.border_first(step)
        elif step.op == "gemm" and (sums := writer.summed_halo(step["x"])) is not None:
            writer.by_parts(step, sums)
        elif step.op == "gemm" and (sums := writer.summed_halo(step.get("addend"))) is not None:
            writer.halo_last(step, sums)
        else:
            writer.steps.append(step)
    return writer.program()


def early_backward(backward: Program, whole: Program, forward: Program) -> Program:
    """The gradients' program with products of the halo alone before a send; `forward` is `early(whole)`."""
    writer = _Writer(backward)
    for step in _left_out(backward, whole, forward):
        writer.steps.append(step)
    for step in backward.steps:
        if step.op == "send" and step.is_transposed:
            writer.halo_first(step)
        else:
            writer.steps.append(step)
    return writer.program()


def _left_out(backward: Program, whole: Program, forward: Program) -> Iterable[Step]:
    """The steps of `whole` that `forward` lacks and gradients read, and what these read of such steps."""
    made = {step.out for step in forward.steps}
    read = {name for step in backward.steps for _, name in step.reads}
    found: list[Step] = []
    for step in reversed(whole.steps):
        if step.out in read and step.out not in made:
            found.insert(0, step)
            read |= {name for _, name in step.reads}
    return found


@dataclass
class _Writer:
    """A program while it is rewritten."""

    before: Program
    steps: list[Step] = field(default_factory=list)
    shapes: dict[str, Shape] = field(init=False)

    def __post_init__(self) -> None:
        self.shapes = dict(self.before.shapes)

    def maker(self, name: str | None) -> Step | None:
        """The step written so far that makes this value."""
        return next((step for step in self.steps if step.out == name), None)

    def border_first(self, send: Step) -> None:
        """Sends rows(X) W instead of rows(X W), where no term is added to the product."""
        product = self.maker(send["x"])
        if product is None or product.op != "gemm" or product.get("addend") is not None:
            self.steps.append(send)
            return
        picked = self._add(Step("pick", f"{product['x']}@picked", (("x", product["x"]),)), "S", product["x"])
        border = self._add(_reading(product, f"{product.out}@border", x=picked), "S", product.out)
        self.steps.append(replace(_reading(send, send.out, x=border), options=(("is_picked", True),)))

    def halo_first(self, send: Step) -> None:
        """Sends (Rᵀ G) Wᵀ instead of Rᵀ (G Wᵀ), where no term is added to either product."""
        gather = self.maker(send["x"])
        product = None if gather is None or gather.op != "spmm" else self.maker(gather["x"])
        is_plain = product is not None and product.op == "gemm" and not _adds(product)
        if gather is None or product is None or not is_plain or _adds(gather):
            self.steps.append(send)
            return
        self.steps.remove(gather)
        first = f"{gather.out}@sums"
        self._add(_reading(gather, first, x=product["x"]), "B", product["x"])
        self.steps += [_reading(product, gather.out, x=first), send]

    def summed_halo(self, name: str | None) -> Step | None:
        """own + R halo, where this is the value of that name, and one step alone reads it."""
        sums = self.maker(name)
        if sums is None or sums.op != "spmm" or sums.get("addend") is None:
            return None
        is_halo = self.shapes[sums["x"]][0] == "B" and not sums.is_transposed
        readers = [step for step in self.before.steps for _, read in step.reads if read == name]
        is_alone = len(readers) == 1 and name not in self.before.outputs
        is_plain = sums.get("bias") is None and sums.get("addend_scale") is None
        return sums if is_halo and is_alone and is_plain else None

    def by_parts(self, product: Step, sums: Step) -> None:
        """(own + R halo) W as own W + R (halo W), terms added to the product with the former."""
        self.steps.remove(sums)
        own = self._add(_reading(product, f"{product.out}@own", x=sums["addend"]), "N", product.out)
        halo = replace(product, out=f"{product.out}@halo", reads=(("x", sums["x"]), ("w", product["w"])))
        came = self._add(halo, "B", product.out)
        self.steps.append(_reading(sums, product.out, x=came, addend=own))

    def halo_last(self, product: Step, sums: Step) -> None:
        """X V + (own + R halo) as (X V + own) + R halo."""
        self.steps.remove(sums)
        own = self._add(_reading(product, f"{product.out}@own", addend=sums["addend"]), "N", product.out)
        self.steps.append(_reading(sums, product.out, addend=own))

    def _add(self, step: Step, rows: str, like: str) -> str:
        """A step whose result has these rows and the columns of another value."""
        if step.out not in self.shapes:
            self.shapes[step.out] = (rows, self.shapes[like][1])
            self.steps.append(step)
        return step.out

    def program(self) -> Program:
        return replace(self.before, steps=tuple(self.steps), shapes=self.shapes)


def _reading(step: Step, out: str, **other: str) -> Step:
    """The step with other operands in some roles, under another name."""
    return replace(step, out=out, reads=tuple((role, other.get(role, name)) for role, name in step.reads))


def _adds(step: Step) -> bool:
    return step.get("addend") is not None or step.get("bias") is not None
