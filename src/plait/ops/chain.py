"""The row of a chain: products of the same rows in one pass over blocks in cache (see plan/fuse.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from plait.ops.operation import Operation, Setting, View, operation, register
from plait.ops.program import Step
from plait.ops.work import Amount, ChainRequest, Request

__all__ = ["unchained"]


def unchained(step: Step) -> tuple[Step, ...]:
    """The steps that a chain combines, in order; for any other step, just that step."""
    if step.op != "chain":
        return (step,)
    parts = []
    block = step.get("block")
    if block is not None:
        names = {"block_addend": "addend", "block_scale": "addend_scale"}
        roles = ("matrix", "x", "source", "target", *names)
        reads = tuple((names.get(role, role), name) for role, name in step.reads if role in roles)
        parts.append(Step("spmm", block, reads, step.is_transposed))
    products = [role for role, _ in step.reads if role.startswith("rows")]
    before = step.get("addend")
    for k in range(len(products)):
        is_last = k == len(products) - 1
        turned = step.get(f"wt{k}")
        reads = (("x", step[f"rows{k}"]), ("w", turned or step[f"w{k}"]))
        reads += () if before is None else (("addend", before),)
        bias = step.get("bias")
        reads += (("bias", bias),) if bias is not None and is_last else ()
        before = step.out if is_last else f"{step.out}|{k}"
        parts.append(Step("gemm", before, reads, turned is not None))
    for k, name in enumerate(role for role, _ in step.reads if role.startswith("right")):
        left, right = step.get(f"left{k}"), step[name]
        sides = (("left", left), ("right", right)) if left is not None else (("x", right),)
        parts.append(Step("gemm_transposed" if left is not None else "colsum", step.more[k], sides))
    return tuple(parts)


def _flops(step: Step, view: View) -> Mapping[str, Amount]:
    total: Counter[str] = Counter()
    for part in unchained(step):
        for kind, amount in operation(part.op).flops(part, view).items():
            total[kind] += amount
    return total


def _depth(step: Step, view: View) -> Amount:
    """The depth of its parts one after another: a bound, exact where each reads the one before."""
    return sum(operation(part.op).depth(part, view) for part in unchained(step))


def _request(step: Step, setting: Setting) -> ChainRequest:
    def columns(name: str) -> int:
        return setting.size(name)[1]

    block, gather = step.get("block"), None
    if block is not None:
        matrix = setting.matrix(step["matrix"], step.is_transposed)
        addends = int(step.get("block_addend") is not None)
        has_source = step.get("source") is not None
        gather = Request("spmm", matrix.rows, columns(block), 0, matrix, has_source, addends)
    products = [(columns(name), columns(step.out)) for role, name in step.reads if role.startswith("rows")]
    sums = []
    for k, right in enumerate(name for role, name in step.reads if role.startswith("right")):
        left = step.get(f"left{k}")
        sums.append((columns(left) if left is not None else 1, columns(right)))
    passing = {name for role, name in step.reads if role.startswith(("rows", "left", "right", "addend"))}
    beside = sum(columns(name) for name in passing - {block}) + (columns(step.out) if products else 0)
    some = block or next(name for role, name in step.reads if role.startswith(("rows", "right")))
    rows = setting.size(some)[0]
    is_kept = block in step.more
    return ChainRequest(rows, columns(step.out), gather, is_kept, tuple(products), tuple(sums), beside)


register(
    Operation(
        "chain",
        (
            "matrix?", "x?", "source?", "target?", "block?", "block_addend?", "block_scale?",
            "rows*", "w*", "wt*", "left*", "right*", "addend?", "bias?",
        ),
        _flops, _depth, _request, overwrites="addend", reference="plait.kernels.chain.reference:chain",
    )
)  # fmt: skip
