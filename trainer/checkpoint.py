"""Checkpoints: one verified, atomically written `.pth` that holds tensors and plain dicts only.

A write goes to a temporary name, is flushed to the disk, and is renamed; so a file with a final name is whole unless
the disk damaged it. The zip format carries a CRC of each tensor, which is checked before loading, since torch.load by
itself returns wrong weights after one flipped bit.
"""

import os
import pickle
import random
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

STEP_FILE = re.compile(r"step-(\d{8})\.pth")


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
    """Write a `.pth` so that `path` is either the old file or the whole new one, whenever the process dies.

    Raises:
        ValueError: the disk is full; whatever was at `path` is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        free = shutil.disk_usage(path.parent).free
        raise ValueError(f"{path}: could not be written ({error}); {free / 2**20:.0f} MiB are free there") from error
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
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
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path}: holds more than tensors and plain values, so it is not loaded") from error
    except (RuntimeError, KeyError, EOFError, AttributeError, TypeError) as error:
        raise ValueError(f"{path}: not a checkpoint that torch can read ({error})") from error


class CheckpointFolder:
    """The checkpoints of one run: `step-00001000.pth` files, the newest `keep_last` of them kept."""

    def __init__(self, folder: Path, keep_last: int = 2):
        self.folder = folder
        self.keep_last = keep_last

    def steps(self) -> list[Path]:
        """Checkpoint files, newest first."""
        if not self.folder.is_dir():
            return []
        return sorted((path for path in self.folder.iterdir() if STEP_FILE.fullmatch(path.name)), reverse=True)

    def save(self, state: dict[str, Any], step: int) -> Path:
        """Write the checkpoint of a step, then delete those that are no longer needed."""
        path = self.folder / f"step-{step:08d}.pth"
        save_atomically(state, path)
        for old in self.steps()[self.keep_last :]:
            old.unlink()
        return path

    def load_newest(self) -> tuple[dict[str, Any], Path, list[str]] | None:
        """The newest checkpoint that verifies, its path, and why newer ones were passed over; None without any file.

        Raises:
            ValueError: there are checkpoints, and none of them can be read.
        """
        passed_over: list[str] = []
        for path in self.steps():
            try:
                state = load_verified(path)
                if not isinstance(state, dict) or "model" not in state or "step" not in state:
                    raise ValueError(f"{path}: not a checkpoint of this pipeline")
                return state, path, passed_over
            except ValueError as error:
                passed_over.append(str(error))
        if passed_over:
            raise ValueError("no usable checkpoint: " + "; ".join(passed_over) + "; start fresh with --from_resume 0")
        return None
