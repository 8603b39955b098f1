"""A question with its solution, and its forms as a conversation and as a row of an evaluation file."""

import json
from dataclasses import dataclass, field

from dataset.builtin.draw import Draw, Key
from dataset.tools import tools_json

Message = dict[str, str]

# The small courtesies that people put around a question, a task and a story; most go without.
FRAMES = {
    "question": {
        "en": (
            *("{}", "{}", "{}", "Hello! {}", "Please tell me: {}", "I have a question. {}"),
            *("Quick question: {}", "{} Thank you!"),
        ),
        "zh": ("{}", "{}", "{}", "你好！{}", "请告诉我：{}", "我有一个问题：{}", "请问，{}", "{}谢谢！"),
    },
    "task": {
        "en": (
            *("{}", "{}", "{}", "Hello! {}", "I have a task for you. {}", "Here is a small task: {}"),
            "{} Thank you!",
        ),
        "zh": ("{}", "{}", "{}", "你好！{}", "我有一个任务：{}", "帮我一个忙：{}", "{}谢谢！"),
    },
    "story": {
        "en": ("{}", "{}", "{}", "Listen! {}", "Here is a story. {}", "Read this: {}", "{} Thank you!"),
        "zh": ("{}", "{}", "{}", "你听：{}", "有一个故事：{}", "请读一读：{}", "{}谢谢！"),
    },
}


@dataclass(frozen=True)
class ToolUse:
    """One call of a tool and what it gives back."""

    name: str
    arguments: dict
    result: str


@dataclass(frozen=True)
class Question:
    """One question and its only right solution.

    `ask` is the bare question or task; `before` holds the messages that precede it. `accepted` are other replies that
    count as right; `wrong` is a plausible wrong reply. `keys` are the canonical keys that decide the split.
    """

    family: str
    language: str
    ask: str
    reply: str
    keys: tuple[Key, ...]
    accepted: tuple[str, ...] = ()
    wrong: str = ""
    reasoning: str = ""
    before: tuple[Message, ...] = ()
    check: str = "exact"
    frame: str = "question"
    tools: tuple[str, ...] = ()
    uses: tuple[ToolUse, ...] = ()
    free_arithmetic: bool = False
    value: str = field(default="")  # the bare answer, for prompts with a checkable answer


def message(role: str, content: str) -> Message:
    """A plain message."""
    return {"role": role, "content": content}


def framed(question: Question, draw: Draw) -> str:
    """The question within one of the small courtesies that people put around questions."""
    return draw.one(FRAMES[question.frame][question.language]).format(question.ask)


def tool_calls_json(use: ToolUse, arguments: dict | None = None) -> str:
    """The `tool_calls` string of an assistant message that makes this one call."""
    call = {"name": use.name, "arguments": use.arguments if arguments is None else arguments}
    return json.dumps([call], ensure_ascii=False)


def prompt_messages(question: Question, asked: str) -> list[Message]:
    """The messages up to and with the user's question `asked`."""
    before = [dict(entry) for entry in question.before]
    if question.tools:
        system = message("system", "")
        if before and before[0]["role"] == "system":
            system = before.pop(0)
        before.insert(0, system | {"tools": tools_json(question.tools)})
    return [*before, message("user", asked)]


def tool_messages(question: Question) -> list[Message]:
    """The calls and results that lead to the final reply."""
    messages = []
    for use in question.uses:
        messages.append(message("assistant", "") | {"tool_calls": tool_calls_json(use)})
        messages.append(message("tool", use.result))
    return messages


def final_message(question: Question) -> Message:
    """The assistant's last message, with its reasoning if it has one."""
    reply = message("assistant", question.reply)
    if question.reasoning:
        reply["reasoning_content"] = question.reasoning
    return reply


def conversation(question: Question, draw: Draw) -> list[Message]:
    """The whole conversation: prompt, tool calls and results, reply."""
    prompt = prompt_messages(question, framed(question, draw))
    return [*prompt, *tool_messages(question), final_message(question)]


def evaluation_row(question: Question, draw: Draw, identifier: str) -> dict:
    """The question as a row of an evaluation file."""
    row = {
        "id": identifier,
        "family": question.family,
        "language": question.language,
        "conversations": prompt_messages(question, framed(question, draw)),
        "answers": [question.reply, *question.accepted],
        "check": question.check,
    }
    if question.uses:
        row["check"] = "tool_call"
        row["tool_call"] = {"name": question.uses[0].name, "arguments": question.uses[0].arguments}
    row["free_arithmetic"] = question.free_arithmetic
    return row
