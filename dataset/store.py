"""Tokenised sources on disk: written once, mapped into memory ever after.

A source is a folder named by a hash of everything that decides its content: the files (path, size, time of change,
first and last bytes), the tokenizer with its template, and the options. In it:
    tokens.bin    the flat tokens, 16 or 32 bits each
    trained.bin   a byte for each token; absent where every token may be a target
    length.bin …  a column of the table of units each, see `dataset.units.UNIT`
    summary.json  the rest
The folder is written under another name and renamed when it is whole.
"""

import dataclasses
import hashlib
import io
import json
import os
import shutil
import socket
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from transformers import PreTrainedTokenizerBase

from dataset.readers import HUB_PREFIX, TextAs
from dataset.sources import BadRow, BadRows
from dataset.token_file import map_token_file
from dataset.units import UNIT, UnitBatch, UnitOptions, add_counts, mask_of

CACHE_FORMAT = 2  # raise it when the same input gives other tokens
SAMPLED_BYTES = 2**20


@dataclasses.dataclass
class TokenisedSource:
    """The units of one source.

    Attributes:
        path: as it was given.
        tokens: (N,) uint16 or uint32.
        trained: (N,) bool, whether a token may be a target.
        table: the columns of `UNIT` by name, each (U,). A start reads only those that it needs.
        bad_rows: account of the rows.
        skipped: conversations left out, by reason.
        shortened: conversations of which the last turns are kept.
        fingerprint: sha256 of tokens, mask and table.
    """

    path: str
    tokens: np.ndarray
    trained: np.ndarray
    table: dict[str, np.ndarray]
    bad_rows: BadRows
    skipped: dict[str, int]
    shortened: int
    fingerprint: str


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Changes when the tokenizer or its chat template does."""
    content = tokenizer.backend_tokenizer.to_str() + str(tokenizer.chat_template or "")
    return hashlib.sha256(content.encode()).hexdigest()


def cache_key(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, options: UnitOptions, split: bool, text_as: TextAs
) -> str:
    """The name of a source's folder: 32 hexadecimal digits."""
    # Documents are as long as they are: neither the window nor what is for conversations makes a difference to them.
    kept = {"kinds": options.kinds} if options.kinds == "document" else dataclasses.asdict(options)
    content = {
        "format": [CACHE_FORMAT, tokenizers.__version__],
        "files": [_file_identity(file) for file in files],
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "options": kept,
        "split": split,
        "text_as": text_as,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _file_identity(file: str) -> list[Any]:
    """What tells one state of a file from another, without reading all of it."""
    if file.startswith(HUB_PREFIX):
        return file_sample(file)
    return [os.path.realpath(file), os.stat(file).st_mtime_ns, *file_sample(file)]


def file_sample(file: str) -> list[Any]:
    """A file's size and a hash of its first and last bytes; of a hub data set, or a part of one, its revision."""
    if file.startswith(HUB_PREFIX):
        name = file.removeprefix(HUB_PREFIX).partition("#")[0].partition("@")[0]
        if Path(name).is_dir():
            raise ValueError(f"{file} is a folder; give it as a path, without {HUB_PREFIX}")
        from huggingface_hub import HfApi

        try:
            return [file, HfApi().dataset_info(name).sha]
        except Exception as error:  # the hub's library raises a dozen kinds of its own and the network's
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"{file} cannot be found on the hub: {reason}") from error
    size = os.path.getsize(file)
    with open(file, "rb") as opened:
        sample = hashlib.sha256(opened.read(SAMPLED_BYTES))
        opened.seek(max(size - SAMPLED_BYTES, 0))
        sample.update(opened.read(SAMPLED_BYTES))
    return [size, sample.hexdigest()]


