"""Rows out of files: jsonl by a reader of our own, json, csv, parquet and hub data sets through `datasets`, plain text.

Rows come as a stream, so a file is never held whole (a .txt file that is one document is the exception). A row that
cannot be used is named by file and line with its reason, counted, and fatal only when too many are.
"""

import dataclasses
import glob
import gzip
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

MAX_BAD_SHARE = 0.05
SHOWN_BAD_ROWS = 5
KEPT_BAD_ROWS = 1000
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt", ".jsonl.gz", ".txt.gz")
HUB_PREFIX = "hub:"

HELD_OUT_SHARE = 0.05
FEW_DOCUMENTS = 20
HELD_OUT_CHARACTERS = 0.1

Part = Literal["all", "train", "validation"]


class Row(NamedTuple):
    """One row and where it stands: the file, and the line (jsonl, counted from 1) or row number in it."""

    value: dict[str, Any]
    path: str
    line: int


@dataclasses.dataclass
class BadRow:
    """A row that cannot be used, and why."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


class Source(NamedTuple):
    """A path (file, folder, glob or hub name) and its weight in a mixture, None where none was given."""

    path: str
    weight: float | None


def parse_sources(paths: str | Path | Sequence[str | Path]) -> list[Source]:
    """Split `PATH:WEIGHT` arguments; a path that exists as it stands is taken whole.

    Raises:
        ValueError: no path, a weight that is not above 0, or weights on some of the paths only.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    sources = [_parse_source(str(path)) for path in paths]
    if not sources:
        raise ValueError("no data: give at least one file")
    without = [source.path for source in sources if source.weight is None]
    if without and len(without) < len(sources):
        raise ValueError(f"{without[0]} has no weight but others do; write PATH:WEIGHT for all of them or for none")
    return sources


def _parse_source(path: str) -> Source:
    match = re.fullmatch(r"(.+):([^:/\\]+)", path)
    if not match or Path(path).exists():
        return Source(path, None)
    try:
        weight = float(match[2])
    except ValueError:
        return Source(path, None)
    if not 0 < weight < float("inf"):
        raise ValueError(f"{path}: the weight {match[2]} must be a number above 0")
    return Source(match[1], weight)


class RowReader:
    """Iterates over the usable rows of files and keeps account of the others.

    Whoever uses the rows reports the ones that it cannot use with `reject`, and calls `check` at the end.

    Args:
        paths: files, folders (their data files, sorted), globs, or hub:owner/name[@split].
        strict: a bad row is an error at once.
        text_as: a .txt file is one document ("file"), or a document for each paragraph ("paragraph").
        say: prints a line; None for silence.

    Raises:
        ValueError: a file is missing, empty, or not what its name says.

    Attributes:
        rows_read: rows seen, good and bad.
        bad_rows: number of bad ones.
        bad: the first of them.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        strict: bool = False,
        text_as: Literal["file", "paragraph"] = "file",
        say: Callable[[str], None] | None = print,
    ):
        if text_as not in ("file", "paragraph"):
            raise ValueError(f"text_as={text_as!r} must be 'file' or 'paragraph'")
        self.paths = [path for source in parse_sources(paths) for path in expand_path(source.path)]
        self.strict, self.text_as, self.say = strict, text_as, say
        self.rows_read = self.bad_rows = 0
        self.bad: list[BadRow] = []

    def __iter__(self) -> Iterator[Row]:
        for path in self.paths:
            before = self.rows_read
            for line, value in self._read(path):
                self.rows_read += 1
                if isinstance(value, dict):
                    yield Row(value, path, line)
                else:
                    self.reject(Row({}, path, line), str(value))
            if self.rows_read == before:
                raise ValueError(f"{path} is empty: it has no rows")

    def _read(self, path: str) -> Iterator[tuple[int, dict[str, Any] | str]]:
        """(line, row) pairs; a string in a row's place says what is wrong with it."""
        name = path.removesuffix(".gz")
        if name.endswith(".jsonl"):
            return _read_jsonl(path)
        if name.endswith(".txt"):
            return _read_text(path, self.text_as)
        return _read_with_datasets(path)

    def reject(self, row: Row, reason: str) -> None:
        """Count a row as bad.

        Raises:
            ValueError: at once, under `strict`.
        """
        bad = BadRow(row.path, row.line, reason)
        self.bad_rows += 1
        if self.strict:
            raise ValueError(f"{bad} (strict: no bad row is accepted)")
        if len(self.bad) < KEPT_BAD_ROWS:
            self.bad.append(bad)

    def check(self) -> None:
        """Call after the last row: prints the first bad rows.

        Raises:
            ValueError: more than 5 % of the rows are bad, or all.
        """
        if not self.bad_rows:
            return
        listed = "".join(f"\n  {bad}" for bad in self.bad[:SHOWN_BAD_ROWS])
        more = self.bad_rows - SHOWN_BAD_ROWS
        listed += f"\n  and {more:,} more" if more > 0 else ""
        share = self.bad_rows / self.rows_read
        counts = f"{self.bad_rows:,} of {self.rows_read:,} rows cannot be used ({share:.1%})"
        if share > MAX_BAD_SHARE:
            raise ValueError(f"{counts}; up to {MAX_BAD_SHARE:.0%} would be left out. Mend or remove them:{listed}")
        if self.say:
            self.say(f"{counts} and are left out:{listed}")


