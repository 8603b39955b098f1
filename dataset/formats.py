"""Row formats that users bring, recognised by their keys, and the message form that everything here works on.

A normalised message is {"role", "content": str} with, on assistant messages, optionally "reasoning_content": str and
"tool_calls": [{"name": str, "arguments": dict}]. Roles are system, user, assistant and tool.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
ROLE_NAMES = {
    **{role: role for role in ROLES},
    "human": "user", "gpt": "assistant", "model": "assistant", "developer": "system",
    "function": "tool", "observation": "tool",
}  # fmt: skip
FORMATS = (
    "text; conversations or messages (role/content or from/value); question/answer; prompt/completion; "
    "instruction/input/output; chosen/rejected"
)
CONTENT_KEYS = frozenset(
    "text conversations messages tools system question answer prompt completion instruction input output chosen "
    "rejected".split()
)
"""Keys of which a row's content is made; all others, such as an id, are kept aside."""
THINK_BLOCK = re.compile(r"\s*<think>(.*?)</think>\n{0,2}", re.DOTALL)


def row_kind(row: dict[str, Any]) -> str:
    """Tell by the row's keys whether it is "text", "chat" or "pair" (of a chosen and a rejected conversation).

    Raises:
        ValueError: no known format; the message shows the row's keys and what was expected.
    """
    if "text" in row:
        return "text"
    if "chosen" in row and "rejected" in row:
        return "pair"
    pairs = (("question", "answer"), ("prompt", "completion"), ("instruction", "output"))
    if "conversations" in row or "messages" in row or any(first in row and second in row for first, second in pairs):
        return "chat"
    keys = ", ".join(map(repr, list(row)[:8])) or "none"
    raise ValueError(f"no known row format: its keys are {keys}; expected {FORMATS}")


def text_from_row(row: dict[str, Any]) -> str:
    """The row as one plain document: its text, or the words of its conversation, a line break between messages.

    Raises:
        ValueError: no known format, a value of the wrong type, or nothing but white space.
    """
    if row_kind(row) == "text":
        text = row["text"]
        if not isinstance(text, str):
            raise ValueError(f"'text' is {_kind(text)}, not a string")
    else:
        text = words_of(messages_from_row(row)[0])
    if not text.strip():
        raise ValueError("the text is empty")
    check_encodable(text)
    return text


