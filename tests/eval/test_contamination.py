"""A planted leak is found and its row named; a common phrase, other numbers and short texts are no leak."""

import random
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from eval.contamination import find_overlaps
from eval.eval_contamination import ContaminationArguments, evaluation_text
from eval.texts import Text, words_in

LONG = "The lighthouse keeper of Northport counts seventeen boats every morning before the bells of the town ring."
CHINESE = "一只狐狸在灯塔旁边看见了十七条船和一个老人"


def test_words_are_without_case_and_marks_and_chinese_is_by_character():
    assert words_in("Don't STOP_now, 3.5 米拉住在 A1!") == ["don", "t", "stop", "now", "3", "5", *"米拉住在", "a1"]


def test_a_planted_leak_is_found_with_its_row():
    texts = [
        Text("a", LONG),
        Text("b", "一只狐狸在灯塔旁边看见了十七条船和一个老人"),
        Text("c", "Where does Mira live? Redmill."),
    ]
    rows = [
        Text("train:1", "Nothing of that kind is said here, nor anywhere else in this row of words."),
        Text("train:2", "Before. " + LONG.upper() + " After."),
        Text("train:3", "where does mira live\nREDMILL"),
        Text("train:4", "他说：" + CHINESE),
        Text("train:5", LONG),
    ]
    found = find_overlaps(texts, rows)
    assert [overlap.share for overlap in found] == [1.0, 1.0, 1.0]
    assert [overlap.rows for overlap in found] == [["train:2", "train:5"], ["train:4"], ["train:3"]]


def test_a_common_phrase_is_a_small_share_and_short_texts_are_not_judged():
    words = LONG.split()
    texts = [Text("long", LONG), Text("short", "Yes."), Text("sum", "What is 12 + 30? 42")]
    rows = [Text("train:1", " ".join(words[:14])), Text("train:2", "yes"), Text("train:3", "What is 13 + 30? 43")]
    long, short, total = find_overlaps(texts, rows)
    assert (long.found, long.ngrams, long.rows) == (2, len(words) - 12, ["train:1"])
    assert (short.ngrams, short.share, short.rows) == (0, 0.0, [])
    assert total.ngrams == 1 and total.found == 0


@given(seed=st.integers(0, 10**6), size=st.integers(1, 6))
def test_it_is_what_a_plain_search_finds(seed, size):
    draw = random.Random(seed)
    texts, rows = (
        [Text(f"{name}{n}", " ".join(draw.choices("abcd", k=draw.randrange(12)))) for n in range(4)]
        for name in ("text", "row")
    )
    for overlap, (_, text) in zip(find_overlaps(texts, rows, size, fewest_words=1), texts, strict=True):
        words = text.split()
        length = min(size, len(words))
        grams = (
            {" ".join(words[start : start + length]) for start in range(len(words) - length + 1)} if words else set()
        )
        holding = {gram: [place for place, row in rows if f" {gram} " in f" {row} "] for gram in grams}
        assert overlap.ngrams == len(grams) and overlap.found == sum(bool(places) for places in holding.values())
        assert overlap.rows == sorted(set().union(*holding.values()))[:5]


def test_other_forms_of_the_same_letters_are_the_same_words():
    composed, apart = "une idée déjà dévoilée", unicodedata.normalize("NFD", "une idée déjà dévoilée")
    assert composed != apart and words_in(composed) == words_in(apart)


def test_every_answer_and_choice_is_looked_for():
    chat = [{"role": "user", "content": "Who?"}]
    assert evaluation_text({"conversations": chat, "answers": ["One.", "Two."]}) == "Who?\nOne.\nTwo."
    assert evaluation_text({"conversations": chat, "choices": ["One.", "Two."], "answer": 1}) == "Who?\nOne.\nTwo."


def test_results_never_replace_what_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"text": "a b c d"}\n')
    for reads, output in (("train.jsonl", "./train.jsonl"), ("tr*n.jsonl", str(tmp_path / "train.jsonl"))):
        arguments = ContaminationArguments(eval_path=["train.jsonl"], data_path=[reads], output=output)
        assert arguments.problems() == [f"--output {output} is one of the files that are read"]
    assert "--ngram_words 2 must be at least 3" in ContaminationArguments(["a"], ["b"], ngram_words=2).problems()[0]