def read_rows(
    paths: str | Path | Sequence[str | Path],
    strict: bool = False,
    text_as: Literal["file", "paragraph"] = "file",
    say: Callable[[str], None] | None = print,
) -> RowReader:
    """A `RowReader` over the files: iterate, `reject` what cannot be used, `check` at the end."""
    return RowReader(paths, strict, text_as, say)


def expand_path(path: str) -> list[str]:
    """The data files that a path, a folder, a glob or a hub name stands for.

    Raises:
        ValueError: nothing is there, or nothing of a known kind.
    """
    if path.startswith(HUB_PREFIX):
        return [path]
    known = ", ".join(SUFFIXES)
    if Path(path).is_dir():
        found = sorted(str(file) for file in Path(path).iterdir() if file.name.endswith(SUFFIXES))
        if not found:
            raise ValueError(f"{path} is a folder without a data file ({known})")
        return found
    if not Path(path).exists() and glob.has_magic(path):
        found = sorted(file for file in glob.glob(path) if file.endswith(SUFFIXES))
        if not found:
            raise ValueError(f"no data file matches {path} ({known})")
        return found
    if not Path(path).exists():
        raise ValueError(f"{path} does not exist; give a file ({known}), a folder, a glob, or {HUB_PREFIX}OWNER/NAME")
    if not path.endswith(SUFFIXES):
        raise ValueError(f"{path} is of an unknown kind; known are {known}")
    return [path]


def _open_bytes(path: str) -> Any:
    return gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")


def _read_jsonl(path: str) -> Iterator[tuple[int, dict[str, Any] | str]]:
    # Read as bytes: one undecodable line is then one bad row, and only "\n" ends a line.
    try:
        with _open_bytes(path) as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    yield number, _parse_line(line.rstrip())
    except (OSError, EOFError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _parse_line(line: bytes) -> dict[str, Any] | str:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"not valid UTF-8 (byte 0x{line[error.start]:02x} at column {error.start + 1})"
    except json.JSONDecodeError as error:
        return f"not valid JSON ({error.msg} at column {error.pos + 1})"
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, thousands of brackets
        return f"not readable JSON ({str(error)[:60]})"
    return value if isinstance(value, dict) else f"not a JSON object but {type(value).__name__}"


def _read_text(path: str, text_as: str) -> Iterator[tuple[int, dict[str, Any] | str]]:
    try:
        with _open_bytes(path) as file:
            text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid UTF-8 (byte {error.start})") from error
    except (OSError, EOFError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if text_as == "file":
        if text.strip():
            yield 1, {"text": text}
        return
    line = 1
    for part in re.split(r"((?:\r?\n[^\S\n]*){2,})", text):
        if part.strip():
            yield line, {"text": part}
        line += part.count("\n")


def _read_with_datasets(path: str) -> Iterator[tuple[int, dict[str, Any] | str]]:
    # Imported here: it takes a second, and jsonl and text do without.
    from datasets import load_dataset

    try:
        if path.startswith(HUB_PREFIX):
            name, _, split = path.removeprefix(HUB_PREFIX).partition("@")
            rows = load_dataset(name, split=split or "train", streaming=True)
        else:
            # Streaming: no copy in a cache folder.
            rows = load_dataset(Path(path).suffix[1:], data_files=path, split="train", streaming=True)
        for number, row in enumerate(rows, start=1):
            # Formats with columns fill absent keys with None.
            yield number, {key: value for key, value in row.items() if value is not None}
    except Exception as error:  # `datasets` raises a dozen kinds of its own, pyarrow's and the network's
        if isinstance(error, StopIteration) or Path(path).is_file() and Path(path).stat().st_size == 0:
            raise ValueError(f"{path} is empty: it has no rows") from error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path} cannot be read: {reason}") from error


def split_held_out(rows: Iterable[Row], part: Part) -> Iterator[Row]:
    """The training or the validation part of rows that come without a validation file.

    Each row is placed by the hash of its content, so that appending or reordering rows moves none of them, and equal
    rows land on the same side. With fewer than 20 rows the last 10 % are held out instead: of the characters where
    rows are plain text, one row being cut in two, else of the rows.

    Args:
        rows: the whole stream.
        part: "train", "validation" (5 % of the rows by hash), or "all".
    """
    if part not in ("all", "train", "validation"):
        raise ValueError(f"part={part!r} must be 'all', 'train' or 'validation'")
    if part == "all":
        yield from rows
        return
    stream = iter(rows)
    first = list(itertools.islice(stream, FEW_DOCUMENTS))
    if len(first) < FEW_DOCUMENTS:
        yield from _split_few(first, part)
        return
    for row in itertools.chain(first, stream):
        if is_held_out(row.value) == (part == "validation"):
            yield row


def is_held_out(value: dict[str, Any], share: float = HELD_OUT_SHARE) -> bool:
    """Whether a row belongs to the validation part: the first 64 bits of the hash of its content lie below `share`."""
    content = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8]) < share * 2**64


def _split_few(rows: list[Row], part: Part) -> list[Row]:
    if not all(isinstance(row.value.get("text"), str) for row in rows):
        keep = len(rows) - max(1, round(len(rows) * HELD_OUT_CHARACTERS)) if len(rows) > 1 else len(rows)
        return rows[:keep] if part == "train" else rows[keep:]
    left = int(sum(len(row.value["text"]) for row in rows) * (1 - HELD_OUT_CHARACTERS))
    result = []
    for row in rows:
        text = row.value["text"]
        piece = text[: max(left, 0)] if part == "train" else text[max(left, 0) :]
        left -= len(text)
        if piece.strip():
            result.append(row._replace(value={**row.value, "text": piece}))
    return result
