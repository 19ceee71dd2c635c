"""Programs carried out in numpy, one obvious line an operation: what the runtime is held to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from plait.ir.evaluate import evaluate
from plait.ops.program import Program, Step
from tests.plan.expressions import SIZES

Array = Any


def run(program: Program, given: Mapping[str, Any], leaves: Mapping[str, Any]) -> dict[str, Array]:
    """Every value of a program: `given` names its inputs, `leaves` the leaves of its constants."""
    env: dict[str, Any] = dict(given)
    for step in program.steps:
        assert step.out not in env, f"{step.out} is made twice"
        constants = _constants(program, leaves)
        if step.op == "chain":
            env |= _chain(step, env, constants)
            continue
        env[step.out] = _value(step, env, constants)
        if step.op == "extremum":
            env[step.more[0]] = _ties(step, {**env, **constants})
    return env


def _constants(program: Program, leaves: Mapping[str, Any]) -> dict[str, Array]:
    values = {}
    for name, expr in program.constants.items():
        # the one leaf the planner adds: ones for every node, of which fewer rows use the first
        values[name] = evaluate(expr, {**leaves, "ones": np.ones(SIZES["N"])})
    return values


def _value(step: Step, env: Mapping[str, Any], constants: Mapping[str, Array]) -> Array:
    get = {**env, **constants}
    addend = _addend(step, get)
    bias = get[step["bias"]] if step.get("bias") else 0.0
    match step.op:
        case "spmm":
            matrix = get[step["matrix"]].T if step.is_transposed else get[step["matrix"]]
            source = get[step["source"]] if step.get("source") else np.eye(matrix.shape[1])
            target = _first(get[step["target"]], len(matrix)) if step.get("target") else np.eye(len(matrix))
            factor = get[step["factor"]] if step.get("factor") else 1.0
            return factor * (target @ (matrix @ (source @ get[step["x"]]))) + addend + bias
        case "gemm":
            w = get[step["w"]]
            return get[step["x"]] @ (w.T if step.is_transposed else w) + addend + bias
        case "gemm_transposed":
            return get[step["left"]].T @ get[step["right"]]
        case "scale_rows":
            return get[step["scale"]] @ get[step["x"]]
        case "scale":
            return get[step["scalar"]] * get[step["x"]]
        case "combine":
            terms = [get[name] for role, name in step.reads if role != "bias"]
            return sum(f * t for f, t in zip(step.factors, terms, strict=True)) + bias
        case "stack":
            return np.concatenate([get[name] for _, name in step.reads])
        case "concat":
            return np.concatenate([get[name] for _, name in step.reads], axis=1)
        case "rows_of":
            parts = [get[name] for role, name in step.reads if role.startswith("part")]
            return np.split(get[step["x"]], np.cumsum([len(p) for p in parts])[:-1])[int(step.factors[0])]
        case "columns_of":
            parts = [get[name] for role, name in step.reads if role.startswith("of")]
            cuts = np.cumsum([p.shape[1] for p in parts])[:-1]
            return np.split(get[step["x"]], cuts, axis=1)[int(step.factors[0])]
        case "relu":
            return np.maximum(get[step["x"]], 0)
        case "relu_backward":
            return get[step["x"]] * (get[step["made"]] > 0)
        case "colsum":
            return get[step["x"]].sum(axis=0, keepdims=True)
        case "dot":
            return np.sum(get[step["left"]] * get[step["right"]])
        case "extremum" | "extremum_gather":
            return _extremum(step, get) + addend
        case "extremum_share":
            return get[step["x"]] / get[step["ties"]]
    raise AssertionError(f"the interpreter does not know {step.op}")


def _addend(step: Step, get: Mapping[str, Any]) -> Array:
    if not step.get("addend"):
        return 0.0
    scale = step.get("addend_scale")
    if scale is None:
        return get[step["addend"]]
    factor = np.asarray(get[scale])
    addend = get[step["addend"]]
    return _first(factor, len(addend)) @ addend if factor.ndim == 2 else factor * addend


def _first(diagonal: Array, rows: int) -> Array:
    return diagonal[:rows, :rows]


def _extremum(step: Step, get: Mapping[str, Any]) -> Array:
    graph, x = get[step["matrix"]].astype(int), get[step["x"]]
    if step.op == "extremum":
        out = np.zeros((len(graph), x.shape[1]))
        for i, row in enumerate(graph):
            if row.any():
                out[i] = getattr(x[row > 0], step.reduce)(axis=0)
        return out
    return (_attained(graph, x, get[step["best"]]) * get[step["share"]][:, None, :]).sum(axis=0)


def _attained(graph: Array, x: Array, best: Array) -> Array:
    """[target, source, column]: how many edges from the source attain the target's extremum."""
    return graph[:, :, None] * (x[None, :, :] == best[:, None, :])


def _ties(step: Step, get: Mapping[str, Any]) -> Array:
    best = get[step.out]
    attains = _attained(get[step["matrix"]].astype(int), get[step["x"]], best)
    return np.maximum(attains.sum(axis=1) + (best == 0), 1)


def _chain(step: Step, env: Mapping[str, Any], constants: Mapping[str, Array]) -> dict[str, Array]:
    """The steps a chain stands for, one after the other."""
    get = dict(env)
    block = step.get("block")
    if block is not None:
        names = {"block_addend": "addend", "block_scale": "addend_scale"}
        roles = ("matrix", "x", "source", "target", *names)
        reads = tuple((names.get(role, role), name) for role, name in step.reads if role in roles)
        get[block] = _value(Step("spmm", block, reads, step.is_transposed), get, constants)
    bias = get[step["bias"]] if step.get("bias") else 0.0
    result, sums = _addend(step, get) + bias, []
    for role, name in step.reads:
        k = role[-1]
        if role.startswith("rows"):
            turned = step.get(f"wt{k}")
            result = result + get[name] @ (get[step[f"w{k}"]] if turned is None else get[turned].T)
        if role.startswith("right"):
            left = step.get(f"left{k}")
            sums.append(get[left].T @ get[name] if left else get[name].sum(axis=0, keepdims=True))
    made = dict(zip(step.more, sums, strict=False))
    if block is not None and block in step.more:
        made[block] = get[block]
    return {step.out: result, **made}
