"""What a request of OpenAI's form may say, and what an engine is told instead.

Checked here, so that a malformed request is one clear message and not an engine's fault: the shapes of all fields that
engines read. Rewritten here: text to NFC (llama.cpp does not do it), and text that looks like a control token, which
would otherwise end a turn or open a tool result in the sender's name.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any, Literal

import pydantic

ZERO_WIDTH_SPACE = "\u200b"
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
# What `transformers serve` (5.x) passes over in silence; what stands here says nothing, so it may be left out.
PASSED_OVER_BY_TRANSFORMERS = {
    "n": (1,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "stream_options": ({"include_usage": True}, {"include_usage": False}, {}),  # it always tells the usage
    "top_k": (0,),
    "min_p": (0,),
}


class RequestProblem(Exception):
    """A request that is answered with an error: HTTP status, message, OpenAI's error type, the field at fault."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", field: str | None = None):
        super().__init__(message)
        self.status, self.message, self.kind, self.field = status, message, kind, field

    def body(self) -> dict[str, Any]:
        """The JSON in which OpenAI's clients look for the message."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.field, "code": self.code}}

    @property
    def code(self) -> str | None:
        """OpenAI's short name of the problem, where there is one."""
        names = {401: "invalid_api_key", 404: "model_not_found", 413: "request_too_large", 429: "rate_limit_exceeded"}
        return names.get(self.status)


class _Lenient(pydantic.BaseModel):
    """Fields that are not named here pass: engines have more than OpenAI's."""

    model_config = pydantic.ConfigDict(extra="allow", strict=True)


class _Function(_Lenient):
    name: str = pydantic.Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(_Lenient):
    type: Literal["function"]
    function: _Function


class _CalledFunction(_Lenient):
    name: str
    arguments: str

    @pydantic.field_validator("arguments")
    @classmethod
    def _is_an_object(cls, value: str) -> str:
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is not JSON ({error})") from None
        if not isinstance(parsed, dict):
            raise ValueError("it is not a JSON object")
        return value


class _Call(_Lenient):
    id: str
    type: Literal["function"]
    function: _CalledFunction


class _TextPart(_Lenient):
    type: Literal["text"]
    text: str


class _Message(_Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None

    @pydantic.model_validator(mode="after")
    def _says_something(self):
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.reasoning_content)):
            raise ValueError("content is missing")
        return self


class _StreamOptions(_Lenient):
    include_usage: bool | None = None


class _Sampling(_Lenient):
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = pydantic.Field(default=None, ge=1)
    max_tokens: int | None = pydantic.Field(default=None, ge=1)
    temperature: float | None = pydantic.Field(default=None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = pydantic.Field(default=None, gt=0, le=1)
    top_k: int | None = pydantic.Field(default=None, ge=0)
    min_p: float | None = pydantic.Field(default=None, ge=0, le=1)
    presence_penalty: float | None = pydantic.Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = pydantic.Field(default=None, ge=-2, le=2)
    seed: int | None = pydantic.Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None


class ChatRequest(_Sampling):
    """POST /v1/chat/completions."""

    messages: list[_Message] = pydantic.Field(min_length=1)
    max_completion_tokens: int | None = pydantic.Field(default=None, ge=1)
    tools: list[_Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = pydantic.Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(_Sampling):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = pydantic.Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: Literal[False] | None = None
    suffix: None = None
    best_of: Literal[1] | None = None


def check(body: Any, shape: type[_Sampling]) -> dict[str, Any]:
    """The request without what it leaves unsaid.

    Raises:
        RequestProblem: 400, which names the first field at fault and how many more there are.
    """
    if not isinstance(body, dict):
        raise RequestProblem(400, "the body must be a JSON object")
    try:
        request = shape.model_validate(body)
    except pydantic.ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        places = [".".join(str(step) for step in problem["loc"]) for problem in problems]
        more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
        raise RequestProblem(400, f"{places[0]}: {problems[0]['msg']}{more}", field=places[0]) from None
    if isinstance(request.stop, list) and len(request.stop) > MAX_STOPS:
        raise RequestProblem(400, f"stop: at most {MAX_STOPS} are taken", field="stop")
    return request.model_dump(exclude_none=True, exclude_unset=True)


def control_text_breaker(control_tokens: Iterable[str]) -> Callable[[str], str]:
    """A function that puts a zero-width space behind the first character of whatever looks like a control token."""
    longest_first = sorted(control_tokens, key=len, reverse=True)
    if not longest_first:
        return lambda text: text
    pattern = re.compile("|".join(map(re.escape, longest_first)))

    def broken(text: str) -> str:
        text = unicodedata.normalize("NFC", text)
        return pattern.sub(lambda match: match[0][0] + ZERO_WIDTH_SPACE + match[0][1:], text)

    return broken


def safe_chat(request: dict[str, Any], broken: Callable[[str], str]) -> dict[str, Any]:
    """A checked chat request as engines get it: plain text, in NFC, nothing in it that acts as control."""
    messages = []
    for message in request["messages"]:
        content = message.get("content")
        if isinstance(content, list):
            message = message | {"content": "".join(part["text"] for part in content)}
        if message["role"] == "developer":  # what OpenAI now calls the system
            message = message | {"role": "system"}
        messages.append(_mapped(message, broken))
    result = request | {"messages": messages}
    if "tools" in request:
        result["tools"] = _mapped(request["tools"], broken)
    if "max_completion_tokens" in result:
        result["max_tokens"] = result.pop("max_completion_tokens")
    return result


def safe_completion(request: dict[str, Any]) -> dict[str, Any]:
    """A checked completion request in NFC. Its prompt is the model's whole input, control tokens included."""
    prompt = request["prompt"]
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], str)):
        prompt = _mapped(prompt, lambda text: unicodedata.normalize("NFC", text))
    return request | {"prompt": prompt}


def for_transformers(request: dict[str, Any]) -> dict[str, Any]:
    """A request as `transformers serve` gets it, without what says nothing.

    Raises:
        RequestProblem: 400 for a field that it would pass over in silence.
    """
    for field, harmless in PASSED_OVER_BY_TRANSFORMERS.items():
        if field in request and request[field] not in harmless:
            raise RequestProblem(400, f"{field}: `transformers serve` has no such thing, llama.cpp has", field=field)
    return {field: value for field, value in request.items() if field not in PASSED_OVER_BY_TRANSFORMERS}


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Nested lists and dicts with every string in them changed; keys stay, and so does a message's role."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    if isinstance(value, dict):
        return {
            key: item if key in ("role", "type", "id", "tool_call_id") else _mapped(item, change)
            for key, item in value.items()
        }
    return value
