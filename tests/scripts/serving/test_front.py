"""The server as OpenAI's own client sees it: answers, streams, limits, errors, and clients that leave."""

import concurrent.futures
import json
import socket
import time

import httpx2
import openai
import pytest

from scripts.serving.engines import Load, running_engine
from scripts.serving.front import FrontOptions, front_in_a_thread
from scripts.serving.requests import control_text_breaker
from tests.model.helpers import tiny_model
from trainer.results import save_gguf

KEY = "a key"
SLOTS = 8


@pytest.fixture(scope="module")
def served(tokenizer, tmp_path_factory):
    """A random model behind the front: (base URL, options)."""
    path = tmp_path_factory.mktemp("served") / "tiny.gguf"
    model = tiny_model(vocab_size=len(tokenizer), hidden_size=64, max_position_embeddings=1024)
    save_gguf(model, tokenizer, path, "f32", "tiny")
    with running_engine("llama.cpp", path, "tiny", Load(SLOTS, 512, 1, exact=True)) as engine:
        breaker = control_text_breaker(tokenizer.get_added_vocab())
        options = FrontOptions("tiny", KEY, SLOTS, 20_000, {"temperature": 0.5, "max_tokens": 16}, breaker, 512)
        with front_in_a_thread(engine, options) as url:
            yield url


@pytest.fixture(scope="module")
def client(served):
    return openai.OpenAI(base_url=served, api_key=KEY, max_retries=0, timeout=60)


USER = [{"role": "user", "content": "Hello 你好"}]


def ask(client, **options):
    return client.chat.completions.create(**({"model": "tiny", "messages": USER} | options))


def post(served, path="/chat/completions", key=KEY, **options):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    return httpx2.post(served + path, headers=headers, timeout=60, **options)


# ---- answers ----


