"""Counts by hand; tokens that no text gives, beside a search through all texts; the command on two tokenizers."""

import itertools
import json
import shutil
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eval import eval_tokenizer
from eval.tokenization import (
    count_texts,
    failed_round_trips,
    open_tokenizer,
    tokenizer_report,
    unreachable_tokens,
    unused_tokens,
)
from trainer.weights import DEFAULT_TOKENIZER


def byte_level(merges: list[tuple[str, str]], extra: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A byte-level BPE that cuts before spaces and writes NFC. `extra` tokens have no merge that leads to them."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *dict.fromkeys(a + b for a, b in merges), *extra]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" ", "merged_with_next"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_counts_by_hand():
    tokenizer = byte_level([("a", "b"), ("ab", "c")])
    counts = count_texts(tokenizer.backend_tokenizer, [["abc abd", "abc"], ["狐狸"]])
    english, chinese, both = counts["english"], counts["chinese"], counts["all"]
    # "abc", " ", "ab", "d", and "abc" alone; each stretch of a document by itself. Bytes have no merges in Chinese.
    assert (english.documents, english.tokens, english.bytes, english.characters) == (1, 5, 10, 10)
    assert english.words == 2, "the stretches are one text: abc, abdabc"
    assert (chinese.tokens, chinese.words, chinese.bytes, chinese.characters) == (6, 2, 6, 2)
    assert both == english + chinese
    assert both.to_dict() == {
        "documents": 2, "tokens": 11, "bytes_per_token": 1.4545, "characters_per_token": 1.0909, "tokens_per_word": 2.75
    }  # fmt: skip


def test_each_reason_for_which_no_text_gives_a_token():
    # "ab" is merged first, so nothing is left for "abc"; "x y" is cut at its space; NFC composes "e" and U+0301, whose
    # bytes are CC 81; "zz" has no merge.
    composed = ("e", "Ìģ")
    # F5 is in no UTF-8.
    merges = [("a", "b"), ("b", "c"), ("a", "bc"), ("Ġ", "y"), ("x", "Ġy"), ("Ì", "ģ"), composed, ("õ", "a")]
    tokenizer = byte_level(merges, extra=("zz",))
    assert unreachable_tokens(tokenizer) == ["abc", "xĠy", "eÌģ", "õa", "zz"]


def test_bytes_to_fall_back_on_and_a_space_before_every_text_are_no_reasons():
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    assert unreachable_tokens(PreTrainedTokenizerFast(tokenizer_object=backend)) == []
    tokenizer = byte_level([("a", "b"), ("Ġ", "ab")])
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert unreachable_tokens(tokenizer) == []


@given(pairs=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6))
def test_it_is_what_a_search_through_all_texts_finds(pairs):
    tokens, merges = ["a", "b"], []
    for left, right in pairs:
        pair = tokens[left % len(tokens)], tokens[right % len(tokens)]
        if len("".join(pair)) <= 5 and "".join(pair) not in tokens:
            merges.append(pair)
            tokens.append("".join(pair))
    tokenizer = byte_level(merges)
    seen = set()
    for length in range(1, 8):
        for letters in itertools.product("ab", repeat=length):
            seen |= set(tokenizer.backend_tokenizer.encode("".join(letters)).tokens)
    assert unreachable_tokens(tokenizer) == [token for token in tokens if token not in seen]
    texts = ["".join(letters) for length in range(1, 8) for letters in itertools.product("ab", repeat=length)]
    assert unused_tokens(tokenizer, texts) == 256 + len(merges) - len(seen)


def test_round_trips():
    tokenizer = byte_level([])
    assert failed_round_trips(tokenizer.backend_tokenizer, ["abc", "e\u0301", "狐狸 <|end|>", ""]) == []
    lossy = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    assert failed_round_trips(lossy, ["a", "ab"]) == ["ab"]


@pytest.fixture
def other(tmp_path):
    byte_level([("t", "h"), ("th", "e")], extra=("xyz",)).save_pretrained(tmp_path / "other")
    return tmp_path / "other"


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["eval/eval_tokenizer.py", *map(str, words)])
    eval_tokenizer.main()


def test_the_command_on_two_tokenizers(tmp_path, other, monkeypatch, capsys):
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "the fox and the lighthouse"}\n{"text": "狐狸和灯塔"}\n')
    chats = tmp_path / "chats.jsonl"
    chats.write_text(
        '{"conversations": [{"role": "user", "content": "the"}, {"role": "assistant", "content": "fox"}]}\n'
    )
    folders = ["--tokenizer_path", DEFAULT_TOKENIZER, other]
    run(monkeypatch, *folders, "--data_path", texts, chats, "--output", tmp_path / "out.json")
    report = json.loads((tmp_path / "out.json").read_text())
    ours, theirs = report[str(DEFAULT_TOKENIZER)], report[str(other)]
    assert ours["unreachable"] == [] and theirs["unreachable"] == ["xyz"]
    assert theirs["vocabulary"] == 260 and theirs["failed_round_trips"] == 0 and theirs["megabytes_per_second"] > 0
    english, chinese, both = (theirs["domains"][str(texts)][name] for name in ("english", "chinese", "all"))
    assert (english["tokens"], english["tokens_per_word"]) == (26 - 2 * 2 - 1, 21 / 5), (
        "twice the, and the th of lighthouse"
    )
    assert (chinese["tokens"], chinese["tokens_per_word"], both["documents"]) == (15, 3.0, 2)
    assert theirs["domains"][str(chats)]["all"]["tokens"] == len("the\nfox") - 2
    shown = capsys.readouterr().out
    assert str(other)[:20] in shown and "tokens/word" in shown and "no text is ever encoded to 'xyz'" in shown


@pytest.mark.parametrize(
    "words, problem",
    [
        (["--tokenizer_path", "nowhere"], "--tokenizer_path nowhere is not a tokenizer folder"),
        (["--tokenizer_path", "a", "a"], "--tokenizer_path: a folder is named twice"),
        (["--max_characters", "-1"], "--max_characters -1 must not be negative"),
        (["--data_path", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["--output", "nowhere/figures.json"], "--output nowhere/figures.json: there is no such folder"),
        (["--output", "."], "--output . is a folder; name a file"),
    ],
)
def test_mistakes_are_named(tmp_path, monkeypatch, words, problem):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=problem):
        run(monkeypatch, *words)


def test_a_broken_tokenizer_is_named(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=f"--tokenizer_path {tmp_path}: the tokenizer cannot be read"):
        run(monkeypatch, "--tokenizer_path", tmp_path)


def test_a_longest_length_that_was_saved_with_a_tokenizer_cuts_nothing(tmp_path):
    tokenizer = Tokenizer.from_file(str(DEFAULT_TOKENIZER / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=20)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    shutil.copy(DEFAULT_TOKENIZER / "tokenizer_config.json", tmp_path)
    texts = {"all": ["the fox and the lighthouse"]}
    whole, cut = (
        tokenizer_report(open_tokenizer(str(folder), "--x"), texts) for folder in (DEFAULT_TOKENIZER, tmp_path)
    )
    assert whole["domains"] == cut["domains"]