class SourceWriter:
    """Takes batches of units, to memory or to a cache folder. Use it as a context: what is not finished vanishes.

    Args:
        folder: the cached source to be, or None for memory.
        dtype: of the tokens.
        keep_mask: False where every token may be a target.
        token_file: a file that holds the tokens already; batches then bring only their tables.
    """

    def __init__(self, folder: Path | None, dtype: np.dtype, keep_mask: bool, token_file: str | None = None):
        self.folder, self.dtype, self.keep_mask, self.token_file = folder, dtype, keep_mask, token_file
        self.num_tokens = self.num_units = self.shortened = 0
        self.skipped: dict[str, int] = {}
        self.digest = hashlib.sha256()
        self.temporary: Path | None = None

    def __enter__(self) -> "SourceWriter":
        names = [*UNIT.names] + ["tokens"] * (self.token_file is None) + ["trained"] * self.keep_mask
        if self.folder is None:
            self.files = {name: io.BytesIO() for name in names}
            return self
        try:
            remove_leftovers(self.folder)
            self.temporary = self.folder.with_name(f".{self.folder.name}.{socket.gethostname()}.{os.getpid()}")
            self.temporary.mkdir(parents=True, exist_ok=True)
            self.files = {name: open(self.temporary / f"{name}.bin", "wb") for name in names}
        except OSError as error:
            raise self._problem(error) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self.temporary is not None:
            for file in self.files.values():
                file.close()
            shutil.rmtree(self.temporary, ignore_errors=True)

    def add(self, batch: UnitBatch) -> None:
        """Append a batch.

        Raises:
            ValueError: the disk is full.
        """
        add_counts(self.skipped, batch.skipped)
        self.shortened += batch.shortened
        batch.table["start"] += self.num_tokens
        self.num_tokens += len(batch.tokens)
        self.num_units += len(batch.table)
        try:
            arrays = columns_of(batch.table) | {"tokens": batch.tokens}
            if self.keep_mask:
                arrays["trained"] = mask_of(batch)
            for name, file in self.files.items():
                content = np.ascontiguousarray(arrays[name]).view(np.uint8)
                file.write(content)
                self.digest.update(content)
        except OSError as error:
            raise self._problem(error) from error

    def finish(self, path: str, bad_rows: BadRows) -> TokenisedSource:
        """Everything that was added; in a cache folder, if there is one, and read back from it."""
        counts = (bad_rows, self.skipped, self.shortened, self.digest.hexdigest())
        if self.folder is None:
            memory = {name: file.getbuffer() for name, file in self.files.items()}
            tokens = map_token_file(self.token_file) if self.token_file else np.frombuffer(memory["tokens"], self.dtype)
            trained = np.frombuffer(memory["trained"], bool) if self.keep_mask else all_trained(len(tokens))
            table = {name: np.frombuffer(memory[name], UNIT[name]) for name in UNIT.names}
            return TokenisedSource(path, tokens, trained, table, *counts)
        summary = {
            "path": path,
            "dtype": self.dtype.name,
            "token_file": self.token_file,
            "tokens": self.num_tokens,
            "units": self.num_units,
            "mask": self.keep_mask,
            "rows_read": bad_rows.rows_read,
            "num_bad_rows": bad_rows.count,
            "bad_rows": [dataclasses.astuple(bad) for bad in bad_rows.first],
            "skipped": self.skipped,
            "shortened": self.shortened,
            "fingerprint": self.digest.hexdigest(),
        }
        try:
            for file in self.files.values():
                file.flush()
                os.fsync(file.fileno())
            (self.temporary / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
            if self.folder.exists():
                shutil.rmtree(self.folder)  # it was there and could not be loaded
            self.temporary.rename(self.folder)
        except OSError as error:
            if (found := load_cached(path, self.folder, bad_rows.strict)) is None:
                raise self._problem(error) from error
            return found  # another run was faster
        return load_cached(path, self.folder, bad_rows.strict)

    def _problem(self, error: OSError) -> ValueError:
        folder = next(folder for folder in self.folder.parents if folder.exists())
        free = shutil.disk_usage(folder).free / 2**20
        return ValueError(
            f"{self.folder.parent}: tokenised data could not be written there ({error}); {free:,.0f} MiB are free; "
            "give another folder with --cache_dir"
        )


def remove_leftovers(folder: Path) -> None:
    """Delete what runs on this machine that were killed have left of the same source."""
    for leftover in folder.parent.glob(f".{folder.name}.{socket.gethostname()}.*"):
        try:
            os.kill(int(leftover.suffix[1:]), 0)
        except ProcessLookupError:
            shutil.rmtree(leftover, ignore_errors=True)
        except (ValueError, OSError):
            continue


def load_cached(path: str, folder: Path, strict: bool = False) -> TokenisedSource | None:
    """A tokenised source from its folder, or None where there is none or not all of it."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        if summary["token_file"]:
            tokens = map_token_file(summary["token_file"])
        else:
            tokens = _mapped(folder / "tokens.bin", np.dtype(summary["dtype"]), summary["tokens"])
        table = {name: _mapped(folder / f"{name}.bin", UNIT[name], summary["units"]) for name in UNIT.names}
        trained = all_trained(len(tokens))
        if summary["mask"]:
            trained = _mapped(folder / "trained.bin", np.dtype(bool), summary["tokens"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    bad_rows = BadRows(strict)
    bad_rows.rows_read, bad_rows.count = summary["rows_read"], summary["num_bad_rows"]
    bad_rows.first = [BadRow(*bad) for bad in summary["bad_rows"]]
    return TokenisedSource(
        path, tokens, trained, table, bad_rows, summary["skipped"], summary["shortened"], summary["fingerprint"]
    )


def columns_of(table: np.ndarray) -> dict[str, np.ndarray]:
    """The columns of a table of dtype `UNIT` by name."""
    return {name: table[name] for name in UNIT.names}


def all_trained(length: int) -> np.ndarray:
    """(length,) of True, in one byte of memory."""
    return np.broadcast_to(np.True_, length)


def _mapped(path: Path, dtype: np.dtype, length: int) -> np.ndarray:
    """A file of this many values as an array that the system reads page by page."""
    if path.stat().st_size != length * dtype.itemsize:
        raise ValueError(f"{path} has another size than its summary says")
    return np.memmap(path, dtype, "r") if length else np.empty(0, dtype)


class FlatArray:
    """Several one-dimensional arrays, read as if one lay behind the other. A slice must lie within one of them.

    Mapped files travel to other processes by their names.
    """

    def __init__(self, parts: Sequence[np.ndarray]):
        self.parts = [part for part in parts if len(part)]
        self.starts = np.cumsum([0, *[len(part) for part in self.parts]]).tolist()
        self.dtype = np.result_type(*(part.dtype for part in parts))

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, stretch: slice) -> np.ndarray:
        number = bisect_right(self.starts, stretch.start) - 1
        start = self.starts[number]
        return self.parts[number][stretch.start - start : stretch.stop - start]

    def __getstate__(self) -> dict[str, Any]:
        files = [
            (part.filename, part.dtype.str, part.offset, part.shape) if isinstance(part, np.memmap) else part
            for part in self.parts
        ]
        return {"parts": files, "starts": self.starts, "dtype": self.dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        parts = [
            np.memmap(part[0], part[1], "r", part[2], part[3]) if isinstance(part, tuple) else part
            for part in state["parts"]
        ]
        self.parts, self.starts, self.dtype = parts, state["starts"], state["dtype"]
