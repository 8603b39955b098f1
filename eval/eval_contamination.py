"""Look for evaluation text in training data: shared n-grams of words, with the rows that have them.

Examples:
    python eval/eval_contamination.py --eval_path my_questions.jsonl --data_path my_chats.jsonl
    python eval/eval_contamination.py --eval_path my.val.jsonl --data_path corpus/*.parquet --ngram_words 8
"""

import gc, pathlib, sys  # noqa: E401

sys.path[0] = sys.path[0] if __package__ else str(pathlib.Path(__file__).resolve().parents[1])
__package__ or gc.disable()  # a fifth of the time of the imports; `user_errors` turns it on again

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dataset.formats import normalise_messages, text_from_row, words_of
from eval.contamination import FEWEST_WORDS, NGRAM_WORDS, Overlap, find_overlaps
from eval.texts import Text, text_of_any_row, texts_of
from trainer.config import flag, output_problems, parse_arguments, raise_problems, user_errors


@dataclasses.dataclass
class ContaminationArguments:
    """What is compared."""

    _argument_group_name = "contamination"

    eval_path: list[str] = dataclasses.field(
        default_factory=list, metadata={"help": "evaluation data: questions with answers, documents, conversations"}
    )
    data_path: list[str] = dataclasses.field(
        default_factory=list, metadata={"help": "training data, in any form that training takes"}
    )
    ngram_words: int = flag(NGRAM_WORDS, "words of an n-gram; each Chinese or Japanese character is a word")
    threshold: float = flag(0.5, "a text counts as leaked when at least this part of its n-grams is in the data")
    samples: int = flag(20, "leaked texts printed")
    output: str | None = flag(None, "jsonl of every text that shares anything, with its rows")

    def problems(self) -> list[str]:
        """What is missing or out of range, by flag."""
        found = [f"--{name}: give at least one file" for name in ("eval_path", "data_path") if not getattr(self, name)]
        if self.ngram_words < FEWEST_WORDS:
            found.append(f"--ngram_words {self.ngram_words} must be at least {FEWEST_WORDS}: fewer words are anywhere")
        if not 0 < self.threshold <= 1:
            found.append(f"--threshold {self.threshold:g} must lie above 0 and up to 1")
        found += output_problems(self.output, [*self.eval_path, *self.data_path])
        if self.samples < 0:
            found.append(f"--samples {self.samples} must not be negative")
        return found


def evaluation_text(row: dict[str, Any]) -> str:
    """What a row of an evaluation asks, and all that it answers or lets choose."""
    said = [text for name in ("answers", "choices") for text in _texts(row.get(name))]
    if said and "conversations" in row:
        return "\n".join([words_of(normalise_messages(row["conversations"])[0]), *said])
    if said and isinstance(row.get("prompt"), str):
        return "\n".join([row["prompt"], *said])
    return text_from_row(row)


def _texts(value: Any) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def print_overlaps(overlaps: Sequence[Overlap], texts: Sequence[Text], threshold: float, num_samples: int) -> None:
    """How many leaked, and the first of them with their rows."""
    judged = [overlap for overlap in overlaps if overlap.ngrams]
    leaked = [index for index, overlap in enumerate(overlaps) if overlap.ngrams and overlap.share >= threshold]
    some = sum(overlap.found > 0 for overlap in judged)
    print(
        f"{len(leaked):,} of {len(judged):,} texts leaked (at least {threshold:.0%} of their n-grams are in the data), "
        f"{some:,} share any; {len(overlaps) - len(judged):,} are too short to judge"
    )
    for index in sorted(leaked, key=lambda index: -overlaps[index].share)[:num_samples]:
        overlap = overlaps[index]
        print(f"  {overlap.place} ({overlap.share:.0%}) in {', '.join(overlap.rows)}: {texts[index].text[:100]!r}")


def write_overlaps(overlaps: Sequence[Overlap], path: Path) -> None:
    """Every text that shares anything, a JSON object a line.

    Raises:
        ValueError: the file cannot be written.
    """
    lines = [dataclasses.asdict(overlap) | {"share": overlap.share} for overlap in overlaps if overlap.found]
    try:
        path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--output {path}: could not be written: {error}") from error


def main() -> None:
    """Entry point."""
    (arguments,) = parse_arguments(ContaminationArguments, description=__doc__.split("\n", 1)[0])
    raise_problems(arguments.problems())
    texts = list(texts_of(arguments.eval_path, evaluation_text, "evaluation"))
    rows = texts_of(arguments.data_path, text_of_any_row, "training data")
    overlaps = find_overlaps(texts, rows, arguments.ngram_words)
    print_overlaps(overlaps, texts, arguments.threshold, arguments.samples)
    if arguments.output:
        write_overlaps(overlaps, Path(arguments.output))


if __name__ == "__main__":
    with user_errors():
        main()
