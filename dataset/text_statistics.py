"""What a text is made of, cheaply enough to be counted for every document of a large corpus."""

from typing import NamedTuple

import numpy as np

LANGUAGES = ("english", "chinese", "other", "unknown")
LETTERS_A_WORD = 4


class TextStatistics(NamedTuple):
    """`language` is the one that most of the text is written in, as an index into `LANGUAGES`."""

    characters: int
    bytes: int
    language: int


def text_statistics(text: str) -> TextStatistics:
    """Characters, UTF-8 bytes and language of a text.

    The language is told by the first bytes of its characters: Latin letters are single bytes; the common Chinese
    characters, U+4E00 to U+9FFF, start with 0xE4 to 0xE9; all other letters start with other bytes from 0xC3 on,
    punctuation such as dashes and full-width forms (0xE2, 0xE3, 0xEF) apart. A Chinese character counts as much as a
    word of four letters. One histogram of bytes costs 1 ns a byte, a look at each character 100.
    """
    content = text.encode("utf-8", "surrogatepass")
    counts = np.bincount(np.frombuffer(content, dtype=np.uint8), minlength=256)
    latin = int(counts[0x41:0x5B].sum() + counts[0x61:0x7B].sum())
    chinese = int(counts[0xE4:0xEA].sum())
    other = int(counts[0xC3:0xEF].sum() - counts[0xE2:0xEA].sum())
    weights = (latin / LETTERS_A_WORD, chinese, other / LETTERS_A_WORD)
    characters = len(content) - int(counts[0x80:0xC0].sum())
    return TextStatistics(characters, len(content), max(range(3), key=weights.__getitem__))
