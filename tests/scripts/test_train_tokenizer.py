"""The tokenizer trainer: reserved ids, agreement with transformers, determinism, the report, and its errors."""

import itertools
import json
import os
import subprocess
import sys
import unicodedata

import pytest
from transformers import AutoTokenizer

from scripts import train_tokenizer as script
from tests.conftest import ROOT

ENGLISH = [f"The cat number {number} sat on the mat. Don't you see the {number % 7} mats?" for number in range(60)]
CHINESE = [f"第{number}只猫的垫子在家里，亚当是它的朋友。你好，世界！" for number in range(60)]
CHATS = [
    {
        "conversations": [
            {"role": "user", "content": f"Where is cat {number}?"},
            {"role": "assistant", "content": "Here."},
        ]
    }
    for number in range(90)
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    rows = [{"text": text} for text in ENGLISH + CHINESE] + CHATS
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def run(arguments, folder, module=False, **environment):
    """The script as its users run it, from another folder."""
    entry = ["-m", "scripts.train_tokenizer"] if module else [str(ROOT / "scripts" / "train_tokenizer.py")]
    return subprocess.run(
        [sys.executable, *entry, *map(str, arguments)], cwd=ROOT if module else folder, capture_output=True, text=True,
        env=os.environ | environment, timeout=120,
    )  # fmt: skip


def main(monkeypatch, *arguments):
    """The script's main in this process; errors come out as they are."""
    monkeypatch.setattr(sys, "argv", ["train_tokenizer.py", *map(str, arguments)])
    script.main()


def test_same_input_gives_the_same_bytes(corpus, tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for number, folder in enumerate(folders):
        arguments = ["--data_path", corpus, "--vocab_size", "500", "--save_dir", folder]
        environment = {"PYTHONHASHSEED": str(number + 1), "TOKENIZERS_PARALLELISM": ["false", "true"][number]}
        result = run(arguments, tmp_path, module=bool(number), **environment)
        assert result.returncode == 0, result.stderr
        assert "round trip: " in result.stdout and "chinese" in result.stdout and f"saved {folder}" in result.stdout
    for name in script.FILES:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"], "nothing temporary is left"


@pytest.fixture(scope="module")
def trained(corpus):
    return script.train(script.documents([str(corpus)], "all", quiet=True), 380)


def test_reserved_ids_and_alphabet(trained):
    expected = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>",
                "</tool_response>", "<think>", "</think>", *(f"<|buffer{n}|>" for n in range(1, 28))]  # fmt: skip
    added = trained.get_added_tokens_decoder()
    assert [added[index].content for index in range(36)] == expected
    assert [index for index in range(36) if not added[index].special] == list(range(3, 9))
    assert trained.get_vocab_size() == 380
    many_bytes = " ".join(map(chr, range(2500)))
    assert trained.decode(trained.encode(many_bytes).ids) == unicodedata.normalize("NFC", many_bytes)
    assert sum(len(token) == 1 for token in trained.get_vocab()) == 256


def test_learned_tokens_are_words_not_clauses(trained):
    words = [trained.decode([index]) for index in range(36 + 256, trained.get_vocab_size())]
    assert "亚当" in words and " mats" in words
    assert all(
        len(token) < script.TOKEN_BYTES_LIMIT for token in trained.get_vocab() if token not in script.RESERVED_TOKENS
    )
    assert not [word for word in words if len(word) > 1 and set(word) & set("的是在了和，。")]
    assert not [word for word in words if len(word) > 1 and any(character.isdigit() for character in word)]


def test_roles_of_chats_are_learned(trained):
    assert len(trained.encode("assistant\n").ids) <= 2


def test_transformers_cuts_alike_in_a_model_folder(corpus, tmp_path, monkeypatch):
    main(monkeypatch, "--data_path", corpus, "--vocab_size", "500", "--save_dir", tmp_path / "tok")
    plain = AutoTokenizer.from_pretrained(tmp_path / "tok")
    (tmp_path / "tok" / "config.json").write_text('{"model_type": "qwen3"}')
    in_model = AutoTokenizer.from_pretrained(tmp_path / "tok")
    in_model.save_pretrained(tmp_path / "again")
    raw = script.Tokenizer.from_file(str(tmp_path / "tok" / "tokenizer.json"))
    markup = "<think>\na</think>\n\nb<tool_call>\n{}</tool_call><|im_end|>\n"
    for text in [*script.HARD_STRINGS, *ENGLISH[:3], *CHINESE[:3], markup]:
        ids = raw.encode(text).ids
        for tokenizer in (plain, in_model, AutoTokenizer.from_pretrained(tmp_path / "again")):
            assert tokenizer(text).input_ids == ids
            assert tokenizer.decode(ids) == raw.decode(ids, skip_special_tokens=False)
    assert plain.decode(plain(markup).input_ids, skip_special_tokens=True) == markup.replace("<|im_end|>", "")
    assert (plain.pad_token_id, plain.bos_token_id, plain.eos_token_id, plain.unk_token_id) == (0, 1, 2, 0)
    assert plain.chat_template == in_model.chat_template
    assert plain.model_max_length == 32768


def test_documents_stream(trained):
    taken = []
    endless = (taken.append(number) or [ENGLISH[number % 60]] for number in itertools.count())
    script.train(itertools.islice(endless, 25), 300)
    assert len(taken) == 25


def test_max_documents(corpus, tmp_path, monkeypatch):
    main(
        monkeypatch,
        "--data_path",
        corpus,
        "--max_documents",
        "40",
        "--vocab_size",
        "400",
        "--save_dir",
        tmp_path / "tok",
    )
    vocabulary = AutoTokenizer.from_pretrained(tmp_path / "tok").get_vocab()
    chinese_bytes = [token for token in vocabulary if token.startswith("ä") and len(token) == 3]
    assert not chinese_bytes, "the Chinese documents come after the first 40"


def test_report_and_comparison(corpus, tmp_path, monkeypatch, capsys):
    arguments = ["--data_path", corpus, "--val_path", corpus, "--vocab_size", "600", "--save_dir", tmp_path / "tok"]
    main(monkeypatch, *arguments, "--compare_with", ROOT / "model" / "tokenizer")
    report = json.loads((tmp_path / "tok" / "tokenizer_report.json").read_text())
    assert report["round_trip"]["failed"] == 0
    assert report["compression"]["english"]["documents"] == len(ENGLISH) + len(CHATS)
    assert report["compression"]["chinese"]["documents"] == len(CHINESE)
    all_text = report["compression"]["all"]
    size = sum(row["bytes_per_token"] * row["tokens"] for name, row in report["compression"].items() if name != "all")
    assert all_text["bytes_per_token"] * all_text["tokens"] == pytest.approx(size, rel=1e-3)
    assert report["compared_with"]["compression"]["all"]["documents"] == all_text["documents"]
    assert str(tmp_path) not in json.dumps(report), "no paths of the machine that it was made on"
    assert "new/old tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--vocab_size", "291"], "--vocab_size 291 must be at least 292"),
        (["--max_documents", "-1"], "--max_documents -1 must not be negative"),
        (["--compare_with", "nowhere"], "--compare_with nowhere is not a tokenizer folder"),
        (["--data_path", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["--save_dir", str(ROOT / "dataset")], "holds other things"),
        (["--save_dir", str(ROOT / "README.md")], "is a file; give a folder"),
    ],
)
def test_errors_leave_nothing_behind(corpus, tmp_path, monkeypatch, arguments, problem):
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "--save_dir" and arguments[1].endswith("README.md"):
        (tmp_path / "file").write_text("x")
        arguments = ["--save_dir", str(tmp_path / "file")]
    defaults = ["--data_path", corpus, "--save_dir", tmp_path / "tok"]
    with pytest.raises(ValueError, match=problem):
        main(monkeypatch, *defaults, *arguments)
    assert not (tmp_path / "tok").exists()


def test_command_line_errors_are_one_line(tmp_path):
    result = run(["--data_path", "nowhere.jsonl", "--save_dir", "tok"], tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("error: nowhere.jsonl does not exist") and result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_shipped_tokenizer_is_whole(tokenizer):
    report = json.loads((ROOT / "model" / "tokenizer" / "tokenizer_report.json").read_text())
    assert report["round_trip"]["failed"] == 0 and report["vocabulary"] == len(tokenizer)
    assert [tokenizer.decode([index]) for index in range(36)] == script.RESERVED_TOKENS
    assert report["compression"]["english"]["bytes_per_token"] > 3
    assert report["compression"]["chinese"]["characters_per_token"] > 1.5
