"""Rewards of reinforcement learning: plain functions of a reply and its row, which give 0 to 1.

A model that is trained against a verifier finds every hole in it. So a reply is right only as a whole: what it says
after its reasoning is one statement with one answer, it ended by itself, and it holds no markup of its own making.
`tests/trainer/test_rewards.py` has a table of attempts that must get nothing.
"""

import hashlib
import importlib.util
import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

from dataset.formats import parse_reply
from eval.questions import is_right
from eval.tasks import repeated_share

THINK_TOKENS = 256
MARKUP = re.compile(r"</?\s*(?:think|tool_call|tool_response|answer)\b|<\|", re.IGNORECASE)
# A number on its own: no letter, digit, underscore or mark of a larger whole on either side. Chinese may stand beside.
_SIDE = r"[A-Za-z\d_.,/\\:%°^'\"#*-]"
NUMBER = re.compile(rf"(?<!{_SIDE})[-+]?(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?(?!(?:[.,])?{_SIDE.replace('.,', '')})")
DASHES = str.maketrans("\u2212\u2013\u2010\u2011", "----")
SCALE = re.compile(
    r"\b(?:negative|minus|percent|hundred|thousand|million|billion|more|less|over|under|about|around|almost|nearly)\b"
    r"|[负百千万亿多少约近]",
    re.IGNORECASE,
)
DENIAL = re.compile(
    r"\b(?:not|no|never|neither|nor|isn't|wrong|or|either|maybe|perhaps|between)\b|不|非|或|没|别|错|也许", re.I
)


class Call(NamedTuple):
    """A tool call, and what came of it; a result that begins with "error: " says what was wrong with the call."""

    name: str
    arguments: Mapping[str, Any]
    result: str


@dataclass(frozen=True)
class Reply:
    """What a model said to a prompt, at last.

    Attributes:
        text: decoded, markup of reasoning and tool calls kept, the end of turn left off.
        message: the same as a message, see `dataset.formats.parse_reply`.
        ended: by the model itself, not by the limit.
        tokens: how many it drew.
        calls: the tool calls that it made on the way, with their results.
    """

    text: str
    message: Mapping[str, Any]
    ended: bool
    tokens: int
    calls: tuple[Call, ...] = ()

    @classmethod
    def of(cls, text: str, ended: bool = True, tokens: int = 0, open_thinking: bool | None = None) -> "Reply":
        """From the text alone."""
        return cls(text, parse_reply(text, open_thinking), ended, tokens)


Reward = Callable[[Reply, Mapping[str, Any]], float]


def answers_of(row: Mapping[str, Any]) -> list[str]:
    """The accepted answers of a prompt's row: its `gt` or `answer`, or what its last message said.

    Raises:
        ValueError: it has none.
    """
    extra = row.get("extra") or {}
    found = extra.get("gt", extra.get("answer"))
    if found is None and row.get("reference"):
        found = row["reference"].get("content")
    answers = [str(answer) for answer in (found if isinstance(found, list) else [found]) if answer not in (None, "")]
    if not answers:
        raise ValueError("the row has no answer to check a reply against: give it gt, answer, or a last message")
    return answers


def statement(reply: Reply) -> str | None:
    """What the reply says after its reasoning; None where it did not end, calls a tool, or has markup left."""
    content = reply.message.get("content") or ""
    if not reply.ended or reply.message.get("tool_calls") or MARKUP.search(content):
        return None
    if any(unicodedata.category(character) in ("No", "Nl") for character in content):
        return None  # circled, raised and Roman digits, which NFKC would turn into plain ones
    return unicodedata.normalize("NFKC", content).translate(DASHES).strip() or None


def exact(reply: Reply, row: Mapping[str, Any]) -> float:
    """1 where the reply is an accepted answer, without regard to case and the mark at its end."""
    said = statement(reply)
    return float(said is not None and is_right(said, answers_of(row), "exact"))


