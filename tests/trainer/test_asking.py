"""Questions in the middle of a training: asked, logged by family, and without a trace in what is trained."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.eval.helpers import write_rows
from tests.model.helpers import tiny_model
from trainer.results import save_model
from trainer.stage import run_stage
from trainer.train_full_sft import STAGE


def chat(number):
    return [{"role": "user", "content": f"Say {number}."}]


@pytest.fixture
def home(tokenizer, tmp_path):
    said = [{"conversations": [*chat(n), {"role": "assistant", "content": f"{n}!"}]} for n in range(40)]
    write_rows(tmp_path / "chats.jsonl", said)
    long = [{"role": "user", "content": "word " * 600}]
    questions = [{"conversations": chat(n), "answers": [f"{n}!"], "family": f"family {n % 2}"} for n in range(6)]
    write_rows(tmp_path / "questions.jsonl", [*questions, {"conversations": long, "answers": ["?"], "family": "long"}])
    model = tiny_model(1, vocab_size=len(tokenizer), dropout=0.1)
    save_model(model, tokenizer, tmp_path / "out" / "mid_train_32")
    return tmp_path


def flags(home, name, *more):
    words = (
        "--batch_size 2 --max_seq_len 64 --max_steps 4 --eval_iters 1 --eval_interval 2 --dtype float32 --device cpu "
    )
    words += f"--from_weight mid_train --save_dir {home}/out --cache_dir {home}/cache --data_path {home}/chats.jsonl "
    words += f"--checkpoint_dir {home}/checkpoints --save_weight {name}"
    return [*words.split(), *map(str, more)]


def test_questions_are_asked_at_each_evaluation_and_leave_no_trace(home, capsys):
    plain = run_stage(STAGE, flags(home, "plain"))
    assert " right (" not in capsys.readouterr().out, "the embedded ones are about a world that it never saw"
    asked = run_stage(STAGE, flags(home, "asked", "--questions", home / "questions.jsonl"))
    printed = capsys.readouterr().out
    assert "questions: 6 of" in printed and "1 are longer than the model's 512 positions" in printed
    assert printed.count("/6 right") == 3
    first, second = (load_file(folder / "model.safetensors") for folder in (plain, asked))
    assert all(torch.equal(first[name], second[name]) for name in first)
    records = [json.loads(line) for line in (asked / "metrics.jsonl").read_text().splitlines()]
    found = {record["step"]: record for record in records if "question_accuracy" in record}
    assert sorted(found) == [0, 2, 4] and set(found[4]) >= {"question_accuracy_family 0", "question_accuracy_family 1"}


def test_so_many_are_asked_and_a_broken_file_is_named_before_the_first_step(home, capsys):
    run_stage(STAGE, flags(home, "two", "--questions", home / "questions.jsonl", "--eval_questions", 2))
    assert "/2 right" in capsys.readouterr().out
    run_stage(STAGE, flags(home, "none", "--questions", home / "questions.jsonl", "--eval_questions", 0))
    assert "right (" not in capsys.readouterr().out
    joined = {"prompt": "th", "delimiter": "", "choices": ["e", "is"], "answer": 0, "id": "joined"}
    write_rows(home / "joined.jsonl", [joined])
    with pytest.raises(ValueError, match="the question joined: the choice .* has no token of its own"):
        run_stage(STAGE, flags(home, "none", "--questions", home / "joined.jsonl"))
    with pytest.raises(ValueError, match="nowhere.jsonl: the questions cannot be read"):
        run_stage(STAGE, flags(home, "broken", "--questions", "nowhere.jsonl"))
    with pytest.raises(ValueError, match="--eval_questions -1 must not be negative"):
        run_stage(STAGE, flags(home, "broken", "--eval_questions", -1))


def test_the_embedded_questions_are_the_validation_parts(home, capsys):
    words = flags(home, "embedded", "--eval_questions", 3)
    run_stage(STAGE, words)
    assert "questions: 3 of" in (printed := capsys.readouterr().out) and "eval.val.jsonl" in printed
