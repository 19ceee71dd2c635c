"""Messages of a known form on the CPU: gathered, made in registers, added up and dropped in one pass.

Steps without a form, or with what these kernels do not compute, run in blocks of edges (runtime/messages.py).
"""

from __future__ import annotations

from torch import Tensor

from plait.kernels import spmm as sparse
from plait.kernels.messages import sums as _sums
from plait.kernels.messages import sums_sources, sums_targets
from plait.ops.program import Step
from plait.runtime.bind import Binding, Bound, kernel
from plait.runtime.chain import Env
from plait.runtime.messages import BoundMessages

__all__: list[str] = []


def _no_form(b: Binding, step: Step) -> str | None:
    form = step.option("form")
    if form is None:
        return "its function has no kernel"
    if form[0] != "softmax" and step.get("attr") is not None:
        return f"{form[0]} with features of edges is made in blocks"
    makes = dict(step.option("makes", ()))
    return "the temperature needs a gradient" if form[0] == "softmax" and "p0" in makes else None


class _Known:
    """A step of a known form, bound to a graph."""

    def __init__(self, b: Binding, step: Step):
        self.of, (self.form, self.eps) = BoundMessages(b, step), step.option("form")

    def rows(self, env: Env) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows of the targets, of the sources and of the edges."""
        return env[self.of.near], env[self.of.far], env.get(self.of.attr)

    def numbers(self, env: Env) -> Tensor:
        """The temperature and eps; of forms that have none, any others."""
        far: Tensor = env[self.of.far]
        found = far.new_empty(2)
        found[0] = env[self.of.parameters[0][1]].detach().reshape(()) if self.form == "softmax" else 1.0
        found[1] = self.eps
        return found


@kernel("messages", "cpu", "plait", _no_form)
def _messages(b: Binding, step: Step, owns: bool) -> Bound:
    known, columns, pattern = _Known(b, step), int(b.program.shapes[step.out][1]), b.orders.pattern
    function, of = step["function"], known.of

    def scores(env: Env) -> Tensor:
        """A function of the source alone: made once per node."""
        made = env[function](None, env[of.far], None, *of.values(env))
        return sparse.spmm(pattern, made, b.take(pattern.num_rows, columns, made.dtype), reduce=step.reduce)

    def run(env: Env) -> Tensor:
        near, far, edge = known.rows(env)
        out = b.take(pattern.num_rows, columns, far.dtype)
        return _sums(pattern, known.form, near, far, edge, known.numbers(env), out)

    return scores if known.form == "score" else run


@kernel("messages_back", "cpu", "plait", _no_form)
def _messages_back(b: Binding, step: Step, owns: bool) -> Bound:
    known, grad, orders = _Known(b, step), step["grad"], b.orders
    makes = known.of.makes

    def run(env: Env) -> Tensor:
        near, far, edge = known.rows(env)
        numbers, given = known.numbers(env), env[grad]
        to_near = to_edge = None
        if "near" in makes:
            to_near = env[makes["near"]] = b.room_like(env, makes["near"], near)
        if "attr" in makes and edge is not None:
            to_edge = env[makes["attr"]] = b.like(edge)
        if to_near is not None or to_edge is not None:
            sums_targets(
                orders.pattern, known.form, near, far, edge, numbers, given, to_near, to_edge
            )  # fmt: skip
        order = None if edge is None else orders.order
        to_far = b.room_like(env, step.out, far)
        return sums_sources(
            orders.transpose, order, known.form, near, far, edge, numbers, given, to_far
        )  # fmt: skip

    return run