def test_models_and_health(served, client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "minimind-pipeline"
    assert httpx2.get(served.removesuffix("/v1") + "/health").json() == {"status": "ok"}


def test_an_answer_has_every_field(client):
    answer = ask(client, max_tokens=5, temperature=0)
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and answer.model == "tiny" and answer.id
    assert choice.message.role == "assistant" and choice.message.content and choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 5 and answer.usage.prompt_tokens > 3
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5


def test_a_stream_is_the_answer_in_pieces_and_ends_with_usage_and_done(served, client):
    whole = ask(client, max_tokens=12, temperature=0).choices[0].message.content
    chunks = list(ask(client, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].usage.completion_tokens == 12 and not chunks[-1].choices
    body = {"messages": USER, "stream": True, "max_tokens": 3}
    response = post(served, json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.rstrip().endswith("data: [DONE]")


def test_completions_with_text_several_prompts_and_ids(client, tokenizer):
    one = client.completions.create(model="tiny", prompt="Once upon", max_tokens=6, temperature=0)
    ids = client.completions.create(
        model="tiny", prompt=tokenizer("Once upon")["input_ids"], max_tokens=6, temperature=0
    )
    both = client.completions.create(model="tiny", prompt=["Once upon", "你"], max_tokens=6, temperature=0)
    assert one.choices[0].text == ids.choices[0].text == both.choices[0].text and len(both.choices) == 2
    streamed = client.completions.create(model="tiny", prompt="Once upon", max_tokens=6, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == one.choices[0].text


def test_seed_temperature_and_n(client):
    def texts(**options):
        return [choice.message.content for choice in ask(client, max_tokens=12, **options).choices]

    assert texts(seed=1, temperature=1.0) == texts(seed=1, temperature=1.0) != texts(seed=2, temperature=1.0)
    assert texts(temperature=0, seed=1) == texts(temperature=0, seed=2)
    assert len(set(texts(n=4, temperature=1.0, seed=3))) > 1 and len(texts(n=SLOTS)) == SLOTS
    assert texts(temperature=1.0, top_p=1e-6) == texts(temperature=0)


def test_stop_strings_and_logprobs(client):
    text = ask(client, max_tokens=12, temperature=0).choices[0].message.content
    stop = text[len(text) // 2 :][:2]
    stopped = ask(client, max_tokens=12, temperature=0, stop=[stop]).choices[0]
    assert stopped.finish_reason == "stop" and stopped.message.content == text[: text.index(stop)]
    probabilities = ask(client, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3).choices[0].logprobs
    assert 1 <= len(probabilities.content) <= 4
    for entry in probabilities.content:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
        assert entry.logprob == max(other.logprob for other in entry.top_logprobs)
    legacy = client.completions.create(model="tiny", prompt="a", max_tokens=2, temperature=0, logprobs=2)
    assert legacy.choices[0].logprobs is not None


def test_both_names_of_the_length_and_content_parts(client):
    parts = [
        {"role": "developer", "content": "Brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello 你好"}]},
    ]
    answer = ask(client, messages=parts, max_completion_tokens=3, temperature=0)
    assert answer.usage.completion_tokens == 3
    same = [{"role": "system", "content": "Brief."}, *USER]
    assert (
        answer.choices[0].message.content
        == ask(client, messages=same, max_tokens=3, temperature=0).choices[0].message.content
    )


def test_a_schema_forces_json(client):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    no_thinking = {"chat_template_kwargs": {"open_thinking": False, "enable_thinking": False}}
    answer = ask(client, response_format=form, max_tokens=200, temperature=0, extra_body=no_thinking)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content)["a"], int)
    else:
        assert answer.choices[0].message.content.lstrip().startswith("{")


# ---- what users write stays text ----


def prompt_tokens(client, text):
    return ask(client, messages=[{"role": "user", "content": text}], max_tokens=1).usage.prompt_tokens


def test_control_text_is_broken_and_text_is_normalised(client, tokenizer):
    plain = prompt_tokens(client, "")
    control = prompt_tokens(client, "<|im_end|>") - plain
    assert control >= len(tokenizer.encode("<\u200b|im_end|>")) - 1 > 1, "one control token would be one"
    assert prompt_tokens(client, "e\u0301" * 50) == prompt_tokens(client, "\u00e9" * 50)


def test_the_breaker_leaves_nothing_that_acts(tokenizer):
    breaker = control_text_breaker(tokenizer.get_added_vocab())
    tokens = list(tokenizer.get_added_vocab())
    for token in tokens:
        for text in (token, f"a{token}b", token + token, token[:2] + token + token[2:]):
            assert not [other for other in tokens if other in breaker(text)], text
    assert breaker("1 < 2 and <b>x</b> <|im") == "1 < 2 and <b>x</b> <|im"


# ---- what is refused ----


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/models", "/models/tiny"])
@pytest.mark.parametrize("key", ["", "wrong", "a keys"])
def test_a_wrong_key_is_401(served, path, key):
    client = openai.OpenAI(base_url=served, api_key=key or "none", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="wrong or missing API key"):
        if path.startswith("/models"):
            client.get(path, cast_to=object)
        else:
            client.post(path, body={"messages": USER, "prompt": "a"}, cast_to=object)


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
NO_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}
BROKEN_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{broken"}}
MALFORMED = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "content is missing"),
    ({"messages": [{"role": "king", "content": "a"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content"),
    ({"messages": [None]}, "messages.0"),
    ({"messages": USER, "temperature": -1}, "temperature"),
    ({"messages": USER, "temperature": "hot"}, "temperature"),
    ({"messages": USER, "top_p": 2}, "top_p"),
    ({"messages": USER, "n": 0}, "n"),
    ({"messages": USER, "n": SLOTS + 1}, "at most 8 are served"),
    ({"messages": USER, "max_tokens": 0}, "max_tokens"),
    ({"messages": USER, "max_tokens": 1.5}, "max_tokens"),
    ({"messages": USER, "seed": "x"}, "seed"),
    ({"messages": USER, "stop": 7}, "stop"),
    ({"messages": USER, "stop": ["a"] * 17}, "stop"),
    ({"messages": USER, "stream": "yes"}, "stream"),
    ({"messages": USER, "tools": [{"type": "function"}]}, "tools.0.function"),
    ({"messages": USER, "tools": "x"}, "tools"),
    ({"messages": USER, "tool_choice": "maybe"}, "tool_choice"),
    ({"messages": USER, "logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    ({"messages": USER, "logit_bias": [1]}, "logit_bias"),
    ({"messages": USER, "response_format": "json"}, "response_format"),
    ({"messages": USER, "response_format": NO_SCHEMA}, ""),
    ({"messages": USER, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 7}}}]}, ""),
    ({"messages": USER, "tool_choice": {"type": "function", "function": {"name": "unknown"}}}, ""),
    ({"messages": [{"role": "assistant", "tool_calls": [BROKEN_CALL]}, *USER]}, "tool_calls.0.function.arguments"),
    ({"messages": [{"role": "tool", "content": "4"}]}, ""),
    ({"messages": USER, "chat_template_kwargs": {"open_thinking": "maybe"}}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message"), MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_request_is_400_or_answered_and_never_500(served, body, message):
    response = post(served, json={"max_tokens": 4} | body)
    assert response.status_code in ((400,) if message else (200, 400)), response.text
    if response.status_code == 400:
        error = response.json()["error"]
        assert message in error["message"] and error["type"] == "invalid_request_error" and "code" in error


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b'"x"', b"[" * 5000, b"NaN"])
def test_a_body_that_is_no_json_object_is_400(served, body):
    assert post(served, content=body).json()["error"]["message"].startswith("the body")


@pytest.mark.parametrize(
    "body",
    [{}, {"prompt": 5}, {"prompt": []}, {"prompt": ["a", 1]}, {"prompt": [10**9]}, {"prompt": [-5]},
     {"prompt": "a", "echo": True}, {"prompt": "a", "suffix": "b"}, {"prompt": "a", "best_of": 2}],
)  # fmt: skip
def test_a_malformed_completion_is_400(served, body):
    response = post(served, "/completions", json=body)
    assert response.status_code == 400 and response.json()["error"]["message"], response.text


def test_other_models_paths_and_methods(served, client):
    with pytest.raises(openai.NotFoundError, match="model 'gpt' is not served here, only 'tiny'"):
        ask(client, model="gpt")
    assert post(served, "/nothing", json={}).json()["error"]["message"]
    response = httpx2.get(served + "/chat/completions")
    assert response.status_code == 405 and response.json()["error"]["message"]


def test_too_long_a_body_and_too_long_a_prompt(served, client):
    with pytest.raises(openai.APIStatusError, match="longer than 20,000 bytes") as caught:
        ask(client, messages=[{"role": "user", "content": "x" * 30_000}])
    assert caught.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="context"):
        ask(client, messages=[{"role": "user", "content": "word " * 700}])


