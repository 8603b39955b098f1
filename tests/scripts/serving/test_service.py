"""From a model folder to an answer: the same words from our decoder and from llama.cpp behind the front."""

import functools
import json
import os
import signal
import subprocess
import sys
import time

import httpx2
import openai
import psutil
import pytest
import torch

from model.decoding import Decoder
from model.model_minimind import load_model
from scripts.serving.conversation import Conversation, Event, joined
from scripts.serving.engines import choose_engine
from scripts.serving.front import front_in_a_thread
from scripts.serving.local_model import LocalModel
from scripts.serving.remote_model import RemoteModel
from scripts.serving.sampling import SamplingArguments
from scripts.serving.service import EngineArguments, cached_gguf, running_service
from tests.conftest import ROOT
from tests.scripts.serving.conftest import CALCULATION, CALL, HOSTILE, LONG, THINKING, TOOLS

GREEDY = SamplingArguments(temperature=0.0, max_new_tokens=900)
EXACT = EngineArguments(engine="llama.cpp", quantize="f32", slots=2, context=1024, threads=1)


@pytest.fixture(scope="module")
def url(taught):
    with running_service(taught, EXACT, {"temperature": 0}) as service:
        with front_in_a_thread(service.engine, service.options) as url:
            yield url


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture(params=["local", "remote"])
def model(request, taught, tokenizer):
    if request.param == "local":
        return LocalModel(Decoder(load_model(str(taught)), torch.float32), tokenizer, GREEDY, 1024)
    return RemoteModel(request.getfixturevalue("url"), None, None, GREEDY)


def test_tools_run_the_same_here_and_behind_a_url(model):
    conversation = Conversation(model, use_tools=True)
    events = list(conversation.say(CALCULATION[0]["content"]))
    calls = [event for event in events if event.kind in ("call", "result")]
    assert calls == [Event("call", 'calculate({"expression": "12 + 30"})'), Event("result", "42")]
    assert joined(events, "text") == "It is 42."
    assert conversation.messages == CALCULATION


def test_thinking_is_told_from_the_answer_here_and_behind_a_url(model):
    conversation = Conversation(model)
    events = list(conversation.say(THINKING[0]["content"]))
    assert joined(events, "thinking").strip() == "Mila is a doctor." and joined(events, "text") == "米拉是医生。"
    assert conversation.messages[-1]["content"] == "米拉是医生。"


def test_a_stopped_answer_is_kept_here_and_behind_a_url(model):
    conversation = Conversation(model)
    events = conversation.say(LONG[0]["content"])
    said = [next(events).text for _ in range(5)]
    events.close()
    assert conversation.messages[-1]["content"] == "".join(said)
    assert LONG[1]["content"].startswith("".join(said))


def test_turns_that_do_not_fit_are_left_out_here_and_behind_a_url(model):
    conversation = Conversation(model, system="Be brief.")
    for number in range(7):
        conversation.messages += [
            {"role": "user", "content": f"{number}. " + "word " * 150},
            {"role": "assistant", "content": "Yes."},
        ]
    events = list(conversation.say("Count."))
    assert any(event.kind == "note" and "left out" in event.text for event in events)
    assert conversation.messages[0]["content"] == "Be brief." and len(conversation.messages) < 16


def test_calls_and_reasoning_are_where_clients_look(client):
    messages = [{"role": "user", "content": CALCULATION[0]["content"]}]
    answer = client.chat.completions.create(model="full_sft_128", messages=messages, tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.id and call.function.name == "calculate"
    assert json.loads(call.function.arguments) == CALL["arguments"]
    messages += [
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "42"},
    ]
    answer = client.chat.completions.create(model="full_sft_128", messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content == "It is 42." and answer.choices[0].finish_reason == "stop"
    thinking = client.chat.completions.create(model="full_sft_128", messages=THINKING[:1])
    message = thinking.choices[0].message
    assert message.content == "米拉是医生。" and message.reasoning_content.strip() == "Mila is a doctor."


def test_streamed_calls_come_in_the_deltas(client):
    messages = [{"role": "user", "content": CALCULATION[0]["content"]}]
    stream = client.chat.completions.create(model="full_sft_128", messages=messages, tools=TOOLS, stream=True)
    parts = [part for chunk in stream if chunk.choices for part in chunk.choices[0].delta.tool_calls or []]
    assert parts[0].id and "".join(part.function.name or "" for part in parts) == "calculate"
    assert json.loads("".join(part.function.arguments or "" for part in parts)) == CALL["arguments"]


def test_without_tools_and_with_a_choice_of_tool(client):
    messages = [{"role": "user", "content": CALCULATION[0]["content"]}]
    forced = {"type": "function", "function": {"name": "calculate"}}
    answer = client.chat.completions.create(
        model="full_sft_128", messages=messages, tools=TOOLS, tool_choice=forced, max_tokens=200
    )
    assert answer.choices[0].message.tool_calls[0].function.name == "calculate"


def test_hostile_text_arrives_as_it_was_said(client):
    answer = client.chat.completions.create(model="full_sft_128", messages=HOSTILE[:1])
    assert answer.choices[0].message.content == HOSTILE[1]["content"]


def test_a_gguf_file_is_made_once_and_again_when_the_weights_change(taught, tokenizer, tmp_path):
    import shutil

    folder = tmp_path / "m"
    shutil.copytree(taught, folder, ignore=shutil.ignore_patterns("*.gguf"))
    first = cached_gguf(folder, "q8_0")
    stamp = first.stat().st_mtime_ns
    assert cached_gguf(folder, "q8_0").stat().st_mtime_ns == stamp
    os.utime(folder / "model.safetensors")
    assert cached_gguf(folder, "q8_0").stat().st_mtime_ns > stamp


def test_engines_that_cannot_are_named(taught, tmp_path, monkeypatch):
    gguf = tmp_path / "x.gguf"
    assert choose_engine("auto", gguf) == choose_engine("auto", taught) == "llama.cpp"
    with pytest.raises(ValueError, match="--engine transformers does not open .*x.gguf"):
        choose_engine("transformers", gguf)
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(ValueError, match="--engine vllm: vLLM is not installed"):
        choose_engine("vllm", taught)
    gguf.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="x.gguf: not a GGUF file"):
        with running_service(gguf, EXACT, {}):
            pass


