"""Rows of any data as plain texts with their places, and the words in them."""

import re
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from dataset.formats import pair_from_row, row_kind, text_from_row, words_of
from dataset.sources import RowReader

SAY_EVERY_SECONDS = 10.0
# Characters of scripts without spaces are words of their own; of all else, letters and digits in a row.
_NO_SPACES = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
WORD = re.compile(rf"[{_NO_SPACES}]|[^\W_{_NO_SPACES}]+")


class Text(NamedTuple):
    """A text and where it stands: an id, or file and line."""

    place: str
    text: str


def words_in(text: str) -> list[str]:
    """What n-grams are made of: words without case, marks and spaces, composed (NFC)."""
    return WORD.findall(unicodedata.normalize("NFC", text).casefold())


def text_of_any_row(row: dict[str, Any]) -> str:
    """All that a row of training data says, both sides of a preference pair included."""
    if row_kind(row) != "pair":
        return text_from_row(row)
    return "\n".join(words_of(messages) for messages, _ in pair_from_row(row))


def texts_of(paths: Sequence[str], text_of: Callable[[dict[str, Any]], str], what: str) -> Iterator[Text]:
    """Every usable row; bad ones are named, and too many are an error. Long reads say how far they are.

    Raises:
        ValueError: a file that cannot be read, or more than 5 % bad rows.
    """
    reader = RowReader(paths, say=print)
    started = said = time.monotonic()
    for number, row in enumerate(reader, start=1):
        place = f"{row.path}:{row.line}"
        try:
            yield Text(place, text_of(row.value))
        except (ValueError, KeyError, TypeError) as error:
            reader.reject(row, str(error))
        if (now := time.monotonic()) - said > SAY_EVERY_SECONDS:
            print(f"  {number:,} rows of {what} read, {number / (now - started):,.0f} a second, at {place}", flush=True)
            said = now
    reader.check()
    print(f"{what}: {reader.bad_rows.rows_read:,} rows", flush=True)
