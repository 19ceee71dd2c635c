"""A plan in words: for every layer what is done and why, and what each of its steps does.

plan/printed.py lays them out; the formulas and every rejected plan are in `LayerPlan.lines`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from plait.ops.operation import operation
from plait.ops.program import Program, Step
from plait.ops.work import size_of

__all__ = ["of_choice", "order", "step_text", "why"]


# What is done and why -----------------------------------------------------------------------------------


def order(hoisted: Program, forward: Program, is_training: bool) -> str:
    """What a matrix expression does, in the imperative: "multiply by W first, then aggregate"."""
    once, each = _Trail(hoisted), _Trail(forward, hoisted)
    if hoisted.steps and not forward.steps:
        return "compute the whole layer once and reuse it"
    before = "before training" if is_training else "at the first call"
    if once.gathers and not each.gathers:
        return f"{_lowered(once)} once {before}, then only {_products(each)}"
    if not each.gathers:
        return _products(each)
    if not each.weights:
        return _lowered(each)
    if each.is_gathered_first:
        return f"{_lowered(each)} first, then {_products(each)}"
    return f"{_products(each)} first, then {_lowered(each)}"


def why(plan: Any) -> str:
    """Why the order of a LayerPlan is the cheapest, from the columns it gathers."""
    is_sparse = bool(plan.sparse_values)
    each = _Trail(plan.forward, plan.hoisted)
    if plan.hoisted.steps:
        return "x never changes" + (" and is mostly zeros" if is_sparse else "")
    if not each.gathers or not each.weights:
        return ""
    if any(step.op == "extremum" for step in plan.forward.steps):
        return "a maximum or minimum cannot change places with the product"
    narrow, wide = _widths(plan, each)
    if narrow == wide:
        return f"rows are {narrow} columns wide either way"
    columns = f"gathering {_columns(narrow)} per edge"
    if narrow < wide:
        return f"{columns} is cheaper than {wide}"
    if each.gathers[0].op == "chain":
        return f"one pass gathers {_columns(narrow)} per edge and multiplies them while they are in cache"
    return f"{columns} instead of {wide} is outweighed by cheaper products" + (
        ": x is mostly zeros" if is_sparse else ""
    )


def _columns(count: int) -> str:
    return "1 column" if count == 1 else f"{count} columns"


class _Trail:
    """What the steps of a forward program do, in order: sums over neighbours, products with weights."""

    def __init__(self, program: Program, before: Program | None = None):
        self.gathers = [step for step in program.steps if _is_gather(step)]
        self.reduce = next((step.reduce for step in self.gathers if step.op == "extremum"), "sum")
        earlier = () if before is None else before.steps
        summed = _downstream([*earlier, *program.steps])
        feeding = _upstream(program.steps, self.gathers)
        self.weights: list[str] = []
        others: list[str] = []  # of a node's own row, which is never aggregated
        for step in program.steps:
            for weight, rows in _multiplied(step):
                is_related = rows in summed or rows == step.get("block") or step.out in feeding
                place = self.weights if is_related else others
                place += [weight] if weight not in place else []
        self.weights = self.weights or others
        made = _made_by_products(program.steps)
        self.is_gathered_first = bool(self.gathers) and self.gathers[0]["x"] not in made


def _is_gather(step: Step) -> bool:
    return step.op in ("spmm", "extremum") or (step.op == "chain" and step.get("matrix") is not None)


def _multiplied(step: Step) -> list[tuple[str, str]]:
    """(weight, rows it multiplies) of a step; a chain may have several."""
    pairs = [(role, name) for role, name in step.reads if _is_weight(role)]
    return [(name, step["x"] if role == "w" else step[f"rows{role[1:]}"]) for role, name in pairs]


def _downstream(steps: Sequence[Step]) -> set[str]:
    """Values that hold sums over neighbours."""
    found: set[str] = set()
    for step in steps:
        if _is_gather(step) or found & {name for _, name in step.reads}:
            found |= {step.out, *step.more}
    return found


def _upstream(steps: Sequence[Step], gathers: Sequence[Step]) -> set[str]:
    """Values that are summed over neighbours, and those they are made of."""
    found = {step["x"] for step in gathers}
    for step in reversed(steps):
        if found & {step.out, *step.more} and not _is_gather(step):
            found |= {name for role, name in step.reads if not _is_weight(role)}
    return found


def _made_by_products(steps: Sequence[Step]) -> set[str]:
    found: set[str] = set()
    for step in steps:
        if _multiplied(step) or found & {name for _, name in step.reads}:
            found |= {step.out, *step.more}
    return found


def _is_weight(role: str) -> bool:
    return role == "w" or (role[0] == "w" and role[1:].isdigit())


def _lowered(trail: _Trail) -> str:
    what = "aggregate" if trail.reduce == "sum" else f"take the neighbours' {trail.reduce}imum"
    hops = len(trail.gathers)
    return what if hops == 1 else f"{what} {hops} times"


def _products(trail: _Trail) -> str:
    if not trail.weights:
        return "combine the parts"
    names = _listed(sorted(trail.weights))
    return f"multiply by {names}"


def _listed(names: Sequence[str]) -> str:
    if len(names) > 4:
        return f"{names[0]} to {names[-1]}"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _widths(plan: Any, trail: _Trail) -> tuple[int, int]:
    """Columns of the rows that are gathered, and of those the other order would gather."""
    gathered = _columns_of(plan, trail.gathers[0]["x"])
    if trail.is_gathered_first:
        made = [s for s in plan.forward.steps if any(_is_weight(role) for role, _ in s.reads)]
        return gathered, _columns_of(plan, made[0].out)
    return gathered, _columns_of(plan, "X")


def _columns_of(plan: Any, name: str) -> int:
    shapes = {**plan.hoisted.shapes, **plan.forward.shapes}
    return int(size_of(shapes[name][1], plan.sizes))


_PASS = "in one pass over the edges"
_CHOICES = {
    "gat": f"multiply by W once per node, then score and attend {_PASS}",
    "gat folded": f"multiply by W and by the attention vectors together, then attend {_PASS}",
    "recompute": "attend over the input rows first, then multiply by W",
    "leaky": f"multiply by the weights once per node, then score and attend {_PASS}",
    "dot": f"multiply by the weights once per node, then score and attend {_PASS}",
    "dot recompute": "attend over the input rows first, then multiply by the weights",
    "agnn": f"weight neighbours' rows by cosines, {_PASS}",
    "project": "multiply by the weights once per node",
    "edge dots": "multiply the rows of both ends of every edge",
    "dot softmax": "multiply the rows of both ends of every edge, normalise over the edges of each target",
    "edge softmax": "normalise over the edges of each target",
    "leaky scores": "score edges in blocks that stay in cache, and normalise over the edges of each target",
    "edge sums": "sum rows weighted by edge",
    "keep": f"multiply by the weights once per node, then gate and sum {_PASS}",
    "gate again": f"multiply once per node, gate and sum {_PASS}, and again for gradients",
    "infer": f"multiply by the weights once per node, then gate and sum {_PASS}",
    "linear": "multiply by the weights once per node instead of once per edge, then aggregate",
    "rectified": "apply the first layer once per node, sum over edges, then apply the last layer",
    "rectified again": "apply the first layer once per node, sum over edges, and again for gradients",
    "blocks": "apply the first layer once per node, the rest per edge in blocks that stay in cache",
    "marked": "apply the first layer once per node, the rest per edge in blocks that stay in cache",
    "tiles": "apply the first layer once per node, the rest per edge in tiles that stay in cache",
    "messages": "multiply by the weights once per node, then make messages and add them up",
    "softmax": "make messages, weight them by a softmax over each target's edges, and add them up",
    "sums": "make messages once per node instead of once per edge, then aggregate",
    "aggregate": "aggregate by relation first, then multiply by all weights at once",
    "transform": "multiply by all weights at once first, then aggregate",
    "aggregate pairs": "aggregate by relation where there are edges, then multiply by its weights",
    "transform pairs": "multiply the rows each relation reads by its weights, then aggregate",
    "rows": "pick rows of the weights and sum them",
    "bases": "aggregate once per basis, then multiply by all bases at once",
    "after": "aggregate with all aggregators in one gather, multiply, then scale by degree",
    "before": "aggregate with all aggregators in one gather, scale by degree, then multiply",
    "prefixes": "run the LSTM once per distinct prefix of the neighbour lists",
    "padded": "run the LSTM over padded neighbour lists, as PyG does",
    "edge weights as an input": "aggregate with learned edge weights",
}


# how the backward pass works (ops/attention.py); the longest first
_SUFFIXES = {
    " targets first, lean": " (backward: targets first, keeping less in memory)",
    " targets first": " (backward: targets first)",
    " lean": " (keeping less in memory)",
}


def of_choice(choice: str, text: str) -> str:
    """What a way of a program layer does; its formula where there is no description."""
    base, more = choice, ""
    for suffix, words in _SUFFIXES.items():
        if choice.endswith(suffix):
            base, more = choice.removesuffix(suffix), words
            break
    return _CHOICES.get(base, f"compute {text}") + more


# The steps ---------------------------------------------------------------------------------------------


def step_text(step: Step, wrt: Iterable[str] = ()) -> str:
    """What one step of a program does."""
    if step.op == "chain":
        return _chain_text(step)
    if step.op == "spmm":
        return "send gradients back along the edges" if step.is_transposed else "sum neighbours' rows"
    if step.op == "extremum":
        return f"take neighbours' {step.reduce}imum"
    if step.op == "gemm":
        return f"gradient of the input, by {step['w']}" if step.is_transposed else _product_text(step["w"])
    if step.op in ("exchange", "send", "receive"):
        return _EXCHANGE[step.op, step.is_transposed]
    said = operation(step.op).says
    if said:
        return said
    if step.op in ("gemm_transposed", "colsum") or step.out.startswith("d"):
        return _gradient_text(step)
    return _OTHER.get(step.op, step.op.replace("_", " "))


def _product_text(weight: str) -> str:
    """V is by convention the weight of a node's own row (pyg/layers/neighbourhood.py, arma.py)."""
    return "multiply own rows by V" if weight == "V" else f"multiply by {weight}"


