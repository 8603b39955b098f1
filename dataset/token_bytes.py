"""The text behind token ids, counted without decoding it."""

from typing import NamedTuple

import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from dataset.text_statistics import byte_weights


def token_contents(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """The raw bytes that each token id stands for; control tokens, and ids that no token has, stand for none.

    A byte-level vocabulary writes each byte as one character of a fixed alphabet of 256. (`decode([id])` would not do:
    a token that holds part of a character decodes to U+FFFD, three bytes.)

    Raises:
        ValueError: the vocabulary is not byte-level.
    """
    contents = [b""] * len(tokenizer)
    values = byte_values()
    added = tokenizer.added_tokens_decoder
    for token, token_id in tokenizer.get_vocab().items():
        if token_id in added:
            is_control = added[token_id].special or (token.startswith("<") and token.endswith(">"))
            contents[token_id] = b"" if is_control else token.encode("utf-8")
        elif all(character in values for character in token):
            contents[token_id] = bytes(values[character] for character in token)
        else:
            raise ValueError(
                f"bits per byte need a byte-level tokenizer, but token {token_id} is {token!r}, "
                "which is not written in the byte-level alphabet; train one with scripts/train_tokenizer.py"
            )
    return contents


def byte_values() -> dict[str, int]:
    """The byte that each character of the byte-level alphabet stands for.

    Printable characters of Latin-1 stand for themselves; the other bytes, in order, for U+0100 and what follows.
    """
    alphabet = set(ByteLevel.alphabet())
    themselves = [byte for byte in range(256) if chr(byte) in alphabet]
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    values = {chr(byte): byte for byte in themselves} | {chr(256 + index): byte for index, byte in enumerate(others)}
    assert set(values) == alphabet
    return values


def token_byte_lengths(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """(V,) int64: the number of raw bytes that each token id stands for; V is len(tokenizer). See `token_contents`."""
    return torch.tensor([len(content) for content in token_contents(tokenizer)], dtype=torch.long)


class TokenStatistics(NamedTuple):
    """Of the text behind stretches of tokens: characters, and the language that most of it is in (see `LANGUAGES`)."""

    characters: np.ndarray
    language: np.ndarray


def token_statistics(
    tokenizer: PreTrainedTokenizerBase, tokens: np.ndarray, starts: np.ndarray, chunk: int = 2**22
) -> TokenStatistics:
    """Statistics of stretches of a flat token array, each reaching to the next one's start.

    Args:
        tokenizer: that wrote them.
        tokens: (N,) ids.
        starts: (U,) first token of each stretch, ascending.
        chunk: tokens that are looked at in one go.
    """
    weights = np.array([byte_weights(content) for content in token_contents(tokenizer)], dtype=np.float32)
    sums = np.zeros((len(starts), weights.shape[1]))
    for first in range(0, len(tokens), chunk):
        part = weights[tokens[first : first + chunk]]
        low = max(int(np.searchsorted(starts, first, side="right")) - 1, 0)
        high = int(np.searchsorted(starts, first + len(part)))
        edges = np.maximum(starts[low:high] - first, 0)
        sums[low:high] += np.add.reduceat(part, edges, axis=0, dtype=np.float64)
    return TokenStatistics(sums[:, 0].astype(np.int64), np.argmax(sums[:, 1:], axis=1))