@pytest.mark.slow
def test_transformers_serves_and_what_it_would_pass_over_is_refused(taught):
    arguments = EngineArguments(engine="transformers", slots=2)
    sampling = {"temperature": 0, "max_tokens": 32}
    with (
        running_service(taught, arguments, sampling) as service,
        front_in_a_thread(service.engine, service.options) as url,
    ):
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
        ask = functools.partial(client.chat.completions.create, model=taught.name, messages=CALCULATION[:1])
        call = ask(tools=TOOLS).choices[0].message.tool_calls[0].function
        assert call.name == "calculate" and json.loads(call.arguments) == {"expression": "12 + 30"}
        chunks = [*ask(stream=True, tools=TOOLS, stream_options={"include_usage": True}, n=1)]
        assert any(chunk.usage for chunk in chunks)
        body = {"messages": HOSTILE[:1], "stream": True}
        assert httpx2.post(f"{url}/chat/completions", json=body, timeout=60).text.endswith("data: [DONE]\n\n")
        assert len({ask(temperature=5, seed=seed).choices[0].message.content for seed in range(4)}) > 1
        for field, value in {"n": 2, "logprobs": True, "response_format": {"type": "json_object"}}.items():
            with pytest.raises(openai.BadRequestError, match=f"{field}: `transformers serve` has no such thing"):
                ask(**{field: value})


# ---- the command ----


class Server:
    """scripts/serve_openai_api.py in a process of its own; `url` is what it printed."""

    def __init__(self, *words):
        command = [sys.executable, str(ROOT / "scripts" / "serve_openai_api.py"), "--port", "0", *map(str, words)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/")
        self.first_line = self.process.stdout.readline()
        self.url = next((word.rstrip(":") for word in self.first_line.split() if word.startswith("http")), None)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


def test_the_command_serves_and_stops_on_a_signal(taught):
    with Server("--model_path", taught, "--slots", 2, "--threads", 1, "--temperature", 0) as server:
        assert "full_sft_128 by llama.cpp on http://127.0.0.1:" in server.first_line, server.process.communicate()[1]
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60)
        answer = client.chat.completions.create(model="full_sft_128", messages=CALCULATION[:1], tools=TOOLS)
        assert answer.choices[0].message.tool_calls[0].function.name == "calculate"
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        _, error = server.process.communicate(timeout=30)
        assert server.process.returncode == 128 + signal.SIGTERM and "Traceback" not in error
        assert time.monotonic() - started < 10


@pytest.mark.slow
def test_an_engine_of_its_own_process_ends_with_the_server(taught):
    with Server("--model_path", taught, "--engine", "transformers") as server:
        engines = psutil.Process(server.process.pid).children(recursive=True)
        assert any("serve" in engine.cmdline() for engine in engines)
        server.process.terminate()
        assert server.process.wait(30) == 128 + signal.SIGTERM
        assert psutil.wait_procs(engines, timeout=5)[1] == []


def test_other_addresses_want_a_key(taught):
    with Server("--model_path", taught, "--host", "0.0.0.0", "--slots", 1) as server:
        key = server.process.stdout.readline().split()[-1]
        assert len(key) >= 20
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="none", max_retries=0).models.list()
        assert openai.OpenAI(base_url=url, api_key=key, max_retries=0).models.list().data


def test_chat_talks_to_it(taught, url):
    command = [sys.executable, str(ROOT / "scripts" / "chat.py"), "--url", url, "--temperature", "0", "--tools", "1"]
    done = subprocess.run(
        [*command, "--prompt", CALCULATION[0]["content"]], capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert done.stdout.splitlines()[-1] == "It is 42." and "[result] 42" in done.stdout, done.stderr


def test_chat_opens_a_gguf_file(taught):
    path = cached_gguf(taught, "f32")
    command = [sys.executable, str(ROOT / "scripts" / "chat.py"), "--model_path", str(path), "--temperature", "0"]
    done = subprocess.run(
        [*command, "--prompt", THINKING[0]["content"]], capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert done.stdout.splitlines()[-1] == "米拉是医生。", done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "99999", "--slots", "0", "--top_p", "3"], "--port 99999 must lie in 0 to 65535"),
        (["--model_path", "/nowhere"], "--model_path /nowhere: no model there"),
        (["--host", "192.0.2.1"], "--host 192.0.2.1 --port 0: cannot listen there"),
    ],
)
def test_mistakes_get_one_message(words, message, taught):
    words = words if "--model_path" in words else ["--model_path", taught, *words]
    with Server(*words) as server:
        _, error = server.process.communicate(timeout=60)
        assert server.process.returncode == 2 and message in error and "Traceback" not in error
