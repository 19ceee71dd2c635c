"""Machine code of kernels, compiled once per machine and kept on disk.

numba's own cache does not recognise functions that are built from pieces (each process would compile them
again), so the finished object code is stored here instead: plain bytes under the user's cache folder, named
by a digest of the operation's sources, the versions and the processor. A changed source is another name.

What is loaded is run, so it comes only from files that nobody else can have written (kernels/trusted.py);
where others can, kernels are compiled in memory.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plait.errors import PlaitError
from plait.kernels.trusted import distrust, read_trusted

__all__ = ["address_of", "cache_folder", "kernel_folder", "stored"]

_SYMBOL = "plait_kernel"
# sources that all machine code is made from; the other files only pass arguments
_SHARED = ("arguments.py", "compiled.py", "vector.py")
_NOT_COMPILED = ("__init__.py", "reference.py", "gpu.py")
_SEAL_BYTES = 16  # a digest of the code stands before it
_engines: list[Any] = []  # an engine owns the code it loaded: kept for the life of the process


def cache_folder() -> Path:
    """Where compiled kernels and the machine profile live: $PLAIT_CACHE or the user's cache folder."""
    chosen = os.environ.get("PLAIT_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "plait"


def kernel_folder() -> Path:
    """Where compiled kernels are kept."""
    return cache_folder() / "kernels"


def address_of(name: str, build: Callable[[], Any], uses: tuple[str, ...] = ()) -> int:
    """The address of the kernel called `name`, from disk or compiled by `build` (a numba cfunc).

    The digest covers the code generation that all operations share, that of the operation of `build` and of
    those it `uses`: these are all its sources import from. What `build` is called with is part of the name.
    """
    folder = build.__module__.removeprefix(f"{__package__}.").partition(".")[0]
    path = kernel_folder() / f"{name}-{_digest((folder, *uses))}.o"
    code = _read(path)
    if code is None:
        code = _object_code(build())
        _write(path, code)
    return _load(code)


def stored(name: str, build: Callable[..., Any], uses: tuple[str, ...] = ()) -> Callable[..., int]:
    """`build` as a function of the same arguments, by position: the address of the kernel it makes."""

    @functools.cache
    def address(*given: object) -> int:
        def built() -> Any:
            return build(*given)

        built.__module__ = build.__module__
        return address_of("-".join([name, *map(str, given)]), built, uses)

    return address


def _seal(code: bytes) -> bytes:
    return hashlib.blake2b(code, digest_size=_SEAL_BYTES).digest()


def _read(path: Path) -> bytes | None:
    """The code in a file; None where it is absent, not trusted or damaged: LLVM's loader crashes on that."""
    try:
        content = read_trusted(path)
    except OSError:
        return None
    seal, code = content[:_SEAL_BYTES], content[_SEAL_BYTES:]
    return code if code and seal == _seal(code) else None


@functools.cache
def _digest(operations: tuple[str, ...]) -> str:
    import llvmlite
    import numba
    from llvmlite import binding

    digest = hashlib.blake2b(digest_size=8)
    shared = Path(__file__).parent
    sources = [shared / name for name in _SHARED]
    for operation in operations:
        found = sorted((shared / operation).glob("*.py"))
        sources += [path for path in found if path.name not in _NOT_COMPILED]
    for source in sources:
        digest.update(source.read_bytes())
    machine = (numba.__version__, llvmlite.__version__, binding.get_host_cpu_name(), _features())
    digest.update(repr(machine).encode())
    return digest.hexdigest()


@functools.cache
def _features() -> str:
    from llvmlite import binding

    return str(binding.get_host_cpu_features().flatten())


def _target_machine() -> Any:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple()
    # sections that nothing keeps together may lie more than 2 GiB apart, out of a small model's reach
    model = "small" if _has_manager() else "large"
    return target.create_target_machine(
        cpu=binding.get_host_cpu_name(), features=_features(), opt=3, reloc="pic", codemodel=model, jit=True
    )


@functools.cache
def _has_manager() -> bool:
    """Whether llvmlite brings a memory manager that lays a kernel's code and constants side by side.

    LLVM's own maps each section where there is room. On an Intel host with much memory mapped (CUDA) the
    constants of a kernel came to lie beyond 32-bit offsets of its code, and the loader aborted the process.
    """
    from llvmlite import binding

    return "use_lmm" in inspect.signature(binding.create_mcjit_compiler).parameters


def _object_code(function: Any) -> bytes:
    """Object code of a numba cfunc, with its entry point renamed to one fixed symbol."""
    from llvmlite import binding

    text = function.inspect_llvm().replace(function.native_name, _SYMBOL)
    module = binding.parse_assembly(text)
    return bytes(_target_machine().emit_object(module))


def _load(code: bytes) -> int:
    from llvmlite import binding

    machine = _target_machine()
    manager = {"use_lmm": True} if _has_manager() else {}
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine, **manager)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = engine.get_function_address(_SYMBOL)
    if not address:
        raise PlaitError(f"the compiled kernel has no entry point {_SYMBOL}; please report this")
    _engines.append(engine)
    return int(address)


def _write(path: Path, code: bytes) -> None:
    """Write to a temporary file, then rename; a read-only or untrusted folder costs a compilation next time.

    The folder is made for this user alone, and so are temporary files.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if distrust(path.parent) is not None:
            return
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(_seal(code) + code)
        os.replace(file.name, path)
    except OSError:
        return
