"""Drawing with a held-out part: every text and question gets its numbers, lists and facts from here.

A canonical key (an operand pair, a list's contents, an entity with a relation and a phrasing) belongs to exactly one
split, by its hash. Whoever writes a file draws with that file's split only, so the files are disjoint by construction.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dataset.builtin.world import World

TEST_PERCENT = 20  # of the keys: 40 people x 6 phrasings leave 48 held-out keys, enough for 120 questions
VALIDATION_PERCENT = 8

MAX_ATTEMPTS = 2000  # one draw in twelve succeeds at the least, so this many never fail but by a mistake

Key = tuple[str, ...]
Value = TypeVar("Value")


def split_of(key: Key) -> str:
    """The split ("train", "val" or "test") that a canonical key belongs to."""
    digest = hashlib.sha256("\x1f".join(key).encode()).digest()
    bucket = int.from_bytes(digest[:4], "big") % 100
    if bucket < TEST_PERCENT:
        return "test"
    return "val" if bucket < TEST_PERCENT + VALIDATION_PERCENT else "train"


@dataclass
class Draw:
    """A source of random material in one language and one split."""

    world: World
    language: str
    split: str
    rng: random.Random

    @property
    def english(self) -> bool:
        """Whether the language is English (else it is Chinese)."""
        return self.language == "en"

    def one(self, values: Sequence[Value]) -> Value:
        """One of `values`."""
        return values[int(self.rng.random() * len(values))]

    def some(self, values: Sequence[Value], count: int) -> list[Value]:
        """`count` different ones of `values`, in random order."""
        return self.rng.sample(values, count)

    def chance(self, probability: float) -> bool:
        """True with that probability."""
        return self.rng.random() < probability

    def number(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return low + int(self.rng.random() * (high - low + 1))

    def phrase(self, english: Sequence[Value], chinese: Sequence[Value]) -> Value:
        """One of the phrasings of the own language."""
        return self.one(english if self.language == "en" else chinese)

    def keep(self, make: Callable[[], tuple[Value, Key]]) -> tuple[Value, Key]:
        """Call `make` until it gives something whose key belongs to the own split."""
        for _ in range(MAX_ATTEMPTS):
            value, key = make()
            if split_of(key) == self.split:
                return value, key
        raise AssertionError(f"no key like {key} falls into the {self.split} split: too few of them")