_EXCHANGE = {
    ("exchange", False): "receive rows from other ranks",
    ("exchange", True): "receive gradients of the rows sent",
    ("send", False): "start sending rows that others need",
    ("send", True): "start sending gradients of received rows",
    ("receive", False): "wait for rows from other ranks",
    ("receive", True): "wait for gradients of the rows sent",
}
_OTHER = {
    "combine": "add the parts",
    "scale_rows": "scale the rows",
    "scale": "multiply by a number",
    "relu": "relu",
    "concat": "concatenate columns",
    "columns_of": "split columns",
    "stack": "concatenate weights",
    "rows_of": "split weights",
    "dot": "dot product",
    "to_columns": "exchange rows for columns of all rows",
    "to_rows": "exchange columns back for rows",
}
_BACK = {
    "extremum_share": "split gradients between ties",
    "extremum_gather": "send gradients to the rows that were largest",
    "relu_backward": "gradient through relu",
}


def _gradient_text(step: Step) -> str:
    if step.op in _BACK:
        return _BACK[step.op]
    what = step.out.partition("_")[2]
    if step.op not in ("gemm_transposed", "colsum", "dot") or not what or what[0] in "vd":
        return _OTHER.get(step.op, step.op.replace("_", " "))
    return f"gradient of {what}"


def _chain_text(step: Step) -> str:
    """A chain does several things to a row while it is in cache."""
    is_backward = step.is_transposed or any(role.startswith(("wt", "right")) for role, _ in step.reads)
    parts = []
    if step.get("matrix") is not None:
        parts.append("send gradients back" if is_backward else "sum neighbours")
    weights = [name for role, name in step.reads if _is_weight(role)]
    if weights:
        parts.append(f"multiply by {_listed(weights)}")
    if is_backward:
        made = [name.partition("_")[2] for name in (step.out, *step.more)]
        learned = list(dict.fromkeys(name for name in made if name and name[0] not in "vd"))
        parts.append(f"gradients of {_listed(sorted(learned))}" if learned else "gradient of the input")
    return ", ".join(parts)
