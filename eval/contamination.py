"""Whether an evaluation's text was in the training data: n-grams of words that both have, and the rows that have them.

Brown et al. 2020 (arXiv:2005.14165, appendix C) call an example dirty that shares a 13-gram of words with the training
data. Here every n-gram of an example is looked up, so that a copied question (all of them) is told from a common phrase
(a few). A text shorter than n words counts as one n-gram.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from eval.texts import Text, words_in

NGRAM_WORDS = 13
FEWEST_WORDS = 3
"""Shorter texts ("yes") are in any corpus and say nothing."""

KEPT_ROWS = 5
BLOCK_WORDS = 2**16
_MULTIPLIER = 0x9E3779B97F4A7C15


@dataclass
class Overlap:
    """What one evaluation text shares with the training data.

    Attributes:
        place: of the text.
        ngrams: how many different ones it has; 0: it is too short to judge.
        found: how many of them the training data has.
        rows: places of the first training rows that have some.
    """

    place: str
    ngrams: int
    found: int = 0
    rows: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Part of its n-grams that was found, 0 to 1."""
        return self.found / self.ngrams if self.ngrams else 0.0


class _Ngrams:
    """The n-grams of one length of the evaluation texts, to be found in a row of word ids."""

    def __init__(self, length: int):
        self.length = length
        self.owners: dict[tuple[int, ...], set[int]] = defaultdict(set)
        self.hashes = np.empty(0, dtype=np.uint64)

    def close(self) -> None:
        """Call when all are in."""
        self.hashes = np.unique(
            hash_windows(np.array(list(self.owners), dtype=np.int64).reshape(-1), self.length, True)
        )

    def find(self, ids: np.ndarray) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(position, n-gram) of each that occurs in an array of word ids."""
        if len(ids) < self.length:
            return
        hashes = hash_windows(ids, self.length)
        places = np.searchsorted(self.hashes, hashes)
        for position in np.flatnonzero(self.hashes[np.minimum(places, len(self.hashes) - 1)] == hashes):
            ngram = tuple(ids[position : position + self.length].tolist())
            if ngram in self.owners:  # a hash may belong to two
                yield position, ngram


def hash_windows(ids: np.ndarray, length: int, apart: bool = False) -> np.ndarray:
    """64-bit hashes of all windows of `length` ids, (N - length + 1,); of every length-th one if they stand `apart`."""
    powers = np.array([pow(_MULTIPLIER, length - 1 - k, 2**64) for k in range(length)], dtype=np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64), length)
    return (windows[:: length if apart else 1] * powers).sum(axis=1, dtype=np.uint64)


def find_overlaps(
    texts: Sequence[Text], rows: Iterable[Text], ngram_words: int = NGRAM_WORDS, fewest_words: int = FEWEST_WORDS
) -> list[Overlap]:
    """Look every n-gram of the evaluation `texts` up in the training `rows`, which are read once, as a stream.

    Returns:
        An entry for each text, in order.
    """
    vocabulary: dict[str, int] = {}
    sizes: dict[int, _Ngrams] = {}
    overlaps = []
    for number, (place, text) in enumerate(texts):
        ids = [vocabulary.setdefault(word, len(vocabulary) + 1) for word in words_in(text)]
        length = min(len(ids), ngram_words)
        own = {tuple(ids[start : start + length]) for start in range(len(ids) - length + 1)}
        overlaps.append(Overlap(place, len(own) if length >= fewest_words else 0))
        if overlaps[-1].ngrams:
            of_size = sizes.setdefault(length, _Ngrams(length))
            for ngram in own:
                of_size.owners[ngram].add(number)
    for of_size in sizes.values():
        of_size.close()
    found: set[tuple[int, ...]] = set()
    for block in _blocks(rows, vocabulary):
        for of_size in sizes.values():
            for position, ngram in of_size.find(block.ids):
                found.add(ngram)
                place = block.places[np.searchsorted(block.starts, position, side="right") - 1]
                for number in of_size.owners[ngram]:
                    seen = overlaps[number].rows
                    if place not in seen and len(seen) < KEPT_ROWS:
                        seen.append(place)
    for of_size in sizes.values():
        for ngram, owners in of_size.owners.items():
            for number in owners if ngram in found else ():
                overlaps[number].found += 1
    return overlaps


class _Block(NamedTuple):
    """Training rows behind one another: word ids, where each row starts, and its place."""

    ids: np.ndarray
    starts: np.ndarray
    places: list[str]


def _blocks(rows: Iterable[Text], vocabulary: Mapping[str, int]) -> Iterator[_Block]:
    """The rows in blocks, since NumPy's calls cost as much as a hundred words.

    Words that no evaluation text has are 0, and so is the border between rows: no n-gram has a 0.
    """
    ids, starts, places = [], [], []
    for place, text in rows:
        starts.append(len(ids))
        places.append(place)
        ids += [vocabulary.get(word, 0) for word in words_in(text)]
        ids.append(0)
        if len(ids) >= BLOCK_WORDS:
            yield _Block(np.array(ids, dtype=np.int64), np.array(starts), places)
            ids, starts, places = [], [], []
    if ids:
        yield _Block(np.array(ids, dtype=np.int64), np.array(starts), places)