def words_of(messages: Sequence[Message]) -> str:
    """All that is said in normalised messages, a line break between stretches."""
    words = []
    for message in messages:
        calls = [json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls", [])]
        words += [message.get("reasoning_content", ""), message["content"], *calls]
    return "\n".join(filter(None, words))


def messages_from_row(row: dict[str, Any]) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """Normalised messages and tool schemas of a chat row in any of the known formats.

    Raises:
        ValueError: no known format, or a message or tool of the wrong form, named by its position.
    """
    if (kind := row_kind(row)) != "chat":
        name = {"text": "a {'text'} row is a document", "pair": "a {'chosen', 'rejected'} row is a pair"}[kind]
        raise ValueError(f"{name}, not a conversation")
    key = next((key for key in ("conversations", "messages") if key in row), None)
    if key is not None:
        raw = row[key]
        if not isinstance(raw, list) or not raw:
            raise ValueError(f"{key!r} is {_kind(raw)}, not a list of messages")
    elif "question" in row and "answer" in row:
        raw = _exchange(row["question"], row["answer"])
    elif "prompt" in row and "completion" in row:
        raw = [*_as_messages(row["prompt"], "user"), *_as_messages(row["completion"], "assistant")]
    else:
        parts = {name: row.get(name) or "" for name in ("instruction", "input")}
        for name, part in parts.items():
            if not isinstance(part, str):
                raise ValueError(f"{name!r} is {_kind(part)}, not a string")
        question = "\n".join(filter(None, parts.values()))
        raw = _exchange(question, row["output"])
    if key is None and isinstance(row.get("system"), str) and row["system"]:
        raw = [{"role": "system", "content": row["system"]}, *raw]
    messages, tools = normalise_messages(raw)
    return messages, normalise_tools(row.get("tools")) or tools


def pair_from_row(
    row: dict[str, Any],
) -> tuple[tuple[list[Message], list[dict[str, Any]] | None], tuple[list[Message], list[dict[str, Any]] | None]]:
    """The chosen and the rejected conversation of a preference row, each with its tools.

    Each side is a whole conversation, or an answer alone, as text or messages, to the "prompt" that stands beside it.

    Raises:
        ValueError: another form, an empty side, or two sides that are the same.
    """
    sides = []
    for name in ("chosen", "rejected"):
        answer = row[name]
        if not isinstance(answer, str | list) or not answer:
            raise ValueError(f"{name!r} is {_kind(answer)}, not a list of messages or an answer's text")
        raw = _as_messages(answer, "assistant")
        if isinstance(raw[0], dict) and _role_of(raw[0]) == "assistant":
            if not row.get("prompt"):
                raise ValueError(f"{name!r} is an answer alone, so a 'prompt' must stand beside it")
            raw = [*_as_messages(row["prompt"], "user"), *raw]
        if isinstance(row.get("system"), str) and row["system"]:
            raw = [{"role": "system", "content": row["system"]}, *raw]
        try:
            messages, tools = normalise_messages(raw)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from error
        if messages[-1]["role"] != "assistant":
            raise ValueError(f"{name!r} ends with the {messages[-1]['role']}, not with an answer of the assistant's")
        sides.append((messages, normalise_tools(row.get("tools")) or tools))
    if sides[0] == sides[1]:
        raise ValueError("'chosen' and 'rejected' are the same")
    return sides[0], sides[1]


def _exchange(question: Any, answer: Any) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _as_messages(value: Any, role: str) -> list[Message]:
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def normalise_messages(raw: Sequence[Any]) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """Messages in normal form, and the tools that a system message carries.

    Reasoning and tool calls written into an assistant's content (`<think>…</think>` at its start, `<tool_call>{json}
    </tool_call>` blocks at its end) are taken out of it where the message does not give them in their own fields.

    Raises:
        ValueError: a message of the wrong form, named by its position, counted from 1.
    """
    messages, tools = [], None
    for number, message in enumerate(raw, start=1):
        try:
            messages.append(_normalise_message(message))
            if isinstance(message, dict) and message.get("tools") and messages[-1]["role"] == "system":
                tools = normalise_tools(message["tools"])
        except ValueError as error:
            raise ValueError(f"message {number}: {error}") from error
    if not messages:
        raise ValueError("the conversation has no messages")
    return messages, tools


def _normalise_message(message: Any) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"is {_kind(message)}, not an object with 'role' and 'content'")
    role = _role_of(message)
    if role is None:
        raise ValueError(f"role {message.get('role', message.get('from'))!r} is not one of {', '.join(ROLES)}")
    content = _content_text(message.get("content", message.get("value")), role)
    if role != "assistant":
        return {"role": role, "content": content}
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    if not isinstance(reasoning, str):
        raise ValueError(f"'reasoning_content' is {_kind(reasoning)}, not a string")
    check_encodable(reasoning)
    calls = _normalise_calls(message.get("tool_calls"))
    return _assistant_message(content, reasoning, calls)


def _role_of(message: Message) -> str | None:
    """One of `ROLES`, whatever the message calls it; None if it is none of them."""
    name = message.get("role", message.get("from"))
    return ROLE_NAMES.get(name) if isinstance(name, str) else None


def _assistant_message(content: str, reasoning: str, calls: list[dict[str, Any]]) -> Message:
    if not reasoning.strip() and (block := THINK_BLOCK.match(content)):
        reasoning, content = block[1], content[block.end() :]
    if not calls:
        content, calls = _split_tool_calls(content)
    result: Message = {"role": "assistant", "content": content}
    if reasoning.strip():
        result["reasoning_content"] = reasoning.strip()
    if calls:
        result["tool_calls"] = calls
    return result


