"""nanoGPT's `.bin` files: 16-bit token ids and nothing else, documents ended by a separator.

They are mapped as they are. Which tokenizer wrote a file is not in it, so the run's own must be the one.
"""

import hashlib
from pathlib import Path

import numpy as np

from dataset.sources import FEW_DOCUMENTS, HELD_OUT_CHARACTERS, is_held_out
from dataset.units import UNIT, UnitMaker

CHUNK_TOKENS = 2**24


def is_token_file(path: str) -> bool:
    """Whether a file is one of nanoGPT's."""
    return path.endswith(".bin")


def map_token_file(path: str) -> np.ndarray:
    """(N,) uint16, the file's tokens.

    Raises:
        ValueError: empty, or not a whole number of tokens.
    """
    size = Path(path).stat().st_size
    if size < 4 or size % 2:
        raise ValueError(f"{path} has {size:,} bytes: not a file of 16-bit tokens, at least two of them")
    return np.memmap(path, np.uint16, "r")


def describe_token_file(path: str, maker: UnitMaker, split: bool) -> np.ndarray:
    """(U,) of dtype `UNIT`, the documents of a file.

    A document reaches from the separator before it to the one that ends it, so neighbours share one. The file's first
    document has none before it, and its first token is no target.

    Args:
        path: the file.
        maker: of the tokenizer that wrote it; documents end with its separator.
        split: mark the validation part: by the hash of each document's tokens, or with fewer than 20 documents the last
            10 % of the tokens.

    Raises:
        ValueError: a token that the tokenizer does not have, or no document.
    """
    tokens = map_token_file(path)
    starts, stops = _documents(path, tokens, maker)
    held_out = None
    if split and len(starts) < FEW_DOCUMENTS:
        cut = max(int(len(tokens) * (1 - HELD_OUT_CHARACTERS)), int(starts[0]) + 2)
        parts = [_clip(starts, stops, 0, cut), _clip(starts, stops, cut - 1, len(tokens))]
        held_out = np.repeat([False, True], [len(part[0]) for part in parts])
        starts, stops = (np.concatenate(edges) for edges in zip(*parts, strict=True))
    hashes = [_hash(tokens[start:stop]) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    if held_out is None:
        held_out = [split and is_held_out(value) for value in hashes]
    table = np.zeros(len(starts), dtype=UNIT)
    table["start"], table["length"] = starts, stops - starts
    table["supervised"] = table["length"] - 1
    table["bytes"] = _bytes_before(tokens, maker.token_bytes, stops) - _bytes_before(tokens, maker.token_bytes, starts)
    table["row_hash"], table["held_out"], table["is_document"] = hashes, held_out, True
    return table


def _documents(path: str, tokens: np.ndarray, maker: UnitMaker) -> tuple[np.ndarray, np.ndarray]:
    """First token of each document, and the one behind its last."""
    ends = []
    for first in range(0, len(tokens), CHUNK_TOKENS):
        chunk = tokens[first : first + CHUNK_TOKENS]
        if chunk.max() >= len(maker.token_bytes):
            position = first + int(np.argmax(chunk >= len(maker.token_bytes)))
            raise ValueError(
                f"{path}: token {position:,} is {tokens[position]}, but the tokenizer has {len(maker.token_bytes):,}; "
                "give the one that wrote the file with --tokenizer_path"
            )
        ends.append(first + np.flatnonzero(chunk == maker.separator))
    separators = np.concatenate(ends)
    starts, stops = np.append(0, separators), np.append(separators + 1, len(tokens))
    lengths = stops - starts
    only_separators = (lengths < 2) | (lengths == 2) & (tokens[starts] == tokens[stops - 1])
    if only_separators.all():
        raise ValueError(f"{path} holds no document: nothing but separators (token {maker.separator})")
    return starts[~only_separators], stops[~only_separators]


def _clip(starts: np.ndarray, stops: np.ndarray, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    """What of the documents lies from `low` on and before `high`."""
    starts, stops = np.maximum(starts, low), np.minimum(stops, high)
    enough = stops - starts >= 2
    return starts[enough], stops[enough]


def _bytes_before(tokens: np.ndarray, token_bytes: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The bytes of all tokens before each edge; edges ascend."""
    result = np.zeros(len(edges), dtype=np.int64)
    before = 0
    for first in range(0, len(tokens), CHUNK_TOKENS):
        sums = before + np.cumsum(token_bytes[tokens[first : first + CHUNK_TOKENS]], dtype=np.int64)
        low, high = np.searchsorted(edges, [first, first + len(sums)], side="right")
        result[low:high] = sums[edges[low:high] - first - 1]
        before = int(sums[-1])
    return result


def _hash(tokens: np.ndarray) -> int:
    """64 bits of the hash of a document's tokens."""
    return int.from_bytes(hashlib.sha256(np.ascontiguousarray(tokens)).digest()[:8])