def number(reply: Reply, row: Mapping[str, Any]) -> float:
    """1 where the reply states one number, and it is the answer's; `12 + 30 = 42` states what is behind the sign."""
    said = statement(reply)
    if said is None or DENIAL.search(said):
        return 0.0
    question = row["messages"][-1]["content"] if row.get("messages") else ""
    found = _stated_number(said, question)
    return float(found is not None and any(found == _last_number(answer) for answer in answers_of(row)))


def _stated_number(text: str, question: str) -> Decimal | None:
    """The one number that a text states, at most behind a repetition of what the question asks."""
    digits = sum(character.isdigit() for character in text)
    if "=" in text:
        asked, _, text = text.partition("=")
        numbers = [_decimal(found) for found in NUMBER.findall(asked)]
        known = {_decimal(found) for found in NUMBER.findall(unicodedata.normalize("NFKC", question))}
        if "=" in text or len(numbers) < 2 or not set(numbers) <= known:
            return None
        digits = sum(character.isdigit() for character in text)
    found = NUMBER.findall(text)
    if SCALE.search(text):
        return None  # what stands beside the number changes it
    if len(found) != 1 or sum(character.isdigit() for character in found[0]) != digits:
        return None  # none, several, or digits that belong to something else
    return _decimal(found[0])


def _last_number(text: str) -> Decimal | None:
    """The number at the end of an answer, which may show its working before; None without any."""
    text = unicodedata.normalize("NFKC", text).strip().rstrip(".!。！").rstrip()
    found = list(NUMBER.finditer(text))
    return _decimal(found[-1][0]) if found and found[-1].end() == len(text) else None


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:  # digits of a script that NFKC leaves as they are
        return Decimal("NaN")


def form(reply: Reply, _row: Mapping[str, Any]) -> float:
    """1 where reasoning, if any, is one closed block at the start that says something, and an answer follows."""
    text = reply.text
    opens, closes = text.count("<think>"), text.count("</think>")
    if opens > 1 or closes > 1 or opens != closes or (opens and not text.lstrip().startswith("<think>")):
        return 0.0
    if opens and not (reply.message.get("reasoning_content") or "").strip():
        return 0.0
    return float(reply.ended and bool(statement(reply) or reply.message.get("tool_calls")))


def ended(reply: Reply, _row: Mapping[str, Any]) -> float:
    """1 where the model ended its turn."""
    return float(reply.ended)


def fresh(reply: Reply, _row: Mapping[str, Any]) -> float:
    """1 less the share of sequences of four words that repeat earlier ones."""
    share = repeated_share(reply.text)
    return 1.0 if share is None else 1.0 - share


def think_length(reply: Reply, _row: Mapping[str, Any]) -> float:
    """1 for a reply of at most 256 tokens, falling to 0 at twice as many."""
    return max(0.0, min(1.0, 2 - reply.tokens / THINK_TOKENS))


def tool(reply: Reply, row: Mapping[str, Any]) -> float:
    """1 where the reply makes the very calls of the row's last message, and none where that makes none."""
    wanted = (row.get("reference") or {}).get("tool_calls") or []
    made = reply.message.get("tool_calls") or []
    return float(reply.ended and [_call(call) for call in made] == [_call(call) for call in wanted])


def success(reply: Reply, row: Mapping[str, Any]) -> float:
    """1 where the answer is right and is what tools gave: no call failed, none was repeated, one had this result.

    The answer is right as for `number`, or for `exact` where what is asked for is no number.
    """
    made = [(call.name, re.sub(r"\s", "", json.dumps(call.arguments, sort_keys=True))) for call in reply.calls]
    if not made or len(set(made)) < len(made) or any(call.result.startswith("error: ") for call in reply.calls):
        return 0.0
    return float(any(_rests_on(reply, row, answer) for answer in answers_of(row)))


