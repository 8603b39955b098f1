"""Files to rows, a block at a time: jsonl and text by our own readers, json, csv, parquet and hubs through `datasets`.

A block is a stretch of a file that can be parsed by itself, in another process if need be. Its borders depend on the
file and the block's size alone, so a reader that starts at any of them sees the same blocks as one that starts at the
file's beginning.
"""

import gzip
import io
import itertools
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

HUB_PREFIX = "hub:"
COMPRESSIONS = (".gz", ".zst")
SUFFIXES = (
    ".jsonl", ".json", ".csv", ".parquet", ".txt", ".jsonl.gz", ".jsonl.zst", ".txt.gz", ".txt.zst", ".json.gz",
    ".csv.gz", ".bin",
)  # fmt: skip

BLOCK_BYTES = 2**20
BLOCK_ROWS = 1000

TextAs = Literal["file", "paragraph"]


class Row(NamedTuple):
    """One row and where it stands: the file, and the line (jsonl, counted from 1) or row number in it.

    A string in the value's place says what is wrong with the row.
    """

    value: dict[str, Any] | str
    path: str
    line: int


class Position(NamedTuple):
    """A border between two blocks of a file.

    `block` counts blocks; `offset` bytes of the unpacked file (jsonl) or rows; `line` is the next row's line, from 1.
    """

    block: int = 0
    offset: int = 0
    line: int = 1


class Block(NamedTuple):
    """A stretch of a file: lines as they stand in it, or (line, row) pairs.

    `end` is where the next block starts, `share` how much of the file lies before it, 0 where that is not known.
    """

    path: str
    start: Position
    end: Position
    content: bytes | list[tuple[int, dict[str, Any]]]
    share: float = 0.0


def _kind(path: str) -> str:
    """The suffix that says what a file holds, compressed or not."""
    return "" if path.startswith(HUB_PREFIX) else Path(path.removesuffix(".gz").removesuffix(".zst")).suffix


def is_text(path: str) -> bool:
    """Whether a file is plain text, compressed or not."""
    return _kind(path) == ".txt"


def read_blocks(
    path: str,
    text_as: TextAs = "file",
    block_bytes: int | None = None,
    start: Position | None = None,
    block_rows: int | None = None,
) -> Iterator[Block]:
    """The blocks of a file, a folder's file or a hub name, from `start` on.

    Args:
        path: what it is follows from its name.
        text_as: whether a .txt file is one row, or one for each paragraph.
        block_bytes: least size of a block of jsonl, a megabyte if not given; each ends with a line.
        start: the end of a block of an earlier reading.
        block_rows: rows in a block of any other kind, 1,000 if not given.

    Raises:
        ValueError: the file cannot be read, or has no rows at all.
    """
    start = start or Position()
    if _kind(path) == ".bin":
        raise ValueError(f"{path} holds tokens, not text; only training stages read it")
    if _kind(path) == ".jsonl":
        blocks = _line_blocks(path, block_bytes or BLOCK_BYTES, start)
    else:
        # A paragraph starts at a line; other rows are numbered.
        rows = _paragraphs(path, text_as) if is_text(path) else enumerate(_rows_of_datasets(path), start=1)
        blocks = _row_blocks(path, rows, start, block_rows or BLOCK_ROWS)
    first = next(blocks, None)
    if first is None:
        if start == Position():
            raise ValueError(f"{path} is empty: it has no rows")
        return
    yield first
    yield from blocks


def parse_block(block: Block) -> Iterator[Row]:
    """The rows of a block. Blank lines are no rows."""
    if isinstance(block.content, list):
        yield from (Row(value, block.path, line) for line, value in block.content)
        return
    # Bytes: one undecodable line is then one bad row, and only "\n" ends a line.
    for line, content in enumerate(block.content.split(b"\n"), start=block.start.line):
        if line == 1:
            content = content.removeprefix(b"\xef\xbb\xbf")
        if content.strip():
            yield Row(parse_line(content.rstrip()), block.path, line)