def _content_text(content: Any, role: str) -> str:
    """A message's content as one string: text, a list of text parts, nothing, or a tool's result as JSON."""
    if content is None:
        content = ""
    elif isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    elif role == "tool" and not isinstance(content, str):
        content = json.dumps(content, ensure_ascii=False)
    if not isinstance(content, str):
        raise ValueError(f"'content' is {_kind(content)}, not a string")
    check_encodable(content)
    return content


def _normalise_calls(raw: Any) -> list[dict[str, Any]]:
    """Tool calls as a list or a JSON string, bare or wrapped in "function", their arguments an object or JSON."""
    raw = _from_json(raw, "tool_calls")
    if not raw:
        return []
    calls = [_normalise_call(call) for call in (raw if isinstance(raw, list) else [raw])]
    if None in calls:
        number = calls.index(None) + 1
        raise ValueError(f"tool call {number} is not {{'name': ..., 'arguments': {{...}}}}: {str(raw)[:80]}")
    check_encodable(json.dumps(calls, ensure_ascii=False))
    return calls


def _normalise_call(call: Any) -> dict[str, Any] | None:
    """One call as {"name", "arguments"}, or None where it has another form."""
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return None
    arguments = {} if arguments is None else arguments
    return {"name": call["name"], "arguments": arguments} if isinstance(arguments, dict) else None


def normalise_tools(raw: Any) -> list[dict[str, Any]] | None:
    """Tool schemas from a list or a JSON string; None where there are none.

    Raises:
        ValueError: not a list of objects with a name.
    """
    raw = _from_json(raw, "tools")
    if not raw:
        return None
    tools = raw if isinstance(raw, list) else [raw]
    for number, tool in enumerate(tools, start=1):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"tool {number} has no name: {str(tool)[:80]}")
    check_encodable(json.dumps(tools, ensure_ascii=False))
    return tools


def parse_reply(text: str, open_thinking: bool | None = None) -> Message:
    """The assistant message that a model's reply says, control tokens written out, the end of turn left off.

    Args:
        text: what was generated, decoded with the tokens of reasoning and tool calls kept.
        open_thinking: as the prompt was rendered; True: the reply starts inside a reasoning block.

    Returns:
        {"role": "assistant", "content", "reasoning_content"?, "tool_calls"?}. Reasoning that never ends leaves the
        content empty. A tool call that is not valid stays in the content as text.
    """
    if open_thinking:
        text = "<think>\n" + text
    if text.lstrip().startswith("<think>") and "</think>" not in text:
        return {"role": "assistant", "content": "", "reasoning_content": text.lstrip().removeprefix("<think>").strip()}
    return _assistant_message(text, "", [])


def _split_tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Split a run of valid `<tool_call>` blocks off the end of a text; blocks elsewhere are words about tools."""
    start = text.find("<tool_call>")
    while start >= 0:
        calls = _calls_to_the_end(text, start)
        if calls:
            return text[:start].removesuffix("\n"), calls
        start = text.find("<tool_call>", start + 1)
    return text, []


def _calls_to_the_end(text: str, position: int) -> list[dict[str, Any]]:
    """The calls of the blocks that fill the text from `position` on, or [] where anything else is there."""
    calls = []
    decoder = json.JSONDecoder()
    while position < len(text):
        opening = re.compile(r"<tool_call>\s*").match(text, position)
        if not opening:
            return []
        try:
            value, position = decoder.raw_decode(text, opening.end())
        except (ValueError, RecursionError):
            return []
        closing = re.compile(r"\s*</tool_call>\s*").match(text, position)
        call = _normalise_call(value)
        if not closing or call is None:
            return []
        calls.append(call)
        position = closing.end()
    return calls


def check_encodable(text: str) -> None:
    """Raise ValueError for a text with half a surrogate pair, which JSON can hold and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text holds {text[error.start]!r}, half a surrogate pair and not a character") from error


def _from_json(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name!r} is a string that is not valid JSON: {value[:80]}") from error


def _kind(value: Any) -> str:
    """What a JSON value is, in words."""
    if value is None or value == []:
        return "null" if value is None else "an empty list"
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)
