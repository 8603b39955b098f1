"""A model behind a URL of OpenAI's form: ours, another server's, or OpenAI's own."""

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import openai

from scripts.serving.conversation import Event, TooLong
from scripts.serving.sampling import SamplingArguments

CONNECT_SECONDS = 10.0


class RemoteModel:
    """Answers by chat completions.

    Args:
        url: ends in /v1.
        name: the model to ask for; None: the first that the server lists.
        api_key: what the server wants; None: nothing.
        seed: of the first answer; each further one counts it up.

    Raises:
        ValueError: nobody answers there, or no model does.
    """

    def __init__(
        self,
        url: str,
        name: str | None,
        api_key: str | None,
        sampling: SamplingArguments,
        seed: int = 42,
    ):
        timeout = openai.Timeout(600.0, connect=CONNECT_SECONDS)
        self.client = openai.OpenAI(base_url=url, api_key=api_key or "none", timeout=timeout, max_retries=1)
        self.url, self.sampling, self.seed = url, sampling, seed
        self.name = name or list_models(url, api_key)[0]
        self.tokens, self.seconds = 0, 0.0  # of all answers, from each one's first piece on

    def reply(
        self, messages: list[dict[str, Any]], tools: list[dict] | None, open_thinking: bool | None, is_last_try: bool
    ) -> "RemoteReply":
        """See `conversation.Model`. How much fits, the server decides."""
        request = self.sampling.to_request() | {"model": self.name, "seed": self.seed, "stream": True}
        request["stream_options"] = {"include_usage": True}
        extra = {name: request.pop(name) for name in ("top_k",) if name in request}
        if open_thinking is not None:
            extra["chat_template_kwargs"] = {"open_thinking": open_thinking, "enable_thinking": open_thinking}
        if tools:
            request["tools"] = tools
        with _named_errors(self.url):
            stream = self.client.chat.completions.create(
                messages=to_openai(messages), extra_body=extra or None, **request
            )
        self.seed += 1
        return RemoteReply(stream, self)


class RemoteReply:
    """One turn, see `conversation.Reply`."""

    def __init__(self, stream: Any, model: RemoteModel):
        self._stream, self._model = stream, model
        self._content = self._reasoning = ""
        self._calls: dict[int, dict[str, str]] = {}

    @property
    def message(self) -> dict[str, Any]:
        """What was said so far, as a message; a call whose arguments are no JSON object is left out."""
        message: dict[str, Any] = {"role": "assistant", "content": self._content}
        if self._reasoning:
            message["reasoning_content"] = self._reasoning
        calls = []
        for call in self._calls.values():
            with contextlib.suppress(ValueError):
                if isinstance(arguments := json.loads(call["arguments"] or "{}"), dict):
                    calls.append({"name": call["name"], "arguments": arguments})
        return message | ({"tool_calls": calls} if calls else {})

    def __iter__(self) -> Iterator[Event]:
        model, started, tokens, seconds = self._model, None, self._model.tokens, self._model.seconds
        with _named_errors(model.url), contextlib.closing(self._stream):
            for count, chunk in enumerate(self._stream):  # a chunk is a token, until the server says how many they were
                started = started or time.monotonic()
                model.tokens, model.seconds = tokens + count, seconds + time.monotonic() - started
                if chunk.usage:
                    model.tokens = tokens + chunk.usage.completion_tokens
                if not chunk.choices:
                    continue
                delta = chunk.choices[0].delta
                if piece := getattr(delta, "reasoning_content", None) or getattr(delta, "reasoning", None):
                    self._reasoning += piece
                    yield Event("thinking", piece)
                if delta.content:
                    self._content += delta.content
                    yield Event("text", delta.content)
                for part in delta.tool_calls or []:
                    call = self._calls.setdefault(part.index, {"name": "", "arguments": ""})
                    call["name"] += part.function.name or ""
                    call["arguments"] += part.function.arguments or ""


def list_models(url: str, api_key: str | None) -> list[str]:
    """The names of the models that a server has.

    Raises:
        ValueError: nobody answers there, or no model does.
    """
    with _named_errors(url):
        client = openai.OpenAI(base_url=url, api_key=api_key or "none", timeout=CONNECT_SECONDS, max_retries=1)
        names = [model.id for model in client.models.list()]
    if not names:
        raise ValueError(f"--url {url}: it serves no model")
    return names


def to_openai(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of ours with calls and results in OpenAI's form: arguments as JSON text, results by the call's id."""
    result, waiting = [], []
    for index, message in enumerate(messages):
        if message.get("tool_calls"):
            waiting = [f"call_{index}_{number}" for number in range(len(message["tool_calls"]))]
            calls = [
                {
                    "id": name,
                    "type": "function",
                    "function": {
                        "name": call["name"],
                        "arguments": json.dumps(call["arguments"], ensure_ascii=False),
                    },
                }
                for name, call in zip(waiting, message["tool_calls"], strict=True)
            ]
            message = message | {"tool_calls": calls}
        elif message["role"] == "tool":
            message = message | {"tool_call_id": waiting.pop(0) if waiting else f"call_{index}"}
        result.append(message)
    return result


@contextlib.contextmanager
def _named_errors(url: str) -> Iterator[None]:
    """What goes wrong on the way, as one message for the user."""
    try:
        yield
    except openai.APIConnectionError as error:
        raise ValueError(f"--url {url}: no answer from there ({error.__cause__ or error})") from error
    except openai.BadRequestError as error:
        # llama.cpp and vLLM say "context", OpenAI has a code for it.
        kind = TooLong if "context" in str(error.message).lower() else ValueError
        raise kind(f"--url {url}: {error.message}") from error
    except openai.APIError as error:
        raise ValueError(f"--url {url}: {error.message}") from error
