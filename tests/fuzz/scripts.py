"""Draws scripts: a model, a graph, then what users do between calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.layers import KINDS, NODES
from tests.fuzz.models import graphs, models
from tests.fuzz.rules import CALLS, CAST, CHAIN_CALLS, EDGE_CALLS, EDITS, ZEROING, Facts, Rule

__all__ = ["scripts"]


@st.composite
def scripts(draw: Callable[[Any], Any], steps: int = 9) -> str:
    """A script: a model and a graph, compiled, then edits with a call behind each."""
    head, facts = draw(models())
    if facts.arguments == "x, edge_index" and "sparse" not in facts.words:
        facts = replace(facts, words=facts.words | {"bare"})
    lines = [*head, *draw(graphs(facts)), "original = model; model = plait.compile(model)"]
    edits = [rule for rule in EDITS if rule.holds(facts)]
    calls = [rule for rule in (*CALLS, *EDGE_CALLS, *CHAIN_CALLS) if rule.holds(facts)]
    lines.append(_filled(draw, CALLS[0], facts))
    for _ in range(draw(st.integers(1, steps))):
        lines += [_filled(draw, draw(st.sampled_from(edits)), facts)]
        lines += [_filled(draw, draw(st.sampled_from(calls)), facts)]
    return _without_known("\n".join(lines))


_DIFFERENTIATING = tuple(
    f"torch.func.{name}(" for name in ("grad", "hessian", "jacfwd", "jacrev", "jvp", "vjp")
)


def _without_known(script: str) -> str:
    """The script without what ends the process in PyG's own run, and without a difference that is documented.

    Weights that are all zero make messages of exactly 0, which PNAConv and EdgeConv with a linear network do
    not count as PyG's zero-filled output does (docs/coverage.md).
    torch 2.13 crashes inside Tensor.register_hook of the output of a SuperGATConv, which keeps its scores
    from call to call, when it had been in float16 or was called by torch.func, whose wrappers it then keeps.
    It crashes too where a layer of PyG without a size yet gets one inside torch.func.jvp, jacrev or the like.
    """
    if "PNAConv" in script or "EdgeConv" in script:
        script = script.replace(ZEROING, "pass")
    if "(-1, " in script:
        lines = script.split("\n")
        script = "\n".join(line for line in lines if not any(name in line for name in _DIFFERENTIATING))
    if "SuperGATConv" in script and (".half()" in script or "torch.func." in script):
        return script.replace("hook = out.register_hook(lambda g: 2 * g); ", "")
    return script


def _filled(draw: Any, rule: Rule, facts: Facts) -> str:
    line = rule.line
    fields: dict[str, object] = {
        "a": facts.arguments,
        "w": facts.width,
        "c": CAST,
        "plain": "edge_weight = None",
    }
    if "weight" in facts.words:
        fields["plain"] = "pass"
    if "{k}" in line:
        fields["k"] = draw(st.integers(0, 2))
    if "{g}" in line:
        fields |= {"g": draw(st.sampled_from(KINDS)), "n": draw(st.sampled_from(NODES))}
    return line.format(**fields)
