"""The evaluation command end to end on a tiny random model: what it writes, prints, and says about mistakes."""

import json
import sys

import pytest
import torch

import eval.eval_llm as eval_llm
from dataset.builtin.question import message
from eval.questions import load_questions
from eval.stages import (
    command_line,
    evaluate_losses,
    evaluate_stage,
    loss_data_of,
    questions_fingerprint,
    read_evaluation,
    short_path,
    write_evaluation,
)
from model.config import MiniMindConfig
from model.model_minimind import MiniMindForCausalLM
from trainer.config import user_errors
from trainer.weights import open_model

CHAT = [message("user", "Where does Mira live?"), message("assistant", "Mira lives in Redmill.")]


def write(path, *rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    torch.manual_seed(0)
    config = MiniMindConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    path = tmp_path_factory.mktemp("out") / "full_sft_32"
    MiniMindForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def data(tmp_path):
    return write(tmp_path / "val.jsonl", {"text": "Mira lives in Redmill."}, {"conversations": CHAT}, {"text": "山谷"})


@pytest.fixture
def questions(tmp_path):
    rows = [
        {"id": f"{family}-{language}-{index}", "family": family, "language": language, "conversations": CHAT[:1],
         "answers": [answer], "check": "number" if answer == "4" else "exact", "free_arithmetic": answer == "4"}
        for family, answer in (("home", "Mira lives in Redmill."), ("sum", "4"))
        for language in ("en", "zh") for index in range(3)
    ]  # fmt: skip
    return write(tmp_path / "questions.jsonl", *rows)


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["eval_llm.py", *map(str, words)])
    with user_errors():
        eval_llm.main()


def test_writes_losses_scores_and_replies(monkeypatch, capsys, folder, data, questions):
    words = (
        "--model_path",
        folder,
        "--data_path",
        data,
        "--questions",
        questions,
        "--max_new_tokens",
        6,
        "--dtype",
        "float32",
    )
    run(monkeypatch, *words, "--device", "cpu")
    printed = capsys.readouterr().out
    result = read_evaluation(folder)
    assert result["model"] == "full_sft_32" and result["command"].startswith("python eval_llm.py --model_path")
    assert set(result["losses"]) == {"text", "chat"}
    for sums in result["losses"].values():
        assert sums["loss"] == pytest.approx(8.7, abs=0.4) and sums["bytes"] > 0 and sums["bits_per_byte"] > 0
    assert result["scores"]["questions"] == 12 and len(result["scores"]["families"]) == 4
    assert result["questions"]["count"] == 12 and len(result["samples"]) == 4
    replies = [json.loads(line) for line in (folder / "eval_replies.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [reply["id"] for reply in replies][:2] == ["home-en-0", "home-en-1"] and len(replies) == 12
    for word in ("home", "sum *", "0/3", "[0%-56%]", "(100%)", "bits per byte", "turns that the model ended", "saved"):
        assert word in printed, word


def test_two_runs_agree(folder, tokenizer, questions, data):
    model = open_model(folder)
    loaded = eval_llm.load_questions(questions)
    loss_data = loss_data_of([str(data)], tokenizer, window=64)
    (first, _), (second, _) = (
        evaluate_stage(model, tokenizer, loss_data, loaded, torch.float32, batch_size=size, max_new_tokens=4)
        for size in (8, 3)
    )
    assert first["samples"] == second["samples"]
    assert first["losses"]["text"]["loss"] == pytest.approx(second["losses"]["text"]["loss"], abs=1e-6)


def test_bfloat16_replies_leave_the_weights_alone(folder, tokenizer, questions):
    model = open_model(folder)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loaded = eval_llm.load_questions(questions)[:2]
    evaluate_stage(model, tokenizer, {}, loaded, torch.bfloat16, max_new_tokens=2)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_several_files_are_told_apart_and_what_holds_no_token_is_an_error(tmp_path, tokenizer, folder, data):
    second = write(tmp_path / "more.jsonl", {"text": "More text."})
    assert set(loss_data_of([str(data), str(second)], tokenizer)) == {
        "val.jsonl (text)", "val.jsonl (chat)", "more.jsonl (text)",
    }  # fmt: skip
    with pytest.raises(ValueError, match="nothing.jsonl does not exist"):
        loss_data_of([str(tmp_path / "nothing.jsonl")], tokenizer)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    late = write(tmp_path / "late.jsonl", *([{"text": "Some text."}] * 1200), {"conversations": chat})
    assert set(loss_data_of([str(late)], tokenizer)) == {"text", "chat"}
    broken = write(tmp_path / "broken.jsonl", {"words": "x"})
    with pytest.raises(ValueError, match="broken.jsonl"):
        loss_data_of([str(broken)], tokenizer)
    model = open_model(folder)
    with pytest.raises(ValueError, match="'empty' has no token to predict"):
        evaluate_losses(model, tokenizer, {"empty": []}, torch.float32, 4)


def test_commands_and_paths_are_those_of_a_reader_at_the_root(monkeypatch):
    monkeypatch.setattr(sys, "argv", [eval_llm.__file__, "--questions", "my file.jsonl"])
    assert command_line() == "python eval/eval_llm.py --questions 'my file.jsonl'"
    assert short_path("/elsewhere/a.jsonl") == "/elsewhere/a.jsonl"


def test_the_fingerprint_follows_the_questions(questions):
    loaded = eval_llm.load_questions(questions)
    assert questions_fingerprint(loaded) == questions_fingerprint(list(loaded))
    assert questions_fingerprint(loaded) != questions_fingerprint(loaded[1:])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--save_dir", "{tmp}"),
            "--weight full_sft: no such finished model in {tmp}; make it with: python trainer/train_full_sft.py",
        ),
        (("--save_dir", "{tmp}", "--weight", "pretrain"), "make it with: python trainer/train_pretrain.py"),
        (("--save_dir", "{tmp}", "--weight", "mine"), "finished stages are pretrain, mid_train, full_sft"),
        (("--model_path", "{tmp}/nothing"), "--model_path {tmp}/nothing: no model there"),
        (("--questions", "{tmp}/none.jsonl"), "{tmp}/none.jsonl: the questions cannot be read"),
        (("--max_questions", "-1"), "--max_questions -1 must not be negative"),
        (("--batch_size", "0"), "--batch_size 0 must be at least 1"),
        (("--wieght", "x"), "unknown flag --wieght (did you mean --weight?)"),
        (("--split", "train"), "--split"),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(monkeypatch, capsys, tmp_path, questions, words, message):
    words = [word.format(tmp=tmp_path) for word in words]
    if "--questions" not in words:
        words += ["--questions", str(questions)]
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *words)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message.format(tmp=tmp_path) in error and len(error.splitlines()) == 1


