"""Checkpoints: one verified, atomically written `.pth` that holds tensors and plain dicts only.

A write goes to a temporary name, is flushed to the disk, and is renamed; so a file with a final name is whole unless
the disk damaged it. The zip format carries a CRC of each tensor, which is checked before loading, since torch.load by
itself returns wrong weights after one flipped bit.
"""

import contextlib
import os
import pickle
import random
import re
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

STEP_FILE = re.compile(r"step-(\d{8})\.pth")
BEST_FILE = "best.pth"


def capture_rng(device: torch.device) -> dict[str, Any]:
    """State of every random generator that training draws from, as tensors and plain lists."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore_rng(state: dict[str, Any], device: torch.device) -> None:
    """Undo `capture_rng`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def save_atomically(content: Any, path: Path) -> None:
    """Write a `.pth` by way of `replacing`.

    Raises:
        ValueError: the disk is full; whatever was at `path` is untouched.
    """
    with replacing(path) as temporary, open(temporary, "wb") as file:
        torch.save(content, file)  # by way of a file: a failed write then says why


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name for a file or folder, which takes the place of `path` when the block ends without an error.

    So `path` is either the old one or the whole new one, whenever the process dies.

    Raises:
        ValueError: it could not be written, as on a full disk; whatever was at `path` is untouched.
    """
    temporary, replaced = (path.with_name(f".{path.name}.{state}") for state in ("writing", "replaced"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(temporary)
        yield temporary
        for written in [temporary, *temporary.rglob("*")]:
            sync(written)
        if path.is_dir():
            _remove(replaced)
            path.rename(replaced)
        os.replace(temporary, path)
        sync(path.parent)
        _remove(replaced)
    except (OSError, RuntimeError, SafetensorError) as error:
        reason: BaseException = error
        while reason.__context__ is not None and not isinstance(reason, OSError):
            reason = reason.__context__  # torch answers a failed write with an error of its own
        if not isinstance(reason, OSError | SafetensorError):
            raise
        free = shutil.disk_usage(next(folder for folder in path.parents if folder.exists())).free
        raise ValueError(f"{path}: could not be written ({reason}); {free / 2**20:.0f} MiB are free there") from error
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Make what was written to a file, or renamed in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_verified(path: Path) -> Any:
    """Load a `.pth` after checking the CRC of everything in it; tensors and plain containers only.

    Raises:
        ValueError: missing, truncated, damaged, or holding anything but tensors and plain containers.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError) as error:
        raise ValueError(f"{path}: not a whole checkpoint file ({error})") from error
    if damaged is not None:
        raise ValueError(f"{path}: damaged, the checksum of {damaged} does not match")
    try:
        # Mapped, not read: eight ranks that load one file share its memory. Whoever trains on must copy.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path}: holds more than tensors and plain values, so it is not loaded") from error
    except (RuntimeError, KeyError, EOFError, AttributeError, TypeError) as error:
        raise ValueError(f"{path}: not a checkpoint that torch can read ({error})") from error


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same nested containers with `change(tensor)` for every tensor; tensors that share their memory once only."""
    changed: dict[tuple[Any, ...], Any] = {}

    def visit(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            # A tied head and embedding are two objects with one memory: they must stay one in a file.
            here = item.to_local() if hasattr(item, "to_local") else item  # a share of a tensor has no memory itself
            if not here.numel():  # as on a rank that holds none of a tensor of few rows: all such have one address, 0
                return change(item)
            place = (here.data_ptr(), item.dtype, tuple(item.shape), item.stride())
            if place not in changed:
                changed[place] = change(item)
            return changed[place]
        if isinstance(item, dict):
            return {key: visit(part) for key, part in item.items()}
        if isinstance(item, list | tuple):
            return [visit(part) for part in item]
        return item

    return visit(value)


def size_in_bytes(value: Any) -> int:
    """Bytes of all tensors in nested containers; memory that is shared counts once."""
    sizes: list[int] = []
    map_tensors(value, lambda tensor: sizes.append(tensor.nbytes))
    return sum(sizes)


class BackgroundWriter:
    """Work in threads, one piece after the other. What goes wrong there is raised by the next call here."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin `work` as soon as what was begun before has ended well."""
        self.check()
        previous = self.thread

        def in_turn() -> None:
            if previous is not None:
                previous.join()
            if self.error is not None:
                return
            try:
                work()
            except BaseException as error:
                self.error = error

        # A daemon: a run that must leave at once does not wait for a file whose final name nobody has seen yet.
        self.thread = threading.Thread(target=in_turn, name="checkpoint writer", daemon=True)
        self.thread.start()

    def check(self) -> None:
        """Raise what the work raised, if it did."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def wait(self) -> None:
        """Until all work is done; raise what it raised."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self.check()


