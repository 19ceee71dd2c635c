"""The house rules that no other tool checks: every source module has the test module that checks it.

`src/plait/a/b.py` is tested by `tests/a/test_b.py`. Two kinds of modules share one: the files of one package
that is tested as a whole (`kernels/spmm/cpu.py` by `tests/kernels/test_spmm.py`), and what is held against
PyG itself (`runtime/gated.py` and `pyg/layers/gated.py` by `tests/parity/test_gated.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "plait"
NO_CODE_OF_THEIR_OWN = ("__init__.py", "__main__.py")

ELSEWHERE = {
    "analysis/workload.py": "analysis/test_strategies.py",
    "bench/gpu/families.py": "parity/test_families.py",
    "bench/gpu/gates.py": "kernels/test_gpu_gate.py",
    "bench/gpu/steps.py": "pyg/test_captured.py",
    # a folder of parts is written, read and trained on there
    "distributed/files.py": "distributed/test_divide.py",
    "distributed/layout.py": "distributed/test_divide.py",
    "distributed/parts.py": "distributed/test_divide.py",
    "distributed/session.py": "distributed/test_neighbor.py",
    "distributed/train.py": "cli/test_train.py",
    # a full graph over ranks, compared with one process as a whole
    "distributed/norms.py": "distributed/test_shard.py",
    "distributed/peers.py": "distributed/test_shard.py",
    "distributed/share.py": "distributed/test_shard.py",
    "distributed/shardplan.py": "distributed/test_shard.py",
    "pyg/shard.py": "distributed/test_shard.py",
    "pyg/call.py": "pyg/test_explain.py",
    "pyg/trace.py": "pyg/test_profiling.py",
    # every operation of the catalogue is run and compared there
    "bench/ops/dense.py": "bench/ops/test_catalogue.py",
    "bench/ops/gather.py": "bench/ops/test_catalogue.py",
    "bench/ops/layer.py": "bench/ops/test_catalogue.py",
    "bench/ops/operation.py": "bench/ops/test_catalogue.py",
    "bench/ops/ordering.py": "bench/ops/test_catalogue.py",
    "bench/ops/own.py": "bench/ops/test_catalogue.py",
    "bench/ops/sampling.py": "bench/ops/test_catalogue.py",
    "bench/ops/scatter.py": "bench/ops/test_catalogue.py",
    "bench/ops/sparse.py": "bench/ops/test_catalogue.py",
    "bench/peers/runner.py": "bench/peers/test_pyg.py",
    # parts of one walk over plans
    "analysis/layers.py": "analysis/test_analysis.py",
    "analysis/text.py": "analysis/test_analysis.py",
    "report/analysis/bars.py": "report/analysis/test_page.py",
    "report/analysis/gantt.py": "report/analysis/test_page.py",
    "report/analysis/roofline.py": "report/analysis/test_page.py",
    "report/analysis/scaling.py": "report/analysis/test_page.py",
    # steps of one search, which is compared with its reference as a whole
    "graph/hag/assemble.py": "graph/hag/test_search.py",
    "graph/hag/heap.py": "graph/hag/test_merge.py",
    "graph/hag/numbering.py": "graph/hag/test_schedule.py",
    "graph/hag/reference.py": "graph/hag/test_search.py",
    "graph/hag/rows.py": "graph/hag/test_overlap.py",
    # policies and kernels of one cache, simulated against slow ones
    "features/eviction.py": "features/test_simulate.py",
    "features/lookahead.py": "features/test_simulate.py",
    "features/memory.py": "features/test_rows.py",
    "features/policies.py": "features/test_simulate.py",
    # stages of one sampler
    "loader/expand.py": "loader/test_sampler.py",
    "loader/pick.py": "loader/test_sampler.py",
    "loader/relabel.py": "loader/test_sampler.py",
    "loader/relation.py": "loader/test_hetero.py",
    "loader/sampled.py": "loader/test_neighbor.py",
    "loader/space.py": "loader/test_hetero.py",
    # the algebra: its laws run on random matrices
    "ir/build.py": "ir/test_rules.py",
    "ir/evaluate.py": "ir/test_rules.py",
    "ir/expr.py": "ir/test_rules.py",
    # rows of the table, each compared with counted work
    "ops/chain.py": "analysis/test_work.py",
    "ops/counting.py": "analysis/test_work.py",
    "ops/exchange.py": "plan/test_exchange.py",
    "ops/linear.py": "analysis/test_work.py",
    "ops/program.py": "plan/test_program.py",
    # the second column of the table, held against PyG as a whole
    "runtime/cuda_messages.py": "parity/test_families.py",
    "runtime/cuda_orders.py": "parity/test_families.py",
    "runtime/cuda_pieces.py": "parity/test_families.py",
    "runtime/cuda_pna.py": "parity/test_families.py",
    "runtime/cuda_relations.py": "parity/test_families.py",
    # layers, their plans and their passes, held against PyG
    "ops/messages.py": "parity/test_edgewise.py",
    "ops/sequence.py": "parity/test_lstm.py",
    "plan/messages.py": "parity/test_pieces.py",
    "pyg/layers/arma.py": "parity/test_layers.py",
    "pyg/layers/base.py": "parity/test_layers.py",
    "pyg/layers/convolution.py": "parity/test_layers.py",
    "pyg/layers/fused.py": "pyg/test_edges.py",
    "pyg/layers/gin.py": "parity/test_layers.py",
    "pyg/layers/matrix.py": "parity/test_layers.py",
    "pyg/layers/messages.py": "runtime/test_messages.py",
    "pyg/layers/neighbourhood.py": "parity/test_layers.py",
    "pyg/layers/polynomial.py": "parity/test_layers.py",
    "pyg/layers/scored.py": "parity/test_pieces.py",
    "pyg/active.py": "pyg/test_view.py",
    "pyg/exported.py": "parity/test_modules.py",
    "pyg/planned.py": "pyg/test_lower.py",
    "runtime/evaluate.py": "runtime/test_executor.py",
    "runtime/learned.py": "pyg/test_learned.py",
    "runtime/linear.py": "runtime/test_executor.py",
    "runtime/pooled.py": "runtime/test_folded.py",
    "runtime/quotient.py": "runtime/test_twins.py",
    "runtime/rowwise.py": "runtime/test_deferred.py",
    # words and code for other kernels; nothing to call alone
    "kernels/vector.py": "kernels/test_spmm.py",
    # needs a GPU; run by hand there
    "bench/gpu/attending.py": "kernels/test_gpu_attention.py",
    "bench/gpu/building.py": "kernels/test_gpu_csr.py",
    "bench/gpu/clock.py": "kernels/test_gpu.py",
    "bench/gpu/graphs.py": "kernels/test_gpu.py",
    "bench/gpu/products.py": "kernels/test_gpu.py",
}
"""Modules whose test module has another name. Shorten it; never add to it what could have a mirror."""


def mirrors(module: Path) -> list[Path]:
    """The test modules of which one must be there."""
    name = f"test_{module.name}"
    found = [TESTS / module.parent / name, TESTS / module.parent.parent / f"test_{module.parent.name}.py"]
    if module.parts[0] in ("plan", "runtime") or module.parts[:2] == ("pyg", "layers"):
        found.append(TESTS / "parity" / name)
    return found


def modules() -> list[Path]:
    found = (path.relative_to(SOURCE) for path in sorted(SOURCE.rglob("*.py")))
    return [module for module in found if module.name not in NO_CODE_OF_THEIR_OWN]


@pytest.mark.parametrize("module", modules(), ids=str)
def test_every_source_module_has_its_test_module(module: Path) -> None:
    has_mirror = any(path.exists() for path in mirrors(module))
    listed = ELSEWHERE.get(module.as_posix())
    if has_mirror:
        assert listed is None, f"{module} has a test module of its own: take it off ELSEWHERE"
    else:
        assert listed is not None, f"{module} has no test module: write {mirrors(module)[0]}"
        assert (TESTS / listed).exists()


def test_the_exceptions_are_modules_that_exist() -> None:
    assert {Path(name) for name in ELSEWHERE} <= set(modules())
