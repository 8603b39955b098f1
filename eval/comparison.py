"""Two models on the same questions: the difference that counts is in the questions that only one of them gets right."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.questions import Z_95, Interval
from eval.stages import REPLIES_FILE

FIELDS = ("family", "language", "prompt", "reply", "expected")


@dataclass(frozen=True)
class Comparison:
    """A paired comparison.

    Attributes:
        shared: questions that both answered.
        only_first, only_second: questions that only one of them got right.
        missing: questions that one of them did not answer; they do not count.
    """

    shared: int
    only_first: int
    only_second: int
    missing: int = 0

    @property
    def difference(self) -> float:
        """Accuracy of the second minus that of the first."""
        return (self.only_second - self.only_first) / self.shared if self.shared else 0.0

    @property
    def p_value(self) -> float:
        """McNemar's exact test (two-sided): how often equal models differ at least so much by chance."""
        return sign_test(self.only_first, self.only_second)

    @property
    def interval(self) -> Interval:
        """95 % interval of the difference of accuracies (Agresti and Min 2005: half a question more in each cell)."""
        if not self.shared:
            return Interval(-1.0, 1.0)
        total, first, second = self.shared + 2, self.only_first + 0.5, self.only_second + 0.5
        centre = (second - first) / total
        half = Z_95 * math.sqrt(first + second - (second - first) ** 2 / total) / total
        return Interval(max(-1.0, centre - half), min(1.0, centre + half))


def sign_test(first: int, second: int) -> float:
    """Two-sided probability of a split at least as uneven as first : second if both were equally likely."""
    total, term, below = first + second, 1, 0
    for count in range(min(first, second) + 1):
        below += term
        term = term * (total - count) // (count + 1)
    return min(1.0, 2 * below / 2**total) if total < 1000 else min(1.0, math.exp(_log(2 * below) - total * math.log(2)))


def _log(value: int) -> float:
    """Natural logarithm of an integer that may be too large for a float."""
    shift = max(0, value.bit_length() - 60)
    return math.log(value >> shift) + shift * math.log(2)


def compare(first: Mapping[str, bool], second: Mapping[str, bool]) -> Comparison:
    """Compare verdicts by question id."""
    shared = first.keys() & second.keys()
    return Comparison(
        shared=len(shared),
        only_first=sum(first[name] and not second[name] for name in shared),
        only_second=sum(second[name] and not first[name] for name in shared),
        missing=len(first.keys() ^ second.keys()),
    )


def verdicts_of(folder: Path) -> dict[str, bool]:
    """Which questions an evaluated model got right, by `question_key`.

    Raises ValueError as `replies_of` does.
    """
    return {question_key(reply): reply["right"] for reply in replies_of(folder)}


def question_key(reply: Mapping[str, Any]) -> str:
    """What two questions have in common if they are one: ids of another file may be the same, and answers corrected."""
    return "\n".join(str(reply[name]) for name in ("id", "prompt", "expected"))


def replies_of(folder: Path) -> list[dict[str, Any]]:
    """What an evaluated model said to each question: id, family, language, prompt, reply, expected, right.

    Raises:
        ValueError: it was not evaluated, or the file cannot be read.
    """
    path = folder / REPLIES_FILE
    try:
        replies = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        return [
            {"id": str(reply["id"]), "right": bool(reply["right"])}
            | {name: str(reply.get(name, "-")) for name in FIELDS}
            for reply in replies
        ]
    except FileNotFoundError:
        raise ValueError(
            f"{folder}: not evaluated; do it with: python eval/eval_llm.py --model_path {folder}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read: {error!r}") from error