def parse_line(line: bytes) -> dict[str, Any] | str:
    """A line of jsonl as an object, or what is wrong with it."""
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"not valid UTF-8 (byte 0x{line[error.start]:02x} at column {error.start + 1})"
    except json.JSONDecodeError as error:
        return f"not valid JSON ({error.msg} at column {error.pos + 1})"
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, thousands of brackets
        return f"not readable JSON ({str(error)[:60]})"
    return value if isinstance(value, dict) else f"not a JSON object but {type(value).__name__}"


def _unpacked(file: BinaryIO, path: str) -> BinaryIO:
    """A file's content, through the decompression that its name asks for."""
    if path.endswith(".gz"):
        return gzip.open(file, "rb")
    if path.endswith(".zst"):
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))
    return file


def _line_blocks(path: str, block_bytes: int, start: Position) -> Iterator[Block]:
    position = start
    try:
        with open(path, "rb") as raw, _unpacked(raw, path) as file:
            size = max(os.fstat(raw.fileno()).st_size, 1)
            _skip_to(file, start.offset, path)
            while content := file.read(block_bytes):
                content += file.readline()
                end = Position(position.block + 1, position.offset + len(content), position.line + content.count(b"\n"))
                # Blank lines at a file's head or end are no block of rows.
                if not content.isspace():
                    yield Block(path, position, end, content, raw.tell() / size)
                position = end
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read after line {position.line - 1}: {error}") from error


def _skip_to(file: BinaryIO, offset: int, path: str) -> None:
    """Go to an offset of the unpacked content; a compressed file is read up to there."""
    if not path.endswith(COMPRESSIONS):
        file.seek(offset)
        return
    while offset > 0 and (skipped := len(file.read(min(offset, BLOCK_BYTES)))):
        offset -= skipped


def _row_blocks(path: str, rows: Iterator[tuple[int, dict[str, Any]]], start: Position, size: int) -> Iterator[Block]:
    position = start
    rows = itertools.islice(rows, start.offset, None)
    while content := list(itertools.islice(rows, size)):
        end = Position(position.block + 1, position.offset + len(content), content[-1][0] + 1)
        yield Block(path, position, end, content)
        position = end


def _paragraphs(path: str, text_as: TextAs) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, row) of a text file: one row, or one for each paragraph."""
    try:
        with open(path, "rb") as raw, _unpacked(raw, path) as file:
            content = file.read()
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{path}:{line}: not valid UTF-8 (byte 0x{content[error.start]:02x}, number {error.start} of the file)"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
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


def hub_shards(path: str) -> int:
    """In how many parts a hub data set can be read apart."""
    return _hub_rows(path).num_shards


def _hub_rows(path: str) -> Any:
    """The stream behind hub:NAME[@split][#index/count], the last for one of its parts."""
    from datasets import load_dataset

    whole, _, part = path.removeprefix(HUB_PREFIX).partition("#")
    name, _, split = whole.partition("@")
    rows = load_dataset(name, split=split or "train", streaming=True)
    if part:
        index, count = map(int, part.split("/"))
        rows = rows.shard(num_shards=count, index=index)
    return rows


def _rows_of_datasets(path: str) -> Iterator[dict[str, Any]]:
    # Imported here: it takes a second, and jsonl and text do without.
    from datasets import load_dataset
    from datasets.utils import logging

    logging.set_verbosity(logging.CRITICAL)  # it prints what it raises as well
    try:
        if path.startswith(HUB_PREFIX):
            rows = _hub_rows(path)
        else:
            # Streaming: no copy in a cache folder.
            rows = load_dataset(_kind(path)[1:], data_files=path, split="train", streaming=True)
        for row in rows:
            # Formats with columns fill absent keys with None.
            yield {key: value for key, value in row.items() if value is not None}
    except Exception as error:  # `datasets` raises a dozen kinds of its own, pyarrow's and the network's
        if isinstance(error, StopIteration) or Path(path).is_file() and Path(path).stat().st_size == 0:
            raise ValueError(f"{path} is empty: it has no rows") from error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path} cannot be read: {reason}") from error
