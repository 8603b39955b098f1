"""How well a tokenizer cuts text: compression and fertility, tokens that it can never write, and its speed.

Fertility is tokens a word (Rust et al. 2021, arXiv:2012.15613); a word is a row of letters and digits, or one Chinese
or Japanese character. Tokens that no text can give are looked for as in Land and Bartolo 2024 (arXiv:2405.05417).
"""

import re
import statistics
import time
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dataset.text_statistics import text_statistics
from dataset.token_bytes import token_contents
from eval.texts import words_in

TURNS = 3
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


@dataclass
class TextCounts:
    """Sums over documents: how many, and their tokens, words, UTF-8 bytes and characters."""

    documents: int = 0
    tokens: int = 0
    words: int = 0
    bytes: int = 0
    characters: int = 0

    def __add__(self, other: "TextCounts") -> "TextCounts":
        return TextCounts(*(mine + its for mine, its in zip(vars(self).values(), vars(other).values(), strict=True)))

    def to_dict(self) -> dict[str, float]:
        """Ready for JSON: documents, tokens, and bytes and characters a token, and tokens a word."""
        tokens = max(self.tokens, 1)
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes_per_token": round(self.bytes / tokens, 4),
            "characters_per_token": round(self.characters / tokens, 4),
            "tokens_per_word": round(self.tokens / max(self.words, 1), 4),
        }


def open_tokenizer(folder: str, flag: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, as `AutoTokenizer` opens it.

    Raises:
        ValueError: there is none, or none that can be read; the message names the flag.
    """
    if not (Path(folder) / "tokenizer.json").is_file():
        raise ValueError(f"{flag} {folder} is not a tokenizer folder: it has no tokenizer.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        # Some are saved with a longest length, or padded to one: whole texts are what is measured.
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        return tokenizer
    except Exception as error:  # the library raises its own type, Exception
        raise ValueError(f"{flag} {folder}: the tokenizer cannot be read: {error}") from error


def count_texts(tokenizer: Tokenizer, documents: Iterable[Sequence[str]]) -> dict[str, TextCounts]:
    """Counts by language, and of "all".

    Args:
        tokenizer: whose tokens are counted, without those that it adds around a text.
        documents: each as the stretches of text that are encoded apart.
    """
    totals: dict[str, TextCounts] = {}
    for stretches in documents:
        encodings = tokenizer.encode_batch_fast(list(stretches), add_special_tokens=False)
        whole = "".join(stretches)
        text = text_statistics(whole)
        tokens = sum(len(encoding.ids) for encoding in encodings)
        counts = TextCounts(1, tokens, len(words_in(whole)), text.bytes, text.characters)
        for name in (text.language, "all"):
            totals[name] = totals.get(name, TextCounts()) + counts
    return dict(sorted(totals.items()))


def failed_round_trips(tokenizer: Tokenizer, texts: Sequence[str]) -> list[str]:
    """The texts that do not come back as they were, up to Unicode's NFC form."""
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    decoded = [tokenizer.decode(encoding.ids, skip_special_tokens=False) for encoding in encodings]
    pairs = zip(texts, decoded, strict=True)
    return [text for text, back in pairs if back not in (text, unicodedata.normalize("NFC", text))]


def unused_tokens(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> int:
    """How many tokens of the vocabulary, those that were added to it apart, never occur in the texts."""
    ids = set(tokenizer.get_vocab().values()) - set(tokenizer.added_tokens_decoder)
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return len(ids.difference(*(encoding.ids for encoding in encodings)))


def unreachable_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Tokens of the vocabulary, those that were added to it apart, that no text is ever encoded to.

    Either the model, given what the token spells, builds something else of it (its merges are shadowed by others); or
    what goes before the model cuts or rewrites its text, be it the split pattern or NFC; or it has bytes that UTF-8 has
    not. A token that holds part of a character is asked of the model alone. The 256 bytes themselves are not counted,
    though UTF-8 never has 13 of them: every byte-level vocabulary needs them all.

    Raises:
        ValueError: the vocabulary is neither BPE nor Unigram.
    """
    backend = tokenizer.backend_tokenizer
    if not isinstance(backend.model, models.BPE | models.Unigram):
        raise ValueError(f"unreachable tokens are told of BPE and Unigram, not of {type(backend.model).__name__}")
    contents = token_contents(tokenizer) if _is_byte_level(backend) else None
    added, found = tokenizer.added_tokens_decoder, []
    has_byte_tokens = getattr(backend.model, "byte_fallback", False)
    for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if token_id in added or (has_byte_tokens and BYTE_TOKEN.fullmatch(token)):
            continue
        reachable = [piece.id for piece in backend.model.tokenize(token)] == [token_id]
        if reachable and contents is not None and len(contents[token_id]) > 1:
            reachable = _is_written(backend, contents[token_id], token_id)
        if not reachable:
            found.append(token)
    return found


def _is_byte_level(backend: Tokenizer) -> bool:
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    return alphabet <= backend.get_vocab().keys() and "ByteLevel" in str(backend.pre_tokenizer)


def _is_written(backend: Tokenizer, content: bytes, token_id: int) -> bool:
    """Whether some text is encoded to the token with these bytes; of a part of a character, whether UTF-8 has them."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return not set(content) & {0xC0, 0xC1, *range(0xF5, 0x100)}  # RFC 3629: never in UTF-8
    if backend.encode(text, add_special_tokens=False).ids == [token_id]:
        return True
    # Where a space is put before every text, a word without one is only written behind something.
    return backend.encode(f"\n{text}", add_special_tokens=False).ids[-1:] == [token_id]


def encoding_rates(tokenizers: Sequence[Tokenizer], texts: Sequence[str], turns: int = TURNS) -> list[float]:
    """Megabytes of UTF-8 that each tokenizer encodes a second, with all threads: medians of turns taken one by one."""
    texts = list(texts)
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    seconds: list[list[float]] = [[] for _ in tokenizers]
    for _ in range(turns):
        for tokenizer, its_seconds in zip(tokenizers, seconds, strict=True):
            started = time.perf_counter()
            tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            its_seconds.append(time.perf_counter() - started)
    return [size / 1e6 / max(statistics.median(its_seconds), 1e-9) for its_seconds in seconds]


def tokenizer_report(tokenizer: PreTrainedTokenizerBase, domains: dict[str, list[str]]) -> dict[str, Any]:
    """All figures of one tokenizer but its speed, ready for JSON.

    Args:
        tokenizer: as `AutoTokenizer` opens it.
        domains: texts by the name of what they are from.
    """
    backend = tokenizer.backend_tokenizer
    texts = list(chain.from_iterable(domains.values()))
    try:
        unreachable = unreachable_tokens(tokenizer)
    except ValueError:
        unreachable = None
    return {
        "vocabulary": len(tokenizer),
        "unreachable": unreachable,
        "unused": unused_tokens(tokenizer, texts),
        "texts": len(texts),
        "failed_round_trips": len(failed_round_trips(backend, texts)),
        "domains": {
            name: {
                language: counts.to_dict()
                for language, counts in count_texts(backend, ([text] for text in its_texts)).items()
            }
            for name, its_texts in domains.items()
        },
    }
