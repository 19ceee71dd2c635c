"""When a program is replayed and when it runs, with a stand-in for CUDA graphs."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable

import pytest
import torch
from torch_geometric.nn import GCNConv, GINConv, SAGEConv, TAGConv

import plait
from plait.runtime import executor, replayed
from plait.runtime.buffers import Buffers
from plait.runtime.chain import Env
from plait.runtime.replayed import Replayed


class Double:
    """out = 2 x, half = a view of out; counts its runs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, env: Env) -> None:
        self.runs += 1
        env["out"] = 2 * env["x"]
        env["half"] = env["out"][: len(env["x"]) // 2]


def fake(program: Callable[[Env], None], env: Env) -> tuple[Callable[[], None], Env]:
    """Runs the program now and writes to the same memory when replayed."""
    program(env)
    x, out = env["x"], env["out"]
    address, size, stride = out.untyped_storage(), out.shape, out.stride()

    def replay() -> None:
        torch.empty(0).set_(address, 0, size, stride).copy_(2 * x)

    return replay, env


def call(program: Replayed, x: torch.Tensor) -> Env:
    env = Env(x=x)
    program.run(env)
    return env


def test_the_same_addresses_are_replayed_from_the_fourth_time_on() -> None:
    double = Double()
    program, x = Replayed(double, fake), torch.arange(4.0)
    for k in range(8):
        x += 1
        env = call(program, x)
        assert env["out"].tolist() == (2 * x).tolist()
        assert env["half"].tolist() == (2 * x)[:2].tolist()
        assert env["half"].data_ptr() == env["out"].data_ptr()
        del env
        assert double.runs == min(k + 1, 4)  # the fourth is the stand-in's own


def test_what_somebody_holds_is_never_written_to() -> None:
    double = Double()
    program, x = Replayed(double, fake), torch.arange(4.0)
    for _ in range(4):
        call(program, x)
    held = call(program, x)["half"]  # a part of it is enough
    before, runs = held.clone(), double.runs
    x += 5
    other = call(program, x)["out"]
    assert double.runs == runs + 1
    assert held.tolist() == before.tolist()
    assert other.tolist() == (2 * x).tolist()
    del held
    call(program, x)
    assert double.runs == runs + 1


def test_results_may_be_changed_in_place_and_have_no_history() -> None:
    program, x = Replayed(Double(), fake), torch.arange(4.0)
    for _ in range(6):
        out = call(program, x)["out"]
        assert not out._is_view()
        assert out._version <= 1
        out.add_(1).requires_grad_()
        del out


def test_other_addresses_and_numbers_are_other_graphs() -> None:
    double = Double()
    program, x = Replayed(double, fake), torch.arange(4.0)

    def scaled(number: float) -> Env:
        env = Env(x=x, e=torch.tensor(number))
        program.run(env)
        return env

    for _ in range(5):
        scaled(1.0)
    runs = double.runs
    scaled(1.0)
    assert double.runs == runs
    scaled(2.0)
    assert double.runs == runs + 1
    call(program, x)
    assert double.runs == runs + 2


def test_programs_that_cannot_be_replayed_run() -> None:
    x = torch.arange(4.0)

    def through(env: Env) -> None:
        env["out"] = env["x"][1:]  # an input's memory

    for program in (Replayed(through, lambda run, env: (run(env), (lambda: None, env))[1]),):  # type: ignore[func-returns-value]
        for _ in range(8):
            x += 1
            assert call(program, x)["out"].tolist() == x[1:].tolist()

    def failing(program: Callable[[Env], None], env: Env) -> tuple[Callable[[], None], Env]:
        raise RuntimeError("operation not permitted when stream is capturing")

    double = Double()
    program = Replayed(double, failing)
    for _ in range(8):
        call(program, x)
    assert double.runs == 8


def test_large_results_and_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(4.0)
    monkeypatch.setattr(replayed, "_MOST_BYTES", 8)
    double = Double()
    program = Replayed(double, failing_if_called)
    for _ in range(8):
        call(program, x)
    assert double.runs == 8
    monkeypatch.setenv("PLAIT_REPLAY", "0")
    double = Double()
    program = Replayed(double, failing_if_called)
    for _ in range(8):
        call(program, x)
    assert double.runs == 8


def failing_if_called(program: Callable[[Env], None], env: Env) -> tuple[Callable[[], None], Env]:
    raise AssertionError("captured")


def test_addresses_that_keep_changing_are_given_up() -> None:
    double = Double()
    program = Replayed(double, fake)
    inputs = [torch.arange(4.0) + k for k in range(8)]
    for _ in range(8):
        for x in inputs:
            assert call(program, x)["out"].tolist() == (2 * x).tolist()
    assert program._is_off


# With autograd, on a CPU: replays read inputs by address and write to the memory of the first results -----


def _at(value: torch.Tensor) -> torch.Tensor:
    """A tensor of the same memory that does not hold it, as a captured graph does."""
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    count = value.element_size() * (last + 1)
    raw = (ctypes.c_char * count).from_address(value.data_ptr())
    return torch.frombuffer(raw, dtype=value.dtype).as_strided(value.shape, value.stride())


def by_address(program: Callable[[Env], None], env: Env) -> tuple[Callable[[], None], Env]:
    """A capture on a CPU: results are made now, and again from whatever lies at the inputs' addresses."""
    given = {
        name: value if value is None or value.is_meta or not value.dim() else _at(value)
        for name, value in env.items()
    }
    program(env)
    results = [(name, _at(value)) for name, value in env.items() if name not in given]

    def replay() -> None:
        REPLAYS.append(program)
        again = Env(given)
        program(again)
        for name, place in results:
            place.copy_(again[name])

    return replay, env


REPLAYS: list[object] = []


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of the CPU go the way of those of a GPU, into fresh memory."""
    monkeypatch.setenv("PLAIT_ASIDE", "0")  # steps that are tried in PyG replay nothing
    REPLAYS.clear()
    known: dict[object, Replayed] = {}

    def run(self: executor.Run, program: executor.Compiled, env: Env, part: slice | None) -> None:
        assert part is None
        if program not in known:
            known[program] = Replayed(program.run, by_address)
        known[program].run(env)

    monkeypatch.setattr(executor.Run, "_run", run)
    monkeypatch.setattr(Buffers, "take", lambda self, rows, cols, dtype: torch.empty(rows, cols, dtype=dtype))


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "gcn": lambda: GCNConv(16, 12),
    "sage": lambda: SAGEConv(16, 12),
    "max": lambda: SAGEConv(16, 12, aggr="max"),
    "gin": lambda: GINConv(
        torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 12))
    ),
    "tag": lambda: TAGConv(16, 12),
}
LOOPS = ("step", "held", "accumulated", "in place", "twice", "no backward", "kept graph", "no gradient of x")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", LAYERS)
def test_what_is_held_is_not_written_to_in_training(kind: str, loop: str) -> None:
    """Addresses that stay, so that programs are replayed, with results kept in all the usual ways."""
    torch.manual_seed(0)
    edge_index, given, grad = torch.randint(0, 60, (2, 400)), torch.randn(60, 16), torch.randn(60, 12)
    layer = LAYERS[kind]()
    twin, compiled = copy.deepcopy(layer), plait.compile(layer, forms=["csr"])
    seen: list[list[torch.Tensor]] = []
    for net in (twin, compiled):
        x, held, graphs = given.clone().requires_grad_(loop != "no gradient of x"), [], []
        for k in range(16):
            with torch.no_grad():
                x += 0.01
                grad *= -1
            if loop != "accumulated":
                net.zero_grad()
                x.grad = None
            out = net(x, edge_index)
            if loop == "in place":
                out = out.mul_(2)
            if loop == "held" or k > 12:
                held.append(out.detach())
            if loop == "no backward" and k % 2:
                continue
            if loop == "twice":
                out = out + net(x, edge_index)
            out.backward(grad, retain_graph=loop == "kept graph")
            if loop == "kept graph":
                graphs.append(out)
                out.backward(grad)
            held += [p.grad.clone() for p in (x, *net.parameters()) if p.grad is not None and k > 5]
        seen.append(held)
    for mine, other in zip(seen[1], seen[0], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4 * max(1.0, float(other.abs().max())))
    if loop == "step":
        assert len(REPLAYS) >= 9
        assert len(set(REPLAYS)) == 2, "forward and backward"
