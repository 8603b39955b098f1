"""Talking: whole characters only, thinking and tools apart, commands, pipes, and Ctrl-C."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import scripts.chat as chat
from dataset.chat import render_prompt
from model.config import MiniMindConfig
from model.decoding import Decoder
from model.model_minimind import MiniMindForCausalLM
from scripts.chat import Printer
from scripts.serving import conversation as talking
from scripts.serving import local_model
from scripts.serving.conversation import Conversation, Event
from scripts.serving.local_model import LocalModel, ReplyDecoder
from scripts.serving.sampling import SamplingArguments
from trainer.config import ModelChoice, user_errors

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    config = MiniMindConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=1024,
    )  # fmt: skip
    return MiniMindForCausalLM(config)


@pytest.fixture(scope="module")
def folder(model, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("out") / "full_sft_32"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def feed(decoder, ids):
    return [event for token_id in ids if (event := decoder.feed(token_id))]


def split_ids(tokenizer, text):
    """A text as one token a byte, which is how a character that the vocabulary lacks arrives."""
    alphabet = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [tokenizer.convert_tokens_to_ids(letter) for word, _ in alphabet for letter in word]


def test_half_characters_are_never_shown(tokenizer):
    text = "米拉 lives in 山谷🙂!"
    ids = split_ids(tokenizer, text)
    assert len(ids) == len(text.encode()) and None not in ids
    events = feed(ReplyDecoder(tokenizer, thinking=False), ids)
    assert "".join(event.text for event in events) == text
    assert all("\ufffd" not in event.text for event in events)
    assert len(events) == len(text), "each character is shown as soon as it is whole"


def test_a_character_cut_off_by_the_end_is_not_shown(tokenizer):
    ids = split_ids(tokenizer, "好a山")[:-1]
    assert "".join(event.text for event in feed(ReplyDecoder(tokenizer, thinking=False), ids)) == "好a"


def test_thinking_and_answer_are_told_apart(tokenizer):
    ids = tokenizer("<think>\nLina is her sister.\n</think>\n\nLina.", add_special_tokens=False)["input_ids"]
    events = feed(ReplyDecoder(tokenizer, thinking=False), ids)
    assert "".join(event.text for event in events if event.kind == "thinking").strip() == "Lina is her sister."
    assert "".join(event.text for event in events if event.kind == "text") == "Lina."
    # With --open_thinking 1 the prompt has opened the block already.
    events = feed(ReplyDecoder(tokenizer, thinking=True), ids[1:])
    assert events[0].kind == "thinking" and events[-1].kind == "text"


CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "12 + 30"}}\n</tool_call>'


class Script:
    """Stands in for `stream_tokens`: gives the next planned reply, and keeps the prompts."""

    def __init__(self, tokenizer, *replies):
        self.tokenizer, self.replies, self.prompts, self.options = tokenizer, list(replies), [], []

    def __call__(self, model, prompt, **options):
        self.prompts.append(prompt)
        self.options.append(options)
        return iter(self.tokenizer(self.replies.pop(0), add_special_tokens=False)["input_ids"])


def talk(monkeypatch, model, tokenizer, *replies, window=256, sampling=None, seed=42, **options):
    script = Script(tokenizer, *replies)
    monkeypatch.setattr(local_model, "stream_tokens", script)
    here = LocalModel(Decoder(model), tokenizer, sampling or SamplingArguments(), window, seed)
    return Conversation(here, **options), script


def test_turns_build_up_and_clear_forgets_all_but_the_system_message(monkeypatch, model, tokenizer):
    conversation, script = talk(monkeypatch, model, tokenizer, "Hello!", "Fine.", "Hi.", system="Be brief.")
    assert "".join(event.text for event in conversation.say("Hi")) == "Hello!"
    list(conversation.say("How are you?"))
    system = {"role": "system", "content": "Be brief."}
    said = [system, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    assert script.prompts[1] == render_prompt([*said, {"role": "user", "content": "How are you?"}], tokenizer)
    conversation.clear()
    list(conversation.say("Hi"))
    assert script.prompts[2] == script.prompts[0] == render_prompt(said[:2], tokenizer)


def test_sampling_reaches_the_sampler_and_each_reply_has_its_own_seed(monkeypatch, model, tokenizer):
    sampling = SamplingArguments(temperature=0.3, top_p=0.5, top_k=7, max_new_tokens=9)
    conversation, script = talk(monkeypatch, model, tokenizer, "a", "b", sampling=sampling, seed=5)
    list(conversation.say("x"))
    list(conversation.say("y"))
    wanted = {"temperature": 0.3, "top_p": 0.5, "top_k": 7, "max_new_tokens": 9, "stop_ids": [tokenizer.eos_token_id]}
    assert script.options == [wanted | {"seed": 5}, wanted | {"seed": 6}]


def test_tools_run_by_themselves_and_are_shown(monkeypatch, model, tokenizer):
    conversation, script = talk(monkeypatch, model, tokenizer, CALL, "The result is 42.", use_tools=True)
    events = list(conversation.say("What is 12 + 30?"))
    assert Event("call", 'calculate({"expression": "12 + 30"})') in events and Event("result", "42") in events
    assert "".join(event.text for event in events if event.kind == "text") == "The result is 42."
    assert '"calculate"' in tokenizer.decode(script.prompts[0]) and '"lookup"' in tokenizer.decode(script.prompts[0])
    assert "<tool_response>\n42\n</tool_response>" in tokenizer.decode(script.prompts[1])


def test_without_tools_a_call_is_shown_and_not_run(monkeypatch, model, tokenizer):
    conversation, script = talk(monkeypatch, model, tokenizer, CALL)
    events = list(conversation.say("What is 12 + 30?"))
    assert [event.kind for event in events] == ["call"] and len(script.prompts) == 1


def test_a_broken_call_is_shown_as_written_and_endless_calls_end(monkeypatch, model, tokenizer):
    conversation, _ = talk(monkeypatch, model, tokenizer, '<tool_call>\n{"name": oops\n</tool_call>', use_tools=True)
    assert "oops" in "".join(event.text for event in conversation.say("?"))
    conversation, script = talk(monkeypatch, model, tokenizer, *[CALL] * 10, use_tools=True)
    events = list(conversation.say("?"))
    assert events[-1].kind == "note" and len(script.prompts) == talking.MAX_TOOL_ROUNDS + 1


def test_old_turns_are_left_out_when_the_window_is_full(monkeypatch, model, tokenizer):
    conversation, script = talk(
        monkeypatch, model, tokenizer, *["Yes, that is so."] * 12, window=120, system="Be brief."
    )
    notes = []
    for turn in range(12):
        notes += [event for event in conversation.say(f"Question number {turn}?") if event.kind == "note"]
    assert notes and "left out" in notes[0].text
    last = tokenizer.decode(script.prompts[-1])
    assert len(script.prompts[-1]) <= 90
    assert "Be brief." in last and "number 11?" in last and "number 0?" not in last


def test_a_message_that_cannot_fit_is_refused_and_forgotten(monkeypatch, model, tokenizer):
    conversation, _ = talk(monkeypatch, model, tokenizer, "ok")
    with pytest.raises(ValueError, match="the model takes 1,024"):
        list(conversation.say("word " * 1200))
    assert conversation.messages == []
    assert [event.text for event in conversation.say("short")]


def test_a_stopped_answer_stays_in_the_conversation(monkeypatch, model, tokenizer):
    conversation, _ = talk(monkeypatch, model, tokenizer, "one two three four five six")
    events = conversation.say("Count.")
    first = next(events)
    events.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": first.text}


def test_ctrl_c_stops_the_answer_and_not_the_talk(monkeypatch, model, tokenizer, capsys):
    conversation, _ = talk(monkeypatch, model, tokenizer, "one")

    def interrupted(model, prompt, **options):
        yield from tokenizer("one two", add_special_tokens=False)["input_ids"]
        raise KeyboardInterrupt

    monkeypatch.setattr(local_model, "stream_tokens", interrupted)
    chat.answer(conversation, Printer(sys.stdout, styled=False), "Count.", interactive=True)
    captured = capsys.readouterr()
    assert captured.out == "one two\n" and "(stopped)" in captured.err
    assert conversation.messages[-1]["content"] == "one two"
    with pytest.raises(KeyboardInterrupt):
        chat.answer(conversation, Printer(sys.stdout, styled=False), "Count.", interactive=False)


def test_ctrl_c_at_the_prompt_does_not_leave(monkeypatch, capsys):
    keys = iter([KeyboardInterrupt, "hello"])

    def press(prompt):
        key = next(keys)
        if key is KeyboardInterrupt:
            raise KeyboardInterrupt
        return key

    monkeypatch.setattr("builtins.input", press)
    assert chat.read_line(interactive=True) == "hello"
    assert "Ctrl-D leaves" in capsys.readouterr().err


def test_commands(monkeypatch, model, tokenizer, capsys):
    conversation, script = talk(monkeypatch, model, tokenizer, "first", "second")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\n/clear\nhello\n/help\n/dance\n/exit\nnever\n"))
    chat.talk_by_line(conversation, Printer(sys.stdout, styled=False), interactive=False)
    captured = capsys.readouterr()
    assert captured.out.startswith("first\nsecond\n/clear") and "unknown command /dance" in captured.err
    assert script.prompts[0] == script.prompts[1] and script.replies == []


EVENTS = [
    Event("thinking", "Hm"),
    Event("thinking", "m.\n"),
    Event("call", "f({})"),
    Event("result", "42"),
    Event("text", "It is 42."),
]


def test_printing_plainly_and_dimmed():
    plain, styled = io.StringIO(), io.StringIO()
    Printer(plain, styled=False).show(EVENTS)
    assert plain.getvalue() == "[thinking] Hmm.\n[call] f({})\n[result] 42\nIt is 42.\n"
    Printer(styled, styled=True).show(EVENTS)
    assert "\033[2mHmm.\n\033[0m\033[36mf({})" in styled.getvalue() and styled.getvalue().endswith("It is 42.\033[0m\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "--temperature -1.0 must not be negative"),
        ({"top_p": 0.0}, "--top_p 0.0 must lie"),
        ({"top_k": -2}, "--top_k -2"),
        ({"max_new_tokens": 0}, "--max_new_tokens 0 must be at least 1"),
    ],
)
def test_flags_out_of_range_are_named(options, message):
    (problem,) = SamplingArguments(**options).problems()
    assert message in problem


def test_the_window_is_the_one_that_the_model_was_trained_with(folder):
    choice = ModelChoice(device="cpu", dtype="float32")
    assert LocalModel.open(folder, choice, SamplingArguments(), 0).window == 1024
    (folder / "run.json").write_text(json.dumps({"settings": {"data": {"max_seq_len": 128}}}))
    assert LocalModel.open(folder, choice, SamplingArguments(), 0).window == 128
    (folder / "run.json").unlink()


def test_without_a_terminal_a_line_is_a_turn_in_utf8(folder, tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "chat.py"), "--save_dir", str(folder.parent)]
    command += ["--max_new_tokens", "5", "--temperature", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "LC_ALL": "C"}
    words = "你好\nHello\n".encode()
    result = subprocess.run(command, cwd=tmp_path, env=environment, input=words, capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr.decode()
    assert len(result.stdout.decode("utf-8").splitlines()) >= 2 and b"\x1b" not in result.stdout


def run_here(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["chat.py", *map(str, words)])
    with user_errors():
        chat.main()


def test_one_question(monkeypatch, capsys, folder):
    run_here(monkeypatch, "--model_path", folder, "--prompt", "Hi", "--max_new_tokens", 4, "--temperature", 0)
    first = capsys.readouterr()
    assert first.out.endswith("\n") and first.err == ""
    run_here(monkeypatch, "--save_dir", folder.parent, "--prompt", "Hi", "--max_new_tokens", 4, "--temperature", 0)
    assert capsys.readouterr().out == first.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--save_dir", "{tmp}"], "--weight full_sft: no such finished model in {tmp}; make it with: python trainer/"),
        (["--model_path", "{tmp}"], "--model_path {tmp}: no model there (it needs config.json and"),
        (["--model_path", "{folder}", "--prompt", " "], "--prompt is empty"),
        (["--model_path", "{folder}", "--prompt", "word " * 1200], "the model takes 1,024"),
        (["--top_p", "7"], "--top_p 7.0 must lie"),
        (["--model_path", "{tmp}/x.gguf"], "--model_path {tmp}/x.gguf: no such file"),
        (["--url", "http://127.0.0.1:9/v1"], "--url http://127.0.0.1:9/v1: no answer from there"),
        (["--promt", "x"], "unknown flag --promt (did you mean --prompt?)"),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(monkeypatch, capsys, tmp_path, folder, words, message):
    with pytest.raises(SystemExit) as stop:
        run_here(monkeypatch, *(word.format(tmp=tmp_path, folder=folder) for word in words))
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message.format(tmp=tmp_path) in error and len(error.splitlines()) == 1


def test_ctrl_c_in_a_pipe_ends_with_130(folder, tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "chat.py"), "--model_path", str(folder), "--max_new_tokens", "3"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    )
    process.stdin.write(b"Hello\n")
    process.stdin.flush()
    assert process.stdout.readline() is not None
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and b"Traceback" not in error