def _rests_on(reply: Reply, row: Mapping[str, Any], answer: str) -> bool:
    one = {**row, "extra": {"gt": [answer]}}
    value = _last_number(answer)
    if value is None:
        return exact(reply, one) > 0 and any(call.result.casefold() in answer.casefold() for call in reply.calls)
    return number(reply, one) > 0 and any(_last_number(call.result) == value for call in reply.calls)


def _call(call: Mapping[str, Any]) -> tuple[str, Any]:
    return call["name"], call["arguments"]


REWARDS: dict[str, Reward] = {
    "exact": exact,
    "number": number,
    "form": form,
    "ended": ended,
    "fresh": fresh,
    "think_length": think_length,
    "tool": tool,
    "success": success,
}


CHECKS_ANSWERS = (exact, number, success)


def check_answers(rows: Sequence[Mapping[str, Any]], rewards: Sequence["WeightedReward"]) -> None:
    """Raise ValueError unless each row has the answer that the rewards compare with."""
    judging = [reward.name for reward in rewards if reward.function in CHECKS_ANSWERS]
    if not judging:
        return
    needs_number = any(reward.function is number for reward in rewards)
    without = []
    for row in rows:
        try:
            fits = not needs_number or any(_last_number(answer) is not None for answer in answers_of(row))
        except ValueError:
            fits = False
        if not fits:
            without.append(row["messages"][-1]["content"])
    if without:
        raise ValueError(
            f"--rewards {' '.join(judging)}: {len(without):,} of {len(rows):,} prompts have no "
            f"{'number as their ' * needs_number}answer to compare with (give gt, answer, or a last message of the "
            f"assistant's), the first is {without[0][:80]!r}"
        )


@dataclass(frozen=True)
class WeightedReward:
    """A reward by its name and weight; one that `judges_all` takes lists of replies and rows, and gives a list."""

    name: str
    weight: float
    function: Callable[..., Any]
    judges_all: bool = False


def parse_rewards(words: Sequence[str]) -> list[WeightedReward]:
    """Rewards as they are named on the command line: NAME, NAME:WEIGHT, FILE.py:FUNCTION or FILE.py:FUNCTION:WEIGHT.

    Raises:
        ValueError: no reward, an unknown name, a weight that is not a number above 0, or a file without that function.
    """
    names = [word.partition(".py:")[2] or word for word in words]
    names = [name.partition(":")[0] for name in names]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"--rewards: {', '.join(twice)} stands there twice; their names must differ")
    if not words:
        raise ValueError(f"--rewards: name at least one of {', '.join(REWARDS)}, or FILE.py:FUNCTION")
    return [_parse_reward(word) for word in words]


def _parse_reward(word: str) -> WeightedReward:
    path, is_file, rest = word.partition(".py:")
    name, _, weight = (rest if is_file else word).partition(":")
    try:
        value = float(weight or 1)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"--rewards {word}: the weight {weight!r} must be a number above 0")
    if is_file:
        return WeightedReward(name, value, _from_file(Path(f"{path}.py"), name, word))
    if name not in REWARDS:
        raise ValueError(f"--rewards {word}: there is no {name!r}; take {', '.join(REWARDS)}, or FILE.py:FUNCTION")
    return WeightedReward(name, value, REWARDS[name])


def _from_file(path: Path, name: str, word: str) -> Reward:
    """A function of the user's own file, which is run."""
    if not path.is_file():
        raise ValueError(f"--rewards {word}: no file {path}")
    specification = importlib.util.spec_from_file_location(f"rewards_of_{path.stem}", path)
    module = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"--rewards {word}: {path} does not run: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"--rewards {word}: {path} has no function {name!r}")
    return function


def reward_fingerprint(words: Sequence[str], reward_model: str | None) -> str:
    """The sha256 of the users' files that judge; another judge makes another run."""
    digest = hashlib.sha256()
    paths = [Path(f"{word.partition('.py:')[0]}.py") for word in words if ".py:" in word]
    if reward_model is not None:
        paths += sorted(path for path in Path(reward_model).glob("*") if path.suffix in (".json", ".safetensors"))
    for path in paths:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