class CheckpointFolder:
    """The checkpoints of one run: `step-00001000.pth` files, the newest `keep_last` of them kept, and `best.pth`.

    Files are written in the background. `best.pth` is another name of the checkpoint with the lowest validation loss
    (a hard link, so it costs no room as long as that is one of the newest).
    """

    def __init__(self, folder: Path, keep_last: int = 2):
        self.folder = folder
        self.keep_last = keep_last
        self.writer = BackgroundWriter()

    def steps(self) -> list[Path]:
        """Checkpoint files, newest first."""
        if not self.folder.is_dir():
            return []
        return sorted((path for path in self.folder.iterdir() if STEP_FILE.fullmatch(path.name)), reverse=True)

    def path_of(self, step: int) -> Path:
        """The checkpoint file of a step."""
        return self.folder / f"step-{step:08d}.pth"

    def save(self, state: dict[str, Any], step: int) -> None:
        """Write the checkpoint of a step in the background, then delete those that are no longer needed.

        The state must not change afterwards: give a copy of what training goes on with.

        Raises:
            ValueError: there is no room for it, or the write before this one failed.
        """
        self.writer.wait()
        self.check_room(size_in_bytes(state))
        self.writer.start(lambda: self._write(state, step))

    def _write(self, state: dict[str, Any], step: int) -> None:
        save_atomically(state, self.path_of(step))
        for old in self.steps()[self.keep_last :]:
            old.unlink()

    def mark_best(self, step: int) -> None:
        """Let `best.pth` be the checkpoint of this step, as soon as that is written."""
        self.writer.start(lambda: self._link_best(step))

    def _link_best(self, step: int) -> None:
        temporary = self.folder / f".{BEST_FILE}.writing"
        temporary.unlink(missing_ok=True)
        try:
            os.link(self.path_of(step), temporary)
        except OSError:  # a file system without hard links
            self.check_room(self.path_of(step).stat().st_size)
            shutil.copyfile(self.path_of(step), temporary)
        os.replace(temporary, self.folder / BEST_FILE)
        sync(self.folder)

    def check_room(self, needed_bytes: int, what: str = "the next checkpoint") -> None:
        """Raise ValueError unless the disk has room for so much."""
        existing = next(folder for folder in (self.folder, *self.folder.parents) if folder.exists())
        free = shutil.disk_usage(existing).free
        # Names, sizes and settings come on top of the tensors.
        if free < needed_bytes * 1.01 + 2**20:
            raise ValueError(
                f"{self.folder}: no room for {what}: {needed_bytes / 2**20:,.1f} MiB are needed and "
                f"{free / 2**20:,.1f} MiB are free; make room, or give another disk with --checkpoint_dir"
            )

    def remove_leftovers(self) -> None:
        """Delete what a run that was killed in the middle of a write has left."""
        for leftover in self.folder.glob(".*.writing"):
            leftover.unlink(missing_ok=True)

    def find_newest(
        self, check: Callable[[dict[str, Any]], str | None] = lambda state: None
    ) -> tuple[Path, list[str]] | None:
        """The newest checkpoint that verifies, and why newer ones were passed over; None without any file.

        Args:
            check: says what is wrong with the content, or None.

        Raises:
            ValueError: there are checkpoints, and none of them can be used.
        """
        passed_over: list[str] = []
        for path in self.steps():
            try:
                state = load_verified(path)
                if problem := check(state):
                    raise ValueError(f"{path}: {problem}")
                return path, passed_over
            except ValueError as error:
                passed_over.append(str(error))
        if passed_over:
            raise ValueError("no usable checkpoint: " + "; ".join(passed_over) + "; start fresh with --from_resume 0")
        return None
