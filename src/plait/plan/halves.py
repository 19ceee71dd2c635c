"""Where the passes of a layer over ranks are cut in two, so that what follows them need not wait for rows.

Of a layer's result the rows without remote neighbours are known before the halo is here. They are handed out
then, and the row-wise work that follows the layer (a second linear map, an activation, a loss) is done on
them while the halo is still travelling; the other rows follow. In the backward pass the gradients of those
other rows are all that the gradients of the halo depend on, so they are computed and sent first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from plait.ir import Barrier
from plait.ops.program import Program, Step
from plait.ops.work import size_of
from plait.plan.plan import LayerPlan

__all__ = ["Halves", "halves"]

_GRAD = "grad"


@dataclass(frozen=True)
class Halves:
    """The two halves of a layer's passes, and whether they pay.

    `waiting` are the seconds of a step in which nothing of the layer is left to do but to wait for rows;
    `copying` those that it takes to put the two parts of the result, and of its gradient, together.
    """

    own: str  # the value whose first rows are those of the result before the halo is here
    remote: str  # the matrix that adds the halo to the other rows
    forward: int  # steps of the forward pass that come before the halo is needed
    backward: int  # steps of the backward pass that need the gradient of the other rows alone
    reads: frozenset[str]  # what these read besides it
    waiting: float
    copying: float

    def __str__(self) -> str:
        return (
            "rows without remote neighbours go on before the halo is here: what follows the layer may fill "
            f"{self.waiting * 1e3:.3f} ms of waiting, for {self.copying * 1e3:.3f} ms of copying"
        )

    def to_dict(self) -> dict[str, float]:
        return {"waiting_seconds": self.waiting, "copying_seconds": self.copying}

    def steps(self, plan: LayerPlan) -> tuple[Step, ...]:
        """The first half of the forward pass."""
        return plan.forward.steps[: self.forward]

    def gain(self, share: float) -> float:
        """Seconds that may be saved at most where this share of the rows has no remote neighbours."""
        return share * self.waiting - self.copying


def halves(plan: LayerPlan, copy_seconds: Callable[[float], float]) -> Halves | None:
    """The halves of a training plan; None where its result does not end with the halo's part alone."""
    forward, backward = plan.forward, plan.backward
    if backward is None or not forward.steps:
        return None
    last, received = forward.steps[-1], _places(forward, "receive")
    addend = last.get("addend")
    if not received or addend is None or not _adds_halo(last, forward):
        return None
    cut = received[-1]
    if (last.out,) != forward.outputs or addend not in {step.out for step in forward.steps[:cut]}:
        return None
    first = _gradients_first(forward, backward)
    if first is None:
        return None
    copying = 2 * copy_seconds(_numbers(plan, last.out))
    return Halves(addend, last["matrix"], cut, *first, _waiting(plan), copying)


def _places(program: Program, op: str) -> list[int]:
    return [k for k, step in enumerate(program.steps) if step.op == op]


def _adds_halo(step: Step, program: Program) -> bool:
    """Whether the step adds nothing but a product with the halo: rows without remote neighbours stay."""
    is_plain = step.get("bias") is None and step.get("addend_scale") is None and not step.is_transposed
    return step.op == "spmm" and is_plain and _is_remote(step, program)


def _is_remote(step: Step, program: Program) -> bool:
    matrix = program.constants.get(step.get("matrix") or "")
    return isinstance(matrix, Barrier) and matrix.name == "remote"


def _gradients_first(forward: Program, backward: Program) -> tuple[int, frozenset[str]] | None:
    """The steps up to the first that sends gradients, and what they read; None where they need all rows."""
    sent = _places(backward, "send")
    steps = backward.steps[: sent[0] + 1] if sent else ()
    made = {name for step in steps for name in (step.out, *step.more)}
    read: set[str] = set()
    for step in steps:
        roles = [role for role, name in step.reads if name == _GRAD]
        if roles and not (roles == ["x"] and step.is_transposed and _is_remote(step, backward)):
            return None
        inside = {_GRAD, step.get("block")}  # the block of a chain is made and read by the same step
        read |= {name for _, name in step.reads} - made - inside - set(backward.constants)
    return (len(steps), frozenset(read)) if read <= set(forward.inputs) else None


def _waiting(plan: LayerPlan) -> float:
    """What receiving takes beyond what is computed meanwhile."""
    return sum(s.price.seconds - s.price.copy_seconds for s in plan.steps if s.step.op == "receive")


def _numbers(plan: LayerPlan, name: str) -> float:
    rows, cols = (size_of(size, plan.sizes) for size in plan.forward.shapes[name])
    return float(rows * cols)
