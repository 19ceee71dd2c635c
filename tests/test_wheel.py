"""The wheel installs into a bare environment and runs there; dependencies come from this environment."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = [pytest.mark.slow, pytest.mark.processes]


def _run(*command, **settings):
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **settings)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built offline by the setuptools that is installed here."""
    pytest.importorskip("setuptools", minversion="69", reason="building the wheel needs setuptools >= 69")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    # a copy: building leaves build/ and egg-info behind
    tracked = _run("git", "ls-files", "src", "pyproject.toml", "README.md", "LICENSE", cwd=ROOT)
    if tracked.returncode:
        pytest.skip("not a git checkout: the files of the package are not known")
    for name in tracked.stdout.splitlines():
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    built = _run(
        sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index",
        "--wheel-dir", str(folder), str(source),
    )  # fmt: skip
    if "invalid command 'bdist_wheel'" in built.stderr:
        pytest.skip("building a wheel with this setuptools needs the package wheel, which is not installed")
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_what_is_read_at_run_time(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for needed in ("py.typed", "cost/profiles/", "report/page/page.css", "report/page/page.js"):
        assert any(name.startswith(f"plait/{needed}") for name in names), needed
    assert not any(name.startswith("tests") for name in names)


def test_the_wheel_runs_in_a_bare_environment(wheel, tmp_path):
    import torch

    made = _run(sys.executable, "-m", "venv", str(tmp_path / "bare"))
    if made.returncode:
        pytest.skip(f"no virtual environment can be made here: {made.stderr.strip()[-200:]}")
    python = tmp_path / "bare" / "bin" / "python"
    installed = _run(str(python), "-m", "pip", "install", "--no-deps", "--no-index", str(wheel))
    assert installed.returncode == 0, installed.stderr
    # no network is assumed: torch, PyG and numba are those of this environment, plait is the wheel's
    borrowed = {**os.environ, "PYTHONPATH": str(Path(torch.__file__).parents[1])}
    where = _run(str(python), "-c", "import plait; print(plait.__file__)", env=borrowed, cwd=tmp_path)
    if str(tmp_path) not in where.stdout:
        pytest.skip("plait is installed beside torch here and hides the wheel")
    explained = _run(
        str(tmp_path / "bare" / "bin" / "plait"), "explain", "--model", "gcn", "--widths", "8,8",
        "--data", "erdos:n=50,edges=200", env=borrowed, cwd=tmp_path,
    )  # fmt: skip
    assert explained.returncode == 0, explained.stderr
    assert "plan" in explained.stdout
