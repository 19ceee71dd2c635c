"""pyg/compile.py: bad input, needed rows, constant and sparse features, forks, the same bits."""

from __future__ import annotations

import copy
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from torch_geometric.nn import GCN, GCNConv, SAGEConv

import plait
from plait.errors import GraphError, InputError, PlaitError, PlanError
from plait.kernels import spmm as sparse
from plait.plan.plan import LayerPlan
from plait.runtime import machine as machines


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def graph(nodes: int = 40, edges: int = 160, width: int = 6) -> Data:
    edge_index = torch.randint(0, nodes, (2, edges))
    return Data(x=torch.randn(nodes, width), edge_index=edge_index, num_nodes=nodes)


def model_of(width: int = 6, hidden: int = 8, classes: int = 3) -> GCN:
    return GCN(width, hidden, 2, classes)


def layer_plan(model: nn.Module) -> LayerPlan:
    plan: Any = model.plan
    return plan.layers[0]  # type: ignore[no-any-return]


# Bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [40, -1, 2**40])
def test_an_index_out_of_range_is_named(bad: int) -> None:
    data = graph()
    data.edge_index[0, 3] = bad
    with pytest.raises(PlaitError, match=str(bad)):
        plait.compile(model_of(), data)
    with pytest.raises(PlaitError, match=str(bad)):
        plait.compile(model_of())(data.x, data.edge_index)


def test_more_nodes_in_the_edges_than_rows_of_x_is_an_error() -> None:
    data = graph()
    with pytest.raises((GraphError, InputError), match=r"\d"):
        plait.compile(model_of())(data.x[:20], data.edge_index)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_indices_that_are_no_integers_are_refused(dtype: torch.dtype) -> None:
    data = graph()
    with pytest.raises(InputError, match=r"edge_index.*\.long\(\)"):
        plait.compile(model_of())(data.x, data.edge_index.to(dtype))


@pytest.mark.parametrize("shape", [(3, 5), (10,), (5, 2)])
def test_an_edge_index_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    data = graph()
    with pytest.raises(InputError, match=r"edge_index.*\[2, E\]"):
        plait.compile(model_of())(data.x, torch.zeros(shape, dtype=torch.long))


def test_a_wrong_width_is_named_with_the_layer() -> None:
    data = graph(width=5)
    with pytest.raises(InputError, match=r"convs\.0.*width"):
        plait.compile(model_of(), data)


def test_a_wrong_number_of_edge_weights_is_refused() -> None:
    data, layer = graph(), plait.compile(GCNConv(6, 4))
    with pytest.raises(InputError, match="edge_weight: 5 weights for 160 edges"):
        layer(data.x, data.edge_index, torch.ones(5))


@pytest.mark.parametrize(("nodes", "edges"), [(0, 0), (5, 0), (1, 1), (1, 0)])
def test_empty_graphs_have_the_right_empty_result(nodes: int, edges: int) -> None:
    data = Data(x=torch.randn(nodes, 6), edge_index=torch.zeros((2, edges), dtype=torch.long))
    model = model_of()
    compiled = plait.compile(model, data)
    ours, theirs = compiled(data.x, data.edge_index), model(data.x, data.edge_index)
    torch.testing.assert_close(ours, theirs)
    assert ours.shape == (nodes, 3)
    ours.sum().backward()


def test_features_of_no_width_have_the_right_result() -> None:
    data = graph(width=0)
    for layer in (GCNConv(0, 4), SAGEConv(0, 4)):
        compiled = plait.compile(layer, data)
        torch.testing.assert_close(compiled(data.x, data.edge_index), layer(data.x, data.edge_index))


@pytest.mark.parametrize("limit", [0, -5, 1.5, "much", "8 XB", True])
def test_a_memory_limit_that_is_no_amount_of_memory_is_refused(limit: Any) -> None:
    with pytest.raises(InputError, match="memory_limit"):
        plait.compile(model_of(), graph(), memory_limit=limit)


@pytest.mark.parametrize(("limit", "expected"), [("1 GB", 10**9), ("2GiB", 2 << 30), (10**8, 10**8)])
def test_a_memory_limit_is_bytes_or_text(limit: Any, expected: int) -> None:
    assert plait.compile(model_of(), graph(), memory_limit=limit).plan.memory_limit == expected


def test_a_memory_limit_nothing_fits_names_the_nearest_that_can_be_met() -> None:
    model, data = model_of(), graph()
    with pytest.raises(PlanError, match=r"memory_limit: 10 bytes.*needs \d+ bytes") as refusal:
        plait.compile(model, data, memory_limit=10)
    least = int(str(refusal.value).partition("needs ")[2].split()[0])
    assert plait.compile(model, data, memory_limit=least).plan.peak_bytes <= least


@pytest.mark.parametrize(
    "model", [GCN, None, lambda x: x, torch.ones(2)], ids=["class", "nothing", "function", "tensor"]
)
def test_what_is_no_module_is_refused(model: Any) -> None:
    with pytest.raises(InputError, match=r"model.*torch\.nn\.Module"):
        plait.compile(model, graph())


