"""What bad input gets: one message that names it and the way out, and nothing written."""

import json
import signal
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from model.config import MiniMindConfig
from model.model_minimind import MiniMindForCausalLM
from scripts.mid_train import STAGE as MID_TRAIN
from trainer import results, weights
from trainer.config import ROOT
from trainer.stage import run_stage
from trainer.train_full_sft import STAGE as SFT
from trainer.train_pretrain import STAGE as PRETRAIN

TINY = "--hidden_size 32 --num_hidden_layers 1 --max_steps 1 --batch_size 2 --max_seq_len 32".split()
TINY += ["--device", "cpu", "--dtype", "float32"]
SHAPE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}


def write_rows(path, rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return str(path)


def good_texts(count=40):
    return [{"text": f"A sound row, number {index}, with some words in it."} for index in range(count)]


def message_of(stage, tmp_path, *flags):
    """Run a stage that must fail; its message, after checking that it left nothing behind."""
    before = sorted(path for path in tmp_path.rglob("*"))
    folders = ["--save_dir", str(tmp_path / "out"), "--checkpoint_dir", str(tmp_path / "checkpoints")]
    with pytest.raises(ValueError, match=".") as caught:
        run_stage(stage, [*folders, *flags])
    assert sorted(path for path in tmp_path.rglob("*")) == before
    return str(caught.value)


def pretrain_message(tmp_path, data, *flags):
    return message_of(PRETRAIN, tmp_path, *TINY, "--data_path", data, *flags)


def test_a_missing_file(tmp_path):
    message = pretrain_message(tmp_path, str(tmp_path / "nowhere.jsonl"))
    assert "nowhere.jsonl does not exist" in message and "give a file" in message


def test_an_empty_file(tmp_path):
    assert "empty.jsonl is empty" in pretrain_message(tmp_path, write_rows(tmp_path / "empty.jsonl", []))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"text": "cut of', "not valid JSON"),
        ("[1, 2]", "not a JSON object"),
        ({"words": "?"}, "no known row format: its keys are 'words'"),
        ({"text": 5}, "'text' is"),
        ({"text": "  "}, "the text is empty"),
    ],
)
def test_a_bad_row_under_strict_is_named_by_file_and_line(tmp_path, row, reason):
    data = write_rows(tmp_path / "data.jsonl", [*good_texts(6), row, *good_texts(30)])
    message = pretrain_message(tmp_path, data, "--strict", "1")
    assert "data.jsonl:7: " in message and reason in message


def test_too_many_bad_rows(tmp_path):
    data = write_rows(tmp_path / "data.jsonl", [*good_texts(37), "{", "{", "{"])
    message = pretrain_message(tmp_path, data)
    assert "3 of 40 rows cannot be used (7.5%)" in message and "data.jsonl:38: not valid JSON" in message


def test_a_few_bad_rows_are_reported_and_the_run_goes_on(tmp_path, capsys):
    data = write_rows(tmp_path / "data.jsonl", [*good_texts(39), "{"])
    folders = ["--save_dir", str(tmp_path / "out"), "--checkpoint_dir", str(tmp_path / "checkpoints")]
    folder = run_stage(PRETRAIN, [*folders, *TINY, "--data_path", data])
    assert (folder / "model.safetensors").is_file()
    assert "data.jsonl:40: not valid JSON" in capsys.readouterr().out
    settings = (tmp_path / "checkpoints" / folder.name / "settings.yaml").read_text(encoding="utf-8")
    assert "max_seq_len: 32" in settings and "schedule: wsd" in settings  # a flag's value, and the stage's own default


def test_documents_where_conversations_are_expected(tmp_path):
    model_folder(tmp_path / "out" / "pretrain_32")
    data = write_rows(tmp_path / "data.jsonl", good_texts())
    message = message_of(SFT, tmp_path, "--data_path", data, "--max_steps", "1")
    assert "data.jsonl:1: a {'text'} row is a document; here conversations are expected" in message


