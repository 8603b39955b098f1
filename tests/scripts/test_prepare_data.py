"""The data card: its numbers against counts by hand, its samples, its picture, and a stage that then starts at once."""

import json
import subprocess
import sys

import pytest
from PIL import Image
from rich.console import Console

from dataset import units
from dataset.card import describe_data, padded_fill_rate, sample_of, samples, samples_page
from dataset.chat import plain_encoder
from dataset.lm_dataset import MixtureDataset, PretrainDataset, SFTDataset
from scripts import prepare_data
from tests.conftest import ROOT
from trainer.config import DataArguments
from trainer.data import build_sft_data

ENGLISH, CHINESE = "The cat sat on the mat.", "猫坐在垫子上。"


def write(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_the_numbers_are_those_of_the_text(tokenizer, tmp_path):
    rows = [{"text": ENGLISH}] * 3 + [{"text": CHINESE}] * 2 + [{"text": "long " * 100}]
    path = write(tmp_path / "a.jsonl", rows)
    card = describe_data(PretrainDataset(path, tokenizer, 32, say=None), tokenizer)
    size = {text: len(plain_encoder(tokenizer).encode(text).ids) + 2 for text in (ENGLISH, CHINESE, "long " * 100)}
    assert card["languages"]["chinese"] == {
        "units": 2,
        "tokens": 2 * size[CHINESE],
        "characters": 2 * len(CHINESE),
        "bytes": 2 * len(CHINESE.encode()),
        "bytes_per_token": round(len(CHINESE.encode()) / size[CHINESE], 3),
        "characters_per_token": round(len(CHINESE) / size[CHINESE], 3),
    }
    assert card["languages"]["english"]["characters"] == 3 * len(ENGLISH) + 500
    assert card["exact_duplicates"] == 3 and card["longer_than_window"] == 1
    assert card["lengths"]["documents"]["0%"] == min(size.values())
    assert card["lengths"]["documents"]["100%"] == size["long " * 100]
    assert card["sources"][0]["rows"] == 6 and card["summary"]["documents"] == 6
    dropped = describe_data(PretrainDataset(path, tokenizer, 32, dedup=True, say=None), tokenizer)
    assert dropped["exact_duplicates"] == 3 and dropped["summary"]["documents"] == 3
    assert json.loads(json.dumps(card)) == card


def test_padding_by_hand():
    assert padded_fill_rate(units.np.array([10, 5]), 10) == 0.75
    assert padded_fill_rate(units.np.array([19]), 10) == 19 / 20, "two pieces that share a token"


def test_repetitions_of_a_mixture_are_no_duplicates(tokenizer, tmp_path):
    first = write(tmp_path / "a.jsonl", [{"text": f"one {number}"} for number in range(50)])
    second = write(tmp_path / "b.jsonl", [{"text": f"two {number}"} for number in range(5)])
    data = MixtureDataset([f"{first}:1", f"{second}:1"], tokenizer, 32, say=None)
    card = describe_data(data, tokenizer)
    assert card["exact_duplicates"] == 0 and card["sources"][1]["passes"] > 4


def test_samples_show_what_is_trained(tokenizer, tmp_path):
    data = SFTDataset(write(tmp_path / "a.jsonl", [chat("Who?", "Me <b>.")]), tokenizer, 64, say=None)
    question = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    expected = [(question, False), ("Me <b>.<|im_end|>", True), ("\n", False)]
    assert samples(data, tokenizer) == [expected] == [sample_of(data.units, 0, tokenizer)]
    page = samples_page([expected])
    assert "<mark>Me &lt;b&gt;.&lt;|im_end|&gt;</mark>" in page and "<b>" not in page
    document = PretrainDataset(write(tmp_path / "b.jsonl", [{"text": "x " * 900}]), tokenizer, 64, say=None)
    first = samples(document, tokenizer, 3)[0]
    assert first[0] == ("<|endoftext|>", False) and first[-1] == (" …", False) and len(first) == 3


def test_samples_are_marked_without_colour_too(capsys):
    prepare_data.print_samples([[("asked ", False), ("[said]", True)]], Console())
    assert "asked ⟦[said]⟧" in capsys.readouterr().out
    console = Console(force_terminal=True, color_system="standard", legacy_windows=False)
    prepare_data.print_samples([[("asked ", False), ("[said]", True)]], console)
    printed = capsys.readouterr().out
    assert "\x1b[" in printed and "32m[said]" in printed and "⟦" not in printed


def test_a_prepared_stage_tokenises_nothing(tokenizer, tmp_path, monkeypatch):
    rows = [chat(f"Question {number}?", f"Answer {number}.") for number in range(60)]
    path = write(tmp_path / "a.jsonl", [*rows, {"bad": 1}])
    command = [
        sys.executable, str(ROOT / "scripts" / "prepare_data.py"), "--stage", "full_sft", "--data_path", path,
        "--cache_dir", str(tmp_path / "cache"), "--save_dir", str(tmp_path / "card"),
    ]  # fmt: skip
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert f"{path}:61: no known row format" in run.stdout and "Answer " in run.stdout and "⟦" in run.stdout
    for words in ("english", "packed: ", "filled", "exact duplicates: 0", "have a loss", "bytes/token"):
        assert words in run.stdout, words
    card = json.loads((tmp_path / "card" / "card.json").read_text())
    assert card["stage"] == "full_sft" and card["sources"][0]["unusable_rows"] == 1
    assert Image.open(tmp_path / "card" / "lengths.png").size == (1200, 600)
    assert (tmp_path / "card" / "samples.html").read_text().count("<mark>") == 10
    monkeypatch.setattr(units.UnitMaker, "make", None)
    arguments = DataArguments(data_path=[path], max_seq_len=256, cache_dir=str(tmp_path / "cache"))
    train, _ = build_sft_data(arguments, tokenizer, 42)
    assert train.summary.to_dict() == card["summary"]


@pytest.mark.parametrize(
    "flags, problem",
    [
        (["--data_path", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["--stage", "sleep"], "invalid choice: 'sleep'"),
        (["--streaming", "1"], "there is nothing to prepare"),
        (["--num_samples", "-1"], "--num_samples -1 must not be negative"),
        (["--tokenizer_path", "nowhere"], "nowhere"),
    ],
)
def test_mistakes(monkeypatch, flags, problem):
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", *flags])
    with pytest.raises(ValueError, match=problem):
        prepare_data.main()