@pytest.mark.parametrize(("name", "value"), [("epochs", 0), ("epochs", 2.5), ("mode", "fast")])
def test_odd_options_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=name):
        plait.compile(model_of(), graph(), **{name: value})


@pytest.mark.parametrize(
    "rows",
    [
        torch.ones(39, dtype=torch.bool),
        torch.ones(40, 1, dtype=torch.bool),
        torch.ones(40),
        torch.tensor([[1, 2]]),
        torch.tensor([40]),
        torch.tensor([-1]),
        "train",
    ],
    ids=["short mask", "mask of two dimensions", "floats", "matrix", "too large", "negative", "a name"],
)
def test_rows_of_the_wrong_kind_are_refused(rows: Tensor) -> None:
    with pytest.raises(InputError, match="rows"):
        plait.compile(model_of(), graph(), rows=rows)


# Needed rows -------------------------------------------------------------------------------------------


def trained_once(model: nn.Module, data: Data, rows: Tensor) -> tuple[Tensor, list[Tensor | None], Tensor]:
    model.train()
    out = model(data.x, data.edge_index)
    loss = cross_entropy(out[rows], data.y[rows])
    model.zero_grad()
    loss.backward()
    return loss, [None if p.grad is None else p.grad.clone() for p in model.parameters()], out


@pytest.mark.parametrize("kind", ["mask", "numbers", "repeated numbers", "none", "all"])
def test_needed_rows_have_the_full_models_loss_and_gradients(kind: str) -> None:
    data = graph()
    data.y = torch.randint(0, 3, (40,))
    mask = torch.rand(40) < (0.0 if kind == "none" else 0.3)
    mask = torch.ones(40, dtype=torch.bool) if kind == "all" else mask
    numbers = mask.nonzero().reshape(-1)
    rows = {"numbers": numbers, "repeated numbers": numbers.repeat(9)}.get(kind, mask)
    model = model_of()
    compiled = plait.compile(copy.deepcopy(model), data, rows=rows)
    if kind == "none":
        assert compiled(data.x, data.edge_index).shape == (40, 3)
        return
    theirs, their_grads, expected = trained_once(model, data, mask)
    ours, our_grads, out = trained_once(compiled, data, mask)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for mine, other in zip(our_grads, their_grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(out[~mask], expected[~mask], rtol=1e-5, atol=1e-6)


def test_evaluation_computes_every_row() -> None:
    data, model = graph(), model_of()
    compiled = plait.compile(model, data, rows=torch.arange(5))
    compiled.eval()
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(data.x, data.edge_index), model(data.x, data.edge_index), rtol=1e-5, atol=1e-6
        )


