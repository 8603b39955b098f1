"""What `--data_path` says: files, folders, globs and hub names, their weights, their rows and what is wrong with these.

Rows come as a stream, so a file is never held whole (a .txt file that is one document is the exception). A row that
cannot be used is named by file and line with its reason, counted, and fatal only when too many are.
"""

import dataclasses
import glob
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dataset.formats import CONTENT_KEYS
from dataset.readers import HUB_PREFIX, SUFFIXES, Row, TextAs, hub_shards, parse_block, read_blocks

MAX_BAD_SHARE = 0.05
SHOWN_BAD_ROWS = 5
KEPT_BAD_ROWS = 1000

HELD_OUT_SHARE = 0.05
FEW_DOCUMENTS = 20
HELD_OUT_CHARACTERS = 0.1

Part = Literal["all", "train", "validation"]


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


class BadRows:
    """Account of the rows of a source: how many were seen, how many cannot be used, and why the first ones.

    Args:
        strict: a bad row is an error at once.

    Attributes:
        rows_read: rows seen, good and bad.
        count: number of bad ones.
        first: the first of them.
    """

    def __init__(self, strict: bool = False):
        self.strict = strict
        self.rows_read = self.count = 0
        self.first: list[BadRow] = []

    def reject(self, path: str, line: int, reason: str) -> None:
        """Count a row as bad.

        Raises:
            ValueError: at once, under `strict`.
        """
        bad = BadRow(path, line, reason)
        self.count += 1
        if self.strict:
            raise ValueError(f"{bad} (strict: no bad row is accepted)")
        if len(self.first) < KEPT_BAD_ROWS:
            self.first.append(bad)

    def check(self, say: Callable[[str], None] | None) -> None:
        """Call after the last row: says which rows are left out.

        Raises:
            ValueError: more than 5 % of the rows are bad, or any under `strict`.
        """
        if not self.count:
            return
        listed = "".join(f"\n  {bad}" for bad in self.first[:SHOWN_BAD_ROWS])
        more = self.count - SHOWN_BAD_ROWS
        listed += f"\n  and {more:,} more" if more > 0 else ""
        share = self.count / self.rows_read
        counts = f"{self.count:,} of {self.rows_read:,} rows cannot be used ({share:.1%})"
        if self.strict:
            raise ValueError(f"{counts}; strict: no bad row is accepted. Mend or remove them:{listed}")
        if share > MAX_BAD_SHARE:
            raise ValueError(f"{counts}; up to {MAX_BAD_SHARE:.0%} would be left out. Mend or remove them:{listed}")
        if say:
            say(f"{counts} and are left out:{listed}")


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
        bad_rows: account of the rows.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        strict: bool = False,
        text_as: TextAs = "file",
        say: Callable[[str], None] | None = print,
    ):
        if text_as not in ("file", "paragraph"):
            raise ValueError(f"text_as={text_as!r} must be 'file' or 'paragraph'")
        self.paths = [path for source in parse_sources(paths) for path in expand_path(source.path)]
        self.text_as, self.say = text_as, say
        self.bad_rows = BadRows(strict)

    def __iter__(self) -> Iterator[Row]:
        for path in self.paths:
            for block in read_blocks(path, self.text_as):
                for row in parse_block(block):
                    self.bad_rows.rows_read += 1
                    if isinstance(row.value, dict):
                        yield row
                    else:
                        self.bad_rows.reject(path, row.line, row.value)

    def reject(self, row: Row, reason: str) -> None:
        """Count a row as bad; see `BadRows.reject`."""
        self.bad_rows.reject(row.path, row.line, reason)

    def check(self) -> None:
        """Call after the last row; see `BadRows.check`."""
        self.bad_rows.check(self.say)


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


def expand_shards(path: str) -> list[str]:
    """Like `expand_path`, a hub data set in the parts that it can be read apart in.

    Raises:
        ValueError: the hub cannot be reached, or does not have it.
    """
    if not path.startswith(HUB_PREFIX):
        return expand_path(path)
    try:
        count = hub_shards(path)
    except Exception as error:  # `datasets` raises a dozen kinds of its own and the network's
        raise ValueError(f"{path} cannot be read: {(str(error).strip() or type(error).__name__)}") from error
    return [f"{path}#{index}/{count}" for index in range(count)]


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
        yield from split_few(first, part)
        return
    for row in itertools.chain(first, stream):
        if is_held_out(row_hash(row.value)) == (part == "validation"):
            yield row


def row_hash(value: dict[str, Any]) -> int:
    """64 bits of the hash of a row's content; the order of keys, and keys that are no content, make no difference."""
    content = value.get("text")
    if not isinstance(content, str):  # else the text is the content; most rows of a large corpus are of that kind
        known = {key: part for key, part in value.items() if key in CONTENT_KEYS} or value
        content = json.dumps(known, sort_keys=True, ensure_ascii=True, default=str)
    return int.from_bytes(hashlib.sha256(content.encode("utf-8", "surrogatepass")).digest()[:8])


HELD_OUT_BELOW = int(HELD_OUT_SHARE * 2**64)


def is_held_out(content_hash: int) -> bool:
    """Whether a row belongs to the validation part: its `row_hash` lies in the lowest 5 % of all hashes."""
    return content_hash < HELD_OUT_BELOW


def split_few(rows: list[Row], part: Part) -> list[Row]:
    """The part of fewer than 20 rows; see `split_held_out`."""
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
