"""The whole evaluation of one stage: losses on validation text, scores on questions, and the files that keep them.

`eval_llm.py` and `report.py` both call this, so a number in the report is the number that the command prints.
"""

import contextlib
import hashlib
import json
import math
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from dataset.builtin.store import ensure_builtin_corpus
from dataset.formats import row_kind
from dataset.lm_dataset import MixtureDataset, collate_rows
from dataset.sources import RowReader, parse_sources
from dataset.text_statistics import LANGUAGES
from dataset.token_bytes import token_byte_lengths
from eval.bpb import LossSums, evaluate_bpb_by, languages_of_documents
from eval.questions import Question
from eval.tasks import TaskReport, score_questions

ROOT = Path(__file__).resolve().parents[1]
EVALUATION_FILE = "eval.json"
REPLIES_FILE = "eval_replies.jsonl"
WINDOW = 512
"""Tokens in a row of validation text; the same for every stage, whatever it was trained with."""

EMBEDDED_ROWS = "the embedded validation rows"


def builtin_loss_data(folder: str | Path, tokenizer, window: int = WINDOW) -> dict[str, MixtureDataset]:
    """The embedded validation rows: "text", and "chat" with a loss on what the assistant says.

    Without a chat template there are no chats.
    """
    paths = ensure_builtin_corpus(folder)
    parts = {"text": "pretrain.val"} | ({"chat": "sft.val"} if tokenizer.chat_template else {})
    return {name: MixtureDataset(paths[part], tokenizer, window, say=None) for name, part in parts.items()}


def loss_data_of(
    paths: Sequence[str], tokenizer, window: int = WINDOW, strict: bool = False
) -> dict[str, MixtureDataset]:
    """A user's validation rows by what they are, "text" and "chat"; by file too where there are several.

    Raises:
        ValueError: a file that cannot be read or used.
    """
    data: dict[str, MixtureDataset] = {}
    sources = parse_sources(paths)
    for source in sources:
        kinds = set()
        for row in RowReader(source.path, say=None):
            with contextlib.suppress(ValueError):  # a bad row is counted when the data set is made
                kinds.add(row_kind(row.value))
            if len(kinds) == 2:
                break
        # Without any usable row the data set raises the error that lists them.
        for kind in sorted(kinds, reverse=True) or ["text"]:
            only = "document" if kind == "text" else "conversation"
            file = Path(source.path).name
            same_name = sum(Path(other.path).name == file for other in sources) > 1
            name = kind if len(paths) == 1 else f"{source.path if same_name else file} ({kind})"
            data[name] = MixtureDataset(source.path, tokenizer, window, strict=strict, only=only)
    return data


def evaluate_losses(
    model, tokenizer, data: Mapping[str, Dataset], dtype: torch.dtype, batch_size: int, max_batches: int | None = None
) -> dict[str, dict[str, float]]:
    """Loss, perplexity and bits per byte on each set and, in `languages`, on its documents of each language.

    Computed under autocast in `dtype` (none for float32).

    Raises:
        ValueError: a set has no token to predict.
    """
    token_bytes, group_of = token_byte_lengths(tokenizer), languages_of_documents(tokenizer)
    device = next(model.parameters()).device
    results = {}
    for name, rows in data.items():
        loader = DataLoader(rows, batch_size=batch_size, collate_fn=collate_rows)
        precision = contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)
        with precision:
            by_language = evaluate_bpb_by(group_of, model, loader, max_batches, token_bytes)
        sums = sum(by_language.values(), LossSums())
        if not sums.tokens:
            raise ValueError(f"the validation data {name!r} has no token to predict")
        languages = {LANGUAGES[number]: _finite(sums) for number, sums in sorted(by_language.items()) if sums.tokens}
        results[name] = _finite(sums) | {"languages": languages}
    return results


def _finite(sums: LossSums) -> dict[str, float | None]:
    return {key: value if math.isfinite(value) else None for key, value in sums.to_dict().items()}


def evaluate_stage(
    model,
    tokenizer,
    loss_data: Mapping[str, Dataset],
    questions: Sequence[Question],
    dtype: torch.dtype,
    batch_size: int = 128,
    max_new_tokens: int | None = None,
    max_batches: int | None = None,
    seed: int = 0,
    open_thinking: bool | None = None,
) -> tuple[dict[str, Any], TaskReport | None]:
    """Everything that is measured of a finished stage. The model is left as it was.

    Args:
        model: MiniMindForCausalLM with float32 weights on its device.
        tokenizer: its tokenizer.
        loss_data: validation rows by name; may be empty.
        questions: may be empty.
        dtype: computes the losses (by autocast) and the replies (by a copy of the weights).
        batch_size: prompts answered together; an eighth of it for losses, whose rows are longer.
        max_new_tokens, max_batches: caps, see `score_questions` and `evaluate_bpb`.
        seed: of the sampler.
        open_thinking: see `score_questions`.

    Returns:
        What goes into eval.json, and the scored replies, or None without questions.
    """
    started = time.perf_counter()
    result: dict[str, Any] = {
        "losses": evaluate_losses(model, tokenizer, loss_data, dtype, max(1, batch_size // 8), max_batches)
    }
    report = None
    if questions:
        report = score_questions(
            model, tokenizer, questions, max_new_tokens, batch_size, seed, dtype=dtype, open_thinking=open_thinking
        )
        result |= {"scores": report.to_dict(), "samples": report.samples()}
    result["seconds"] = time.perf_counter() - started
    return result, report


def short_path(path: str | Path) -> str:
    """A path as a reader wants it: from the repository's root where it lies inside, else as it is."""
    absolute = Path(path).resolve()
    return str(absolute.relative_to(ROOT)) if absolute.is_relative_to(ROOT) else str(path)


def command_line() -> str:
    """The command that started this process, to be typed at the repository's root."""
    return shlex.join(["python", short_path(sys.argv[0]), *sys.argv[1:]])


def questions_fingerprint(questions: Sequence[Question]) -> str:
    """Changes with any question: scores may be compared only where this is equal."""
    content = json.dumps([repr(question) for question in questions])
    return hashlib.sha256(content.encode()).hexdigest()


def write_evaluation(folder: Path, result: dict[str, Any], report: TaskReport | None) -> Path:
    """Leave eval.json and, one reply a line, eval_replies.jsonl in a model's folder; returns the path of the first.

    An evaluation on other questions stays beside it, as eval.FINGERPRINT.json and eval_replies.FINGERPRINT.jsonl.

    Raises:
        ValueError: the folder cannot be written to.
    """
    replies = "" if report is None else "".join(_line(item.to_dict()) for item in report.answered)
    text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    path = folder / EVALUATION_FILE
    try:
        before = fingerprint_of(read_evaluation(folder))
        if before not in (None, fingerprint_of(result)):
            for old in (path, folder / REPLIES_FILE):
                if old.is_file():
                    old.replace(old.with_name(f"{old.stem}.{before[:8]}{old.suffix}"))
        replace_text(folder / REPLIES_FILE, replies)
        replace_text(path, text)
    except OSError as error:
        raise ValueError(f"{path}: the evaluation could not be written: {error}") from error
    return path


def read_evaluation(folder: Path) -> dict[str, Any] | None:
    """The eval.json of a model's folder; None when there is none that can be read."""
    try:
        result = json.loads((folder / EVALUATION_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) else None


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"


def fingerprint_of(evaluation: Mapping[str, Any] | None) -> str | None:
    """Of the questions of an eval.json; None where it has none."""
    questions = (evaluation or {}).get("questions")
    found = questions.get("fingerprint") if isinstance(questions, dict) else None
    return found if isinstance(found, str) else None


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
