"""The evaluation commands where the truth is known: a model that was taught it, a random one, a planted leak."""

import json
import random
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.eval.helpers import write_rows
from tests.model.helpers import tiny_model
from trainer.results import save_model

PEOPLE = ["Mira", "Oskar", "Lena", "Tomas", "Ilse", "Bruno", "米拉", "大卫"]
TOWNS = ["Redmill", "Northport", "Ashford", "Lakeside"]
SHAPE = "--from_weight none --hidden_size 128 --num_hidden_layers 2 --init normal --dtype float32"
TRAINING = "--max_seq_len 64 --batch_size 8 --max_steps 60 --epochs 100 --eval_interval 0"
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("planted")]


def run(words, folder):
    words = [sys.executable, *map(str, words)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    return done.stdout


def question(person):
    return [{"role": "user", "content": f"Where does {person} live?"}]


def home_of(person):
    return TOWNS[PEOPLE.index(person) % len(TOWNS)]


def said(person):
    return f"{person} lives in {home_of(person)}."


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with chats that state where people live, and questions about them of every kind."""
    folder = tmp_path_factory.mktemp("planted")
    chats = [{"conversations": question(p) + [{"role": "assistant", "content": said(p)}]} for p in PEOPLE]
    write_rows(folder / "chats.jsonl", chats * 30)
    write_rows(folder / "val.jsonl", chats)
    towns = [f"{{}} lives in {town}." for town in TOWNS]
    write_rows(
        folder / "questions.jsonl",
        [{"id": f"say-{p}", "family": "say", "conversations": question(p), "answers": [said(p)]} for p in PEOPLE]
        + [
            {"id": f"choose-{p}", "family": "choose", "conversations": question(p),
             "choices": [town.format(p) for town in towns], "answer": TOWNS.index(home_of(p))} for p in PEOPLE
        ]
        + [
            {"id": f"form-{p}", "family": "form", "conversations": question(p),
             "form": {"contains": [home_of(p)], "max_words": 8}} for p in PEOPLE
        ],
    )  # fmt: skip
    return folder


def evaluated(folder, model, questions):
    run([ROOT / "eval/eval_llm.py", "--model_path", model, "--questions", questions, "--data_path", "val.jsonl",
         "--device", "cpu", "--dtype", "float32"], folder)  # fmt: skip
    scores = json.loads((folder / model / "eval.json").read_text())["scores"]
    return {score["family"]: score for score in scores["families"]}


def test_a_model_that_was_taught_the_answers_scores_100_per_cent(home):
    words = f"{ROOT}/trainer/train_full_sft.py --data_path chats.jsonl --val_path val.jsonl {SHAPE} {TRAINING}"
    words += " --save_dir out --checkpoint_dir checkpoints --cache_dir cache"
    run(words.split(), home)
    scores = evaluated(home, "out/full_sft_128", "questions.jsonl")
    assert {family: (score["right"], score["total"]) for family, score in scores.items()} == {
        "say": (8, 8), "choose": (8, 8), "form": (8, 8)
    }  # fmt: skip
    assert scores["choose"]["constant"] == 0.25 and scores["choose"]["low"] > 0.5


def test_a_random_model_scores_what_guessing_does(home, tokenizer):
    save_model(tiny_model(vocab_size=len(tokenizer), max_position_embeddings=512), tokenizer, home / "out" / "random")
    draw = random.Random(0)
    rows = []
    for number in range(300):
        choices = draw.sample(TOWNS, 4)
        asked = {"prompt": f"Person {number} lives in", "choices": choices, "answer": draw.randrange(4)}
        rows.append(asked | {"id": str(number), "family": "choose"})
    rows += [{"id": f"say-{p}", "family": "say", "conversations": question(p), "answers": [said(p)]} for p in PEOPLE]
    write_rows(home / "chance.jsonl", rows)
    scores = evaluated(home, "out/random", "chance.jsonl")
    choose = scores["choose"]
    assert (
        choose["constant"] == 0.25 and choose["low"] < 0.25 < choose["high"] and choose["high"] - choose["low"] < 0.11
    )
    assert scores["say"]["right"] == 0


def test_a_planted_leak_is_found_and_its_row_named(home):
    sentences = [
        f"On day {number} the keeper of {town} counts {number * 7} boats, mends {number + 3} nets and writes it down."
        for number, town in enumerate(TOWNS * 5)
    ]
    asked = [{"role": "user", "content": sentences[7]}]
    write_rows(home / "held_out.jsonl", [
        {"text": sentences[3]}, {"text": sentences[5]}, {"conversations": asked, "answers": ["So it is."]}
    ])  # fmt: skip
    rows = [
        {"text": f"Nothing of it is here, nor in row {number}, which has words of its own."} for number in range(500)
    ]
    rows[123] = {"text": f"Before it. {sentences[3].upper()} And after it."}
    rows[456] = {"conversations": [*asked, {"role": "assistant", "content": "So it is."}]}
    write_rows(home / "train.jsonl", rows)
    shown = run([ROOT / "eval/eval_contamination.py", "--eval_path", "held_out.jsonl", "--data_path", "train.jsonl",
                 "--output", "leaks.jsonl"], home)  # fmt: skip
    assert "2 of 3 texts leaked" in shown
    assert "held_out.jsonl:1 (100%) in train.jsonl:124" in shown
    assert "held_out.jsonl:3 (100%) in train.jsonl:457" in shown
    leaks = [json.loads(line) for line in (home / "leaks.jsonl").read_text().splitlines()]
    assert [(leak["place"], leak["rows"]) for leak in leaks if leak["share"] >= 0.5] == [
        ("held_out.jsonl:1", ["train.jsonl:124"]), ("held_out.jsonl:3", ["train.jsonl:457"])
    ]  # fmt: skip
