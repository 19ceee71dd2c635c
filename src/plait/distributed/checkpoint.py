"""Checkpoints of training over ranks, by torch.distributed.checkpoint: complete or absent.

All ranks write into a folder with a name of its own; when everything in it is on disk, rank 0 lists every
file with its checksum and renames the folder. A folder with the final name is complete, whenever a process is
killed. On several machines the folder has to be shared.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from plait.distributed.files import checksum
from plait.errors import CheckpointError, InputError

__all__ = ["Checkpoints", "Position"]

LISTING = "plait.json"
FORMAT = "plait-checkpoint-1"
_NAME = re.compile(r"step-(\d{10})")


@dataclass(frozen=True)
class Position:
    """Where training stands: this many batches of this epoch are done, and this many steps of all epochs.

    `loss` is this rank's sum over the epoch's batches so far, for reporting their mean.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    loss: float = 0.0


class Checkpoints:
    """The state of a model and its optimizer, kept in `folder` every this many steps or minutes.

    Every rank makes one with the same arguments and calls `after_step` after each of its steps; `resume`
    loads the newest checkpoint that is whole, on all ranks the same. The last `keep` are left there. The
    state of each rank's random numbers is kept too, so that dropout continues as it would have.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        keep: int = 2,
        group: Any = None,
    ) -> None:
        if every_steps is not None and every_steps < 1:
            raise InputError(f"every_steps={every_steps}: give a whole number of at least 1, or leave it out")
        if every_minutes is not None and not every_minutes > 0:
            raise InputError(f"every_minutes={every_minutes}: give a positive number, or leave it out")
        if keep < 1:
            raise InputError(f"keep={keep}: at least one checkpoint stays")
        self.folder, self.keep = Path(folder), keep
        self.every_steps, self.every_minutes = every_steps, every_minutes
        # torch's functions keep names of the model's own state, whatever wraps it
        self._model, self._optimizer, self._group = model, optimizer, group
        is_spread = dist.is_initialized() and dist.get_world_size(group) > 1
        self.rank, self.size = (dist.get_rank(group), dist.get_world_size(group)) if is_spread else (0, 1)
        self._saved = time.monotonic()

    # Saving -----------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Whether this rank would save now; for minutes `after_step` goes by rank 0's clock."""
        by_steps = self.every_steps is not None and step % self.every_steps == 0
        by_clock = (
            self.every_minutes is not None and time.monotonic() - self._saved >= 60 * self.every_minutes
        )
        return by_steps or by_clock

    def after_step(self, position: Position) -> bool:
        """Saves if it is due and returns whether it did. All ranks call it after the same steps."""
        is_due = self.is_due(position.step)
        if self.every_minutes is not None and self.size > 1:
            flag = torch.tensor([int(is_due)])
            dist.broadcast(flag, 0, group=self._group)
            is_due = bool(flag)
        if is_due:
            self.save(position)
        return is_due

    def save(self, position: Position) -> Path:
        """Writes a checkpoint and returns its folder; CheckpointError on all ranks where one could not."""
        final = self.folder / f"step-{position.step:010d}"
        partial = self.folder / f".{final.name}.partial"
        self._all(lambda: self._prepare(partial) if self.rank == 0 else None, f"prepare {partial}")
        try:
            self._all(lambda: self._write(partial, position), f"write {final}", is_collective=True)
            self._all(lambda: self._finish(partial, final) if self.rank == 0 else None, f"finish {final}")
        except CheckpointError:
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        self._saved = time.monotonic()
        return final

    def _prepare(self, partial: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(".step-*.partial"):
            shutil.rmtree(left, ignore_errors=True)  # of a run that was killed
        partial.mkdir()

    def _write(self, partial: Path, position: Position) -> None:
        numbers = torch.tensor([*astuple(position)], dtype=torch.float64)
        state = {**self._state(), f"position.{self.rank}": numbers}
        with _without_warning(self.size):
            save(
                state, checkpoint_id=str(partial), process_group=self._group, no_dist=self.size == 1
            )  # fmt: skip

    def _finish(self, partial: Path, final: Path) -> None:
        """Writes the listing, renames the folder, then removes older checkpoints."""
        files = {path.name: [path.stat().st_size, checksum(path)] for path in sorted(partial.iterdir())}
        with open(partial / LISTING, "w", encoding="utf-8") as listing:
            json.dump({"format": FORMAT, "ranks": self.size, "files": files}, listing)
            listing.flush()
            os.fsync(listing.fileno())
        if final.exists():
            shutil.rmtree(final)  # of the same step, before a restart
        os.replace(partial, final)
        _flush(self.folder)
        for old in self._kept()[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)

    def _kept(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer, f"random.{self.rank}": torch.get_rng_state()}

    # Loading ----------------------------------------------------------------------------------

    def resume(self) -> Position | None:
        """Loads the newest checkpoint that is whole; None where there is none.

        Damaged ones are skipped. The number of ranks has to be the one it was written by.
        """
        chosen: list[str] = []
        self._all(lambda: chosen.extend(self._newest()) if self.rank == 0 else None, f"read {self.folder}")
        name = self._from_rank_0(chosen[0] if chosen else "")
        if not name:
            return None
        position = torch.zeros(4, dtype=torch.float64)
        state = {**self._state(), f"position.{self.rank}": position}
        place = self.folder / name
        with _without_warning(self.size):
            self._all(
                lambda: load(
                    state, checkpoint_id=str(place), process_group=self._group, no_dist=self.size == 1
                ),
                f"load {place}",
                is_collective=True,
            )
        set_state_dict(
            self._model, self._optimizer, model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )  # fmt: skip
        torch.set_rng_state(state[f"random.{self.rank}"])
        epoch, batch, step, loss = position.tolist()
        return Position(int(epoch), int(batch), int(step), loss)

    def _newest(self) -> list[str]:
        for place in reversed(self._kept()):
            ranks = _whole(place)
            if ranks is None:
                continue
            if ranks != self.size:
                raise InputError(
                    f"{place} was written by {ranks} ranks and this is a run of {self.size}; start as many, "
                    "or choose another folder"
                )
            return [place.name]
        return []

    # All ranks --------------------------------------------------------------------------------

    def _all(self, work: Callable[[], Any], what: str, is_collective: bool = False) -> None:
        """Does the work on every rank; CheckpointError on all of them, naming who failed and why.

        A collective of torch reports failures on all ranks itself.
        """
        said = ""
        try:
            work()
        except CheckpointException as error:
            reasons = [f"rank {rank}: {_reason(failure[0])}" for rank, failure in error.failures.items()]
            raise CheckpointError(_message(what, reasons)) from error
        except (OSError, InputError, RuntimeError, ValueError) as error:
            said = _reason(error)
            if is_collective:
                raise CheckpointError(_message(what, [f"rank {self.rank}: {said}"])) from error
        if is_collective or self.size == 1:
            if said:
                raise CheckpointError(_message(what, [f"rank {self.rank}: {said}"]))
            return
        failure = self._from_rank_0(said)  # only rank 0 does work that is not collective
        if failure:
            raise CheckpointError(_message(what, [f"rank 0: {failure}"]))

    def _from_rank_0(self, text: str) -> str:
        """Rank 0's text, on every rank."""
        if self.size == 1:
            return text
        own = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8).clone()
        length = torch.tensor([own.numel()])
        dist.broadcast(length, 0, group=self._group)
        received = own if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(received, 0, group=self._group)
        return bytes(received.tolist()).decode().strip()


@contextlib.contextmanager
def _without_warning(size: int) -> Iterator[None]:
    """Suppresses torch's warning about running in a single process."""
    with warnings.catch_warnings():
        if size == 1:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _message(what: str, reasons: Sequence[str]) -> str:
    return (
        f"cannot {what} ({'; '.join(reasons)}); earlier checkpoints are as they were: make room or choose "
        "another folder, and start again"
    )


def _reason(error: BaseException) -> str:
    return (
        f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no text'}"
    )


def _whole(place: Path) -> int | None:
    """How many ranks wrote it, if every file matches the listing; None otherwise."""
    try:
        content = json.loads((place / LISTING).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            return None
        for name, (size, digest) in content["files"].items():
            path = place / name
            if path.stat().st_size != size or checksum(path) != digest:
                return None
        return int(content["ranks"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _flush(folder: Path) -> None:
    """Flushes a folder's directory entries to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