def model_folder(folder, **overrides):
    tokenizer = AutoTokenizer.from_pretrained(str(weights.DEFAULT_TOKENIZER))
    vocabulary = -(-len(tokenizer) // 64) * 64
    model = MiniMindForCausalLM(MiniMindConfig(**(SHAPE | {"vocab_size": vocabulary} | overrides)))
    with results.writing_result(folder, {"stage": "x"}, "card", folder / "none") as temporary:
        results.save_model(model, tokenizer, temporary)


def test_a_tokenizer_that_does_not_fit_the_model(tmp_path):
    model_folder(tmp_path / "out" / "pretrain_32", vocab_size=256)
    message = message_of(SFT, tmp_path, "--from_weight", "pretrain", "--max_steps", "1")
    assert "tokens, more than the 256 of the weights" in message and "--tokenizer_path" in message


def test_weights_of_another_shape(tmp_path):
    model_folder(tmp_path / "out" / "pretrain_32")
    message = message_of(MID_TRAIN, tmp_path, "--num_hidden_layers", "3", "--use_moe", "0")
    assert (
        "--num_hidden_layers 3 contradicts" in message and "whose num_hidden_layers is 1; leave the flag out" in message
    )


def test_a_weights_file_that_does_not_fit_its_config(tmp_path):
    folder = tmp_path / "out" / "pretrain_32"
    model_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    message = message_of(SFT, tmp_path, "--from_weight", "pretrain", "--max_steps", "1")
    assert "do not fit their config.json" in message and "model.layers.1" in message


def test_an_output_folder_that_holds_a_model_of_another_shape(tmp_path):
    model_folder(tmp_path / "out" / "pretrain_32", num_hidden_layers=2)
    message = pretrain_message(tmp_path, write_rows(tmp_path / "data.jsonl", good_texts()))
    assert "holds a model whose num_hidden_layers is 2, this run's is 1" in message and "--save_weight" in message


def test_no_weights_to_start_from(tmp_path):
    assert "make it with: python trainer/train_pretrain.py" in message_of(MID_TRAIN, tmp_path)
    assert "make it with: python scripts/mid_train.py or python trainer/train_pretrain.py" in message_of(SFT, tmp_path)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--learning_rat", "1"], "unknown flag --learning_rat (did you mean --learning_rate?)"),
        (["--schedule", "square"], "invalid choice: 'square'"),
        (["--preset", "giant"], "--preset giant: unknown; use one of auto, nano"),
        (["--device", "toaster"], "--device toaster: not a device"),
        (["--batch_size", "-3"], "--batch_size -3 must be above 0"),
        (["--hidden_size", "30", "--num_hidden_layers", "1"], "hidden_size 30 is not divisible by num_attention_heads"),
    ],
)
def test_an_unknown_flag_or_value(tmp_path, flags, expected):
    data = write_rows(tmp_path / "data.jsonl", good_texts())
    assert expected in message_of(PRETRAIN, tmp_path, "--data_path", data, *flags)


def test_the_command_prints_one_line_and_leaves_with_2(tmp_path):
    words = ["--data_path", str(tmp_path / "nowhere.jsonl"), *TINY]
    done = subprocess.run(
        [sys.executable, str(ROOT / "trainer/train_pretrain.py"), *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith(f"error: {tmp_path}/nowhere.jsonl does not exist")
    assert "Traceback" not in done.stderr and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_tokenising_ends_it_at_once_and_leaves_nothing(tmp_path, number):
    rows = "".join(json.dumps({"text": f"row {index} " * 200}) + "\n" for index in range(60_000))
    (tmp_path / "large.jsonl").write_text(rows)
    command = [sys.executable, str(ROOT / "scripts/prepare_data.py"), "--data_path", "large.jsonl"]
    command += ["--cache_dir", str(tmp_path / "cache"), "--save_dir", str(tmp_path / "card")]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert line.startswith("tokenising large.jsonl: ") and " s left" in line
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert not (tmp_path / "card").exists()
    left = list((tmp_path / "cache").iterdir())
    assert not [folder for folder in left if not folder.name.startswith(".")], "nothing that a later start would take"
    assert number == signal.SIGTERM or left == []