# Constant and sparse features ----------------------------------------------------------------------------


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rows of the pattern, width) of every sparse product."""
    seen: list[tuple[int, int]] = []
    real = sparse.spmm

    def spy(pattern: Any, x: Tensor, out: Tensor, **rest: Any) -> Tensor:
        seen.append((pattern.num_rows, x.shape[1]))
        return real(pattern, x, out, **rest)

    monkeypatch.setattr(sparse, "spmm", spy)
    return seen


def test_the_product_of_constant_features_is_computed_once(products: list[tuple[int, int]]) -> None:
    data = graph(width=6)
    compiled = plait.compile(GCNConv(6, 16), data)
    assert layer_plan(compiled).hoisted.steps
    before = len(products)
    for _ in range(20):
        compiled(data.x, data.edge_index).sum().backward()
    assert len(products) == before, "a sparse product ran in a training step"
    data.x.add_(1.0)
    compiled(data.x, data.edge_index)
    assert len(products) > before


def test_features_that_are_nearly_all_zero_are_used_as_a_sparse_matrix() -> None:
    data = Data(x=torch.zeros(600, 800), edge_index=torch.randint(0, 600, (2, 1500)))
    data.x[torch.arange(600).repeat(8), torch.randint(0, 800, (4800,))] = 1.0
    model = GCN(800, 16, 2, 4)
    compiled = plait.compile(copy.deepcopy(model), data)
    assert "sparse features" in compiled.plan.formulas()  # type: ignore[union-attr, operator]
    assert "x never changes and is mostly zeros" in str(compiled.plan)
    data.y = torch.randint(0, 4, (600,))
    everything = torch.ones(600, dtype=torch.bool)
    theirs, their_grads, _ = trained_once(model, data, everything)
    ours, our_grads, _ = trained_once(compiled, data, everything)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for mine, other in zip(our_grads, their_grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


# The plan and what surrounds it -----------------------------------------------------------------------------


@pytest.fixture
def uncalibrated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(machines, "cache_folder", lambda: tmp_path)
    machines.forget_machine()
    yield
    machines.forget_machine()


@pytest.mark.usefixtures("uncalibrated")
def test_a_plan_says_at_its_top_that_the_machine_is_the_built_in_default() -> None:
    text = str(plait.explain(model_of(), graph()))
    assert "built-in default" in "\n".join(text.splitlines()[:3])
    assert max(map(len, text.splitlines())) <= 100


def test_analyze_measures_every_step_and_leaves_gradients_alone() -> None:
    data, model = graph(), model_of().train()
    plan = plait.explain(model, data, analyze=True)
    for layer in plan.layers:
        assert {step.step.out for step in layer.steps} <= set(layer.measured)
    assert all(p.grad is None for p in model.parameters())


def test_analyze_says_how_much_of_a_whole_step_the_steps_are() -> None:
    data, model = graph(), model_of().train()
    plan = plait.explain(model, data, analyze=True)
    shortest = min(m.seconds for layer in plan.layers for m in layer.measured.values())
    assert plan.measured_seconds is not None
    assert plan.measured_seconds > shortest
    assert plan.to_dict()["measured_seconds"] == plan.measured_seconds
    assert "Measured: " in str(plan)
    unmeasured = plait.explain(model, data)
    assert unmeasured.measured_seconds is None
    assert "Measured: " not in str(unmeasured)


class _Answers(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, model: nn.Module, data: Data):
        self.model, self.data = model, data

    def __len__(self) -> int:
        return 2

    def __getitem__(self, k: int) -> Tensor:
        with torch.no_grad():
            answer: Tensor = self.model(self.data.x + k, self.data.edge_index)
        return answer


def forked_answers() -> None:
    """A forked loader worker calls a compiled model after its parent has used kernels on two threads."""
    data = Data(x=torch.randn(3000, 64), edge_index=torch.randint(0, 3000, (2, 30_000)))
    torch.set_num_threads(2)
    compiled = plait.compile(GCN(64, 64, 2, 8), data).eval()
    expected = [answer for answer in map(_Answers(compiled, data).__getitem__, range(2))]
    loader = torch.utils.data.DataLoader(
        _Answers(compiled, data), batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=200
    )
    for mine, other in zip(loader, expected, strict=True):
        # the worker has one thread, so its plan, and the order of its sums, may be another
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.processes
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_a_forked_loader_worker_may_call_a_compiled_model() -> None:
    # in a process of its own: forking one that other tests left threads in is a hazard of theirs
    script = "from tests.pyg.test_compile import forked_answers; forked_answers()"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr


FIRST_WITHOUT_GRADIENTS = """
import torch
from torch_geometric.nn import GCNConv
import plait
layer, x, edge_index = GCNConv(4, 3), torch.randn(9, 4), torch.randint(0, 9, (2, 30))
with torch.{}():
    model = plait.compile(layer)
    model(x, edge_index)
for called in (layer, model):
    out = called(x, edge_index)
    print(torch.autograd.grad(out.sum(), layer.lin.weight)[0].sum().item())
"""


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_what_a_process_first_compiles_may_be_without_gradients(mode: str) -> None:
    # what is imported with the first model must not depend on the mode
    script = FIRST_WITHOUT_GRADIENTS.format(mode)
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    expected, made = map(float, done.stdout.split())
    assert made == pytest.approx(expected, abs=1e-4)


def bits(threads: int, data: Data) -> list[Tensor]:
    torch.set_num_threads(threads)
    torch.manual_seed(5)
    compiled = plait.compile(GCN(64, 64, 2, 16), data)
    plans: Any = compiled.plan
    backends = {
        s.price.backend for layer in plans.layers for s in layer.steps if s.step.op.startswith("gemm")
    }
    if backends - {"plait"}:
        pytest.skip("the profile in use prices MKL lower at these shapes; MKL promises no bits")
    out = compiled(data.x, data.edge_index)
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in compiled.parameters() if p.grad is not None)]


@pytest.mark.usefixtures("uncalibrated")
def test_the_same_bits_for_any_number_of_threads_and_every_run() -> None:
    data = Data(x=torch.randn(4000, 64), edge_index=torch.randint(0, 4000, (2, 40_000)))
    before = torch.get_num_threads()
    try:
        first = bits(1, data)
        for threads in (1, 2, 2):
            for mine, other in zip(bits(threads, data), first, strict=True):
                assert torch.equal(mine, other)
    finally:
        torch.set_num_threads(before)


def test_a_weight_that_is_a_view_of_a_parameter_gets_its_own_gradient() -> None:
    torch.manual_seed(0)
    layer = GCNConv(5, 4)
    model, edge_index, x = plait.compile(layer), torch.randint(0, 9, (2, 30)), torch.randn(9, 5)
    found = []
    for net in (model, layer):
        view = layer.lin.weight.view_as(layer.lin.weight)
        out = torch.func.functional_call(net, {"lin.weight": view}, (x, edge_index))
        found.append(torch.autograd.grad(out.square().sum(), view)[0])
    torch.testing.assert_close(*found)