def test_an_evaluation_on_other_questions_is_kept(tmp_path):
    for fingerprint in ("a" * 64, "b" * 64, "b" * 64):
        write_evaluation(tmp_path, {"questions": {"fingerprint": fingerprint}}, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "eval.aaaaaaaa.json", "eval.json", "eval_replies.aaaaaaaa.jsonl", "eval_replies.jsonl"
    ]  # fmt: skip


def test_files_of_one_name_are_two_sets(tmp_path, tokenizer):
    paths = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        paths.append(str(write(tmp_path / folder / "val.jsonl", {"text": f"Text of {folder}, which is long enough."})))
    assert list(loss_data_of(paths, tokenizer)) == [f"{path} (text)" for path in paths]


def test_names_with_brackets_are_no_markup_and_choices_are_no_turns(monkeypatch, capsys, folder, tmp_path):
    row = {"prompt": "A or B?", "choices": ["A", "B"], "answer": 0, "family": "a[/b][math]"}
    asked = write(tmp_path / "choices.jsonl", row)
    text = write(tmp_path / "text.jsonl", {"text": "Some text."})
    run(monkeypatch, "--model_path", folder, "--data_path", text, "--questions", asked, "--device", "cpu")
    printed = capsys.readouterr().out
    assert "a[/b][math]" in printed and "turns that the model ended" not in printed


def test_weights_that_are_no_numbers_choose_nothing(folder, tokenizer, tmp_path):
    model = open_model(folder)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    row = {"prompt": "A or B?", "choices": ["A", "B"], "answer": 0}
    questions = load_questions(write(tmp_path / "choices.jsonl", row))
    result, report = evaluate_stage(model, tokenizer, {}, questions, torch.float32)
    assert result["scores"]["right"] == 0
    path = write_evaluation(tmp_path, result, report)
    assert json.loads(path.with_name("eval_replies.jsonl").read_text())["log_likelihoods"] == [None, None]


@pytest.mark.parametrize("before", [{"questions": []}, {"questions": {"fingerprint": 5}}, {"questions": None}])
def test_an_odd_evaluation_is_replaced(tmp_path, before):
    (tmp_path / "eval.json").write_text(json.dumps(before))
    write_evaluation(tmp_path, {"questions": {"fingerprint": "abc"}}, None)
    assert read_evaluation(tmp_path) == {"questions": {"fingerprint": "abc"}}
