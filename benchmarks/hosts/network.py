"""Hosts as network namespaces behind one switch, every link limited by `tc tbf`; gone afterwards.

A host has its own network, its own shared memory and its own process numbers, so that killing its first
process ends all of it. The kernel ends hosts whose test bed was killed; the names such a test bed leaves
behind are removed by the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

__all__ = ["Hosts", "HostsError", "burst_bytes", "clean", "requirements"]

_PREFIX = "plaitbed"
_SWITCH = "switch"
_NET = "10.77.0"
INTERFACE = "eth0"
_QUEUE = "50ms"  # the longest a packet waits in a full queue
_BURSTS_PER_SECOND = 1000
_LEAST_BURST = 128_000  # two of the 64 KB packets that a veth passes on in one piece
_PR_SET_PDEATHSIG = 1


class HostsError(Exception):
    """What keeps the test bed from being made, and the next step."""


def requirements() -> None:
    """HostsError where a test bed cannot be made here."""
    if os.name != "posix" or not Path("/proc/self/ns/net").exists():
        raise HostsError("network namespaces are Linux's; run the bed on Linux")
    if os.geteuid() != 0:
        raise HostsError(
            "making network namespaces needs root; run the bed as root, in a container or with sudo"
        )
    missing = [name for name in ("ip", "tc", "unshare", "taskset", "mount") if shutil.which(name) is None]
    if missing:
        raise HostsError(
            f"{', '.join(missing)} not found; install iproute2 (ip, tc) and util-linux (unshare, taskset)"
        )


def burst_bytes(rate: str) -> int:
    """The bucket of a tbf of this rate, such as "1gbit": what passes in a millisecond, or two packets."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if found is None:
        raise HostsError(f"rate={rate!r} is not understood; write it as 200mbit, 1gbit, 10gbit or unlimited")
    bits = float(found[1]) * {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}[found[2]]
    return max(_LEAST_BURST, round(bits / 8 / _BURSTS_PER_SECOND))


class Hosts:
    """`count` hosts, joined while the `with` block runs; host i has `address(i)` and core i mod cores.

    Both directions of every link pass a token bucket of `rate` ("unlimited": none).
    """

    def __init__(self, count: int, rate: str) -> None:
        if count < 1:
            raise HostsError(f"count={count}: a bed has at least one host")
        self.count, self.rate = count, rate
        self._burst = None if rate == "unlimited" else burst_bytes(rate)
        self._mark = f"{_PREFIX}-{os.getpid()}"
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Hosts:
        requirements()
        clean()
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def address(self, host: int) -> str:
        """The IPv4 address of a host."""
        return f"{_NET}.{host + 1}"

    def start(
        self, host: int, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Starts a command on a host; what it starts in turn ends with it."""
        core = host % (os.cpu_count() or 1)
        inside = ["sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh", *command]
        apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "taskset", "-c", str(core), *inside]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._name(host), *apart],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=_die_with_parent(),
        )
        self._running.append(process)
        return process

    def cut(self, host: int) -> None:
        """Takes a host off the network without a word: nothing is closed, nothing arrives any more."""
        _run("ip", "-n", self._name(_SWITCH), "link", "set", f"port{host}", "down")

    def stop(self) -> None:
        """Kills whatever runs on the hosts."""
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self._running:
            process.wait()
        self._running.clear()

    def close(self) -> None:
        """Kills whatever runs on the hosts and removes them."""
        with _uninterrupted():
            self.stop()
            _remove(name for name in _namespaces() if name.startswith(self._mark + "-"))

    def _name(self, host: int | str) -> str:
        return f"{self._mark}-{host}"

    def _make(self) -> None:
        switch = self._name(_SWITCH)
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "name", "bridge0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge0", "up")
        for host in range(self.count):
            name, port = self._name(host), f"port{host}"
            _run("ip", "netns", "add", name)
            peer = ["peer", "name", port, "netns", switch]
            _run("ip", "link", "add", "name", INTERFACE, "netns", name, "type", "veth", *peer)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge0", "up")
            _run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            self._limit(name, INTERFACE)
            self._limit(switch, port)

    def _limit(self, namespace: str, interface: str) -> None:
        if self._burst is not None:
            bucket = ["tbf", "rate", self.rate, "burst", str(self._burst), "latency", _QUEUE]
            _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *bucket)


def clean() -> list[str]:
    """Removes the namespaces of beds that are gone; their names."""
    gone = [name for name in _namespaces() if (owner := _owner(name)) is not None and not _is_alive(owner)]
    _remove(gone)
    return gone


def _owner(name: str) -> int | None:
    found = re.fullmatch(rf"{_PREFIX}-(\d+)-\w+", name)
    return None if found is None else int(found[1])


def _is_alive(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    return [line.split()[0] for line in listed.splitlines() if line.strip()]


def _remove(names: Iterator[str] | Sequence[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostsError(
            f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}; the kernel needs veth, "
            "bridge and sch_tbf, and the process CAP_NET_ADMIN"
        )


def _die_with_parent() -> Callable[[], None]:
    """What a child does before it starts: asks to be killed when this process ends, however it ends."""
    libc = ctypes.CDLL(None, use_errno=True)  # loaded here: a forked child should not

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return ask


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Holds Ctrl-C and SIGTERM back until the block is done."""
    held = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
