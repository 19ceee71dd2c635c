"""Ways to run gated layers (ResGatedGraphConv): one projection, one pass over edges, what backward keeps.

keep        the forward pass also sums the gate's derivative, nodes x width: backward is one pass
gate again  nothing more is kept; backward has a pass over targets too
"""

from __future__ import annotations

from plait.ops.program import Program
from plait.plan.draft import Draft
from plait.plan.ways import Way

__all__ = ["ways"]

_BECAUSE = {
    "keep": "keeping one number per node and column saves a pass over all edges",
    "gate again": "nothing besides the projected rows is kept",
    "infer": "one projection serves gate, value and skip; nothing of size edges x width is stored",
}


def ways(
    inner: int, outer: int | None, width: int, *, has_skip: bool, has_bias: bool, is_training: bool
) -> list[Way]:
    """Every legal way to compute the layer; `outer`: columns of the targets' rows, None where they are x."""
    text = "X S + Σ σ(X K + X Q) ⊙ (X V)" if has_skip else "Σ σ(X K + X Q) ⊙ (X V)"
    named = {"keep": ", sums of σ' kept", "gate again": ", σ' recomputed"} if is_training else {"infer": ""}
    return [
        Way(
            name,
            text + words,
            _program(inner, outer, width, has_skip, has_bias, name == "keep"),
            _BECAUSE[name],
        )
        for name, words in named.items()
    ]


def _program(
    inner: int, outer: int | None, width: int, has_skip: bool, has_bias: bool, keeps: bool
) -> Program:
    """Far columns are [Q | V]; near ones, [K | S], follow them or are the targets' own."""
    draft = Draft("N" if outer is None else "M")
    own = (2 if has_skip else 1) * width
    total = 2 * width + (own if outer is None else 0)
    x = draft.input("X", draft.sources, inner)
    z = draft.gemm(x, draft.input("W", inner, total), draft.input("b", 1, total))
    near, first = z, 2 * width
    if outer is not None:
        own_x, own_w = draft.input("X1", "N", outer), draft.input("W1", outer, own)
        near, first = draft.gemm(own_x, own_w, draft.input("b1", 1, own)), 0
    reads = {
        "matrix": draft.matrix(),
        "near": draft.columns(near, first, width),
        "far": draft.columns(z, 0, width),
        "value": draft.columns(z, width, width),
        "addend": draft.columns(near, first + width, width) if has_skip else None,
        "bias": draft.input("c", 1, width) if has_bias else None,
    }
    more = [("slopes", ("N", width))] if keeps else []
    return draft.program(draft.add("gate", reads, ("N", width), more=more))
