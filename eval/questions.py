"""Questions that a program can check: their file format, and the rules by which a reply is right."""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from dataset.formats import check_encodable, normalise_messages, normalise_tools
from eval.forms import check_form, describe_form

CHECKS = ("exact", "number", "tool_call", "choice", "form")

CLOSING_MARKS = ".!?…。．！？"

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""

NUMBER = re.compile(r"(?<![\d.])[-−]?(?:\d+(?:,\d{3}(?!\d))*(?:\.\d+)?|\.\d+)")


@dataclass(frozen=True)
class Interval:
    """Bounds of a proportion."""

    low: float
    high: float


@dataclass(frozen=True)
class Question:
    """One question of an evaluation file; `messages` end with what the model has to reply to."""

    id: str
    family: str
    language: str
    messages: list[dict[str, Any]]
    answers: tuple[str, ...]
    tools: list[dict[str, Any]] | None = None
    check: str = "exact"
    tool_call: dict[str, Any] | None = None
    free_arithmetic: bool = False
    choices: tuple[str, ...] = ()
    prompt: str | None = None
    """Of a multiple choice without a chat template: the text before the choices, the space between included."""
    form: dict[str, Any] | None = None


def load_questions(path: str | Path) -> list[Question]:
    """The questions of a jsonl file, one JSON object a line.

    A row needs `conversations` (messages that end with a user's or a tool's) and `answers` (accepted replies). It may
    have `id`, `family`, `language`, `check` (exact, number or tool_call), `tool_call` ({"name", "arguments"}, for the
    check of that name) and `free_arithmetic`. Instead of `answers` it may have `choices` and `answer`, the right one's
    number from 0, which are weighed rather than asked; then a text, `prompt`, may stand for the conversation, with
    `delimiter` (a space) behind it. Or `form`, rules that the reply has to follow, see `eval.forms`.

    Raises:
        ValueError: no such file, nothing in it, or unusable rows; the message names the file and the first few lines.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: the questions cannot be read: {error}") from error
    questions: list[Question] = []
    line_of_id: dict[str, int] = {}
    problems = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            question = _parse_question(line, default_id=f"line-{number}")
            if question.id in line_of_id:
                raise ValueError(f"the id {question.id!r} is already that of line {line_of_id[question.id]}")
        except ValueError as error:
            problems.append(f"line {number}: {error}")
            continue
        line_of_id[question.id] = number
        questions.append(question)
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"{path}: {len(problems)} unusable rows: {'; '.join(problems[:5])}{more}")
    if not questions:
        raise ValueError(f"{path}: holds no questions; write one JSON object a line with conversations and answers")
    return questions


def limit_questions(questions: Sequence[Question], maximum: int | None) -> list[Question]:
    """At most `maximum` questions, taken evenly from all families and languages, in the order of the file."""
    if maximum is None or maximum >= len(questions):
        return list(questions)
    seen: Counter[tuple[str, str]] = Counter()
    ranks = []
    for question in questions:
        ranks.append(seen[question.family, question.language])
        seen[question.family, question.language] += 1
    chosen = sorted(range(len(questions)), key=lambda index: (ranks[index], index))[:maximum]
    return [questions[index] for index in sorted(chosen)]


def _parse_question(line: str, default_id: str) -> Question:
    """One row; raises ValueError that says what is wrong with it."""
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, found {type(row).__name__}")
    check_encodable(json.dumps(row, ensure_ascii=False))
    messages, tools, prompt = _parse_asking(row)
    check = row.get("check") or ("choice" if "choices" in row else "form" if "form" in row else "exact")
    if check not in CHECKS:
        raise ValueError(f"check {check!r} is unknown; use {', '.join(CHECKS)}")
    if prompt is not None and check != "choice":
        raise ValueError("prompt is for rows with choices; others need conversations")
    choices = _parse_choices(row) if check == "choice" else ()
    if check == "form":
        check_form(row.get("form"))
        answers = [describe_form(row["form"])]
    else:
        answers = [choices[row["answer"]]] if choices else row.get("answers")
    if not isinstance(answers, list) or not answers or not all(isinstance(text, str) and text for text in answers):
        raise ValueError("answers must be a list of one or more texts")
    if check == "number" and not any(only_number(text) is not None for text in answers):
        raise ValueError(f"check number needs an answer with exactly one number, found {answers[0]!r}")
    call = row.get("tool_call")
    if check == "tool_call" and not _is_call(call):
        raise ValueError('check tool_call needs tool_call: {"name": text, "arguments": object}')
    if check == "tool_call" and not tools:
        raise ValueError("check tool_call needs tools to call")
    if not isinstance(row.get("free_arithmetic", False), bool):
        raise ValueError(f"free_arithmetic {row['free_arithmetic']!r} must be true or false")
    return Question(
        id=_name(row, "id", default_id),
        family=_name(row, "family", "questions"),
        language=_name(row, "language", "-"),
        messages=messages,
        answers=tuple(answers),
        tools=tools,
        check=check,
        tool_call=call,
        free_arithmetic=row.get("free_arithmetic", False),
        choices=choices,
        prompt=prompt,
        form=row["form"] if check == "form" else None,
    )


def _name(row: dict[str, Any], key: str, default: str) -> str:
    return default if row.get(key) is None else str(row[key])


def _parse_asking(row: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, str | None]:
    """(messages, tools, text in their place or None) of a row."""
    prompt, delimiter = row.get("prompt"), row.get("delimiter", " ")
    if prompt is not None and "conversations" not in row:
        if not isinstance(prompt, str) or not isinstance(delimiter, str):
            raise ValueError("prompt and delimiter must be texts")
        return [{"role": "user", "content": prompt}], None, prompt + delimiter
    if not isinstance(row.get("conversations"), list):
        raise ValueError('conversations must be a list of {"role", "content"} messages')
    messages, tools = normalise_messages(row["conversations"])
    if messages[-1]["role"] not in ("user", "tool"):
        raise ValueError(f"the last message must be a user's or a tool's, not the {messages[-1]['role']}'s")
    return messages, normalise_tools(row.get("tools")) or tools, None


def _parse_choices(row: dict[str, Any]) -> tuple[str, ...]:
    choices, answer = row.get("choices"), row.get("answer")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(text, str) and text for text in choices):
        raise ValueError("choices must be a list of two or more texts")
    if len(set(choices)) < len(choices):
        raise ValueError("two choices are the same")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(f"answer {answer!r} must be the number of the right choice, 0 to {len(choices) - 1}")
    return tuple(choices)


def _is_call(call: Any) -> bool:
    return isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("arguments"), dict)


def normalise(text: str) -> str:
    """What exact matching compares: NFC, without case, outer white space and the marks that close a sentence."""
    text = unicodedata.normalize("NFC", text).casefold().strip()
    # Only marks that close a sentence: brackets or stars may be what the question asks for.
    bare = text.rstrip(CLOSING_MARKS + " ")
    return bare or text  # a text of marks alone stays what it is: silence must not match it


def only_number(text: str) -> Decimal | None:
    """The one number that a text holds; None when it holds none, or two different ones."""
    numbers = {Decimal(found.replace(",", "").replace("−", "-")) for found in NUMBER.findall(text)}
    return numbers.pop() if len(numbers) == 1 else None


def accepted_forms(answer: str, check: str) -> set[str | Decimal]:
    """What counts as this answer: a reply is right if one of its `reply_forms` is among them."""
    forms: set[str | Decimal] = {_in_capitals(answer) or normalise(answer)}
    number = only_number(answer) if check == "number" else None
    return forms if number is None else forms | {number}


def reply_forms(reply: str, check: str) -> set[str | Decimal]:
    """What a reply counts as."""
    return accepted_forms(reply, check) | {normalise(reply)}


def _in_capitals(text: str) -> str:
    """A form apart for a word in capitals, since a question that asks for them must not take small letters; or ""."""
    is_capital = text.isupper() and sum(character.isalpha() for character in text) > 1
    return f"CAPITALS {normalise(text)}" if is_capital else ""


def is_right(reply: str, answers: Iterable[str], check: str) -> bool:
    """Whether a reply is one of the accepted answers, or for the check "number" states the same single number."""
    forms = reply_forms(reply, check)
    return any(forms & accepted_forms(answer, check) for answer in answers)


def best_constant(questions: Sequence[Question]) -> int:
    """How many questions the best single reply gets right: what a model can score that ignores what it is asked."""
    counts: Counter[str | Decimal] = Counter()
    for question in questions:
        forms = set().union(*(accepted_forms(answer, question.check) for answer in question.answers))
        if question.tool_call is not None:
            # A constant reply to a tool question would have to make the same call too.
            call = json.dumps(question.tool_call, sort_keys=True, ensure_ascii=False)
            forms = {f"{call} {form}" for form in forms}
        counts.update(forms)
    return max(counts.values(), default=0)


def wilson_interval(right: int, total: int, z: float = Z_95) -> Interval:
    """Wilson's score interval of a proportion (Wilson 1927): sound at 0 % and 100 % too, where the usual one is empty.

    Raises ValueError unless 0 <= right <= total. Without any trial all proportions are possible.
    """
    if not 0 <= right <= total:
        raise ValueError(f"{right} right of {total} is not a proportion")
    if total == 0:
        return Interval(0.0, 1.0)
    share = right / total
    scale = 1 + z * z / total
    centre = (share + z * z / (2 * total)) / scale
    half = z / scale * (share * (1 - share) / total + z * z / (4 * total * total)) ** 0.5
    return Interval(max(0.0, centre - half), min(1.0, centre + half))