# ---- many at a time ----


def engine_is_idle(served, client, seconds=10.0):
    """Whether all slots become free: a request for all of them is answered."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            return len(ask(client, n=SLOTS, max_tokens=1).choices) == SLOTS
        except openai.RateLimitError:
            time.sleep(0.05)
    return False


def test_more_than_the_slots_get_429_and_the_client_retries(served, client):
    slow = ask(client, n=SLOTS, max_tokens=400, stream=True, stop=["\u0378"], extra_body={"ignore_eos": True})
    next(iter(slow))
    with pytest.raises(openai.RateLimitError, match="all 8 slots are busy"):
        ask(client, max_tokens=1)
    slow.close()
    assert engine_is_idle(served, client)
    retrying = openai.OpenAI(base_url=served, api_key=KEY, max_retries=20, timeout=60)
    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda seed: _streamed(retrying, seed), range(50)))
    assert len(answers) == 50 and all(answers)


def _streamed(client, seed):
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(client, seed=seed, max_tokens=6, stream=True)]
    return "".join(pieces)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slots(served, client, stream):
    body = json.dumps({"messages": USER, "n": SLOTS, "max_tokens": 480, "stream": stream, "ignore_eos": True}).encode()
    host, port = served.removeprefix("http://").removesuffix("/v1").split(":")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        time.sleep(0.1)
        with pytest.raises(openai.RateLimitError):
            ask(client, max_tokens=1)
    started = time.monotonic()
    assert engine_is_idle(served, client)
    left = time.monotonic() - started
    started = time.monotonic()
    ask(client, n=SLOTS, max_tokens=480, extra_body={"ignore_eos": True})
    assert left < time.monotonic() - started, "the generation went on without its client"
