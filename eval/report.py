"""Write the report of finished runs: out/report.md and report.html, evaluating first what was not evaluated yet.

Examples:
    python eval/report.py
    python eval/report.py --runs pretrain_256 full_sft_256
"""

import gc, pathlib, sys  # noqa: E401

sys.path[0] = sys.path[0] if __package__ else str(pathlib.Path(__file__).resolve().parents[1])
__package__ or gc.disable()  # a fifth of the time of the imports; `user_errors` turns it on again

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from transformers.utils import logging

from dataset.builtin.store import ensure_builtin_corpus
from eval.curves import draw_curves, draw_scores
from eval.experts import draw_experts
from eval.page import build_page
from eval.questions import Question, limit_questions, load_questions
from eval.records import RunRecord, find_records
from eval.rewarded import draw_rewards
from eval.stages import (
    EMBEDDED_ROWS,
    builtin_loss_data,
    command_line,
    evaluate_stage,
    fingerprint_of,
    questions_fingerprint,
    write_evaluation,
)
from eval.web_page import to_html
from trainer.config import ROOT, flag, parse_arguments, user_errors
from trainer.data import BUILTIN_FOLDER
from trainer.distributed import choose_device
from trainer.precision import choose_precision, has_native_bfloat16
from trainer.weights import load_tokenizer, open_model


@dataclasses.dataclass
class ReportArguments:
    """What is reported."""

    _argument_group_name = "report"

    out_dir: str = flag(str(ROOT / "out"), "folder of finished runs; the report goes there too")
    runs: list[str] | None = dataclasses.field(
        default=None, metadata={"help": "folder names in --out_dir, or paths; by default every finished run there"}
    )
    evaluate: Literal["missing", "all", "none"] = flag("missing", "which runs to evaluate first")
    max_questions: int = flag(0, "ask at most so many of the embedded test questions, evenly from all families; 0: all")
    batch_size: int = flag(128, "questions answered together")
    device: str = flag("auto", "cpu, cuda, cuda:1, mps; auto: the best there is")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = flag("auto", "precision; auto: what the device has")


def evaluate_record(record: RunRecord, questions: Sequence[Question], arguments: ReportArguments) -> None:
    """Evaluate a run on the embedded validation rows and questions, leaving its eval.json, and take the result in."""
    device = choose_device(arguments.device)
    dtype = choose_precision(device.type, has_native_bfloat16(device), arguments.dtype).dtype
    tokenizer = load_tokenizer(record.folder)
    model = open_model(record.folder).to(device)
    loss_data = builtin_loss_data(BUILTIN_FOLDER, tokenizer)
    result, replies = evaluate_stage(model, tokenizer, loss_data, questions, dtype, arguments.batch_size)
    about = {
        "model": record.name,
        "finished": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": command_line(),
        "questions": {"path": "embedded", "count": len(questions), "fingerprint": questions_fingerprint(questions)},
        "data": EMBEDDED_ROWS,
        "device": str(device),
    }
    write_evaluation(record.folder, about | result, replies)
    record.evaluation = about | result
    scores = result["scores"]
    print(
        f"  {record.name}: {scores['right']:,} of {scores['questions']:,} right, {result['seconds']:.0f} s", flush=True
    )


def evaluate_records(records: Sequence[RunRecord], arguments: ReportArguments) -> None:
    """Evaluate what `--evaluate` asks for.

    Runs that were trained on a user's own files are left alone unless all are asked for: the embedded questions are
    about a world that they never saw.
    """
    if arguments.evaluate == "none":
        return
    path = ensure_builtin_corpus(BUILTIN_FOLDER)["eval.test"]
    questions = limit_questions(load_questions(path), arguments.max_questions or None)
    fingerprint = questions_fingerprint(questions)
    for record in records:
        done = fingerprint_of(record.evaluation) == fingerprint and conditions(record) == (
            (EMBEDDED_ROWS, 0, 0),
            (0, "auto"),
        )
        if arguments.evaluate == "all" or not (done or record.data_paths):
            evaluate_record(record, questions, arguments)


def comparable_scores(records: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs that were scored on the same questions as the last scored one; dots of others would mislead."""
    scored = [record for record in records if record.family_scores]
    if not scored:
        return []
    wanted = fingerprint_of(scored[-1].evaluation), conditions(scored[-1])[1]
    return [record for record in scored if (fingerprint_of(record.evaluation), conditions(record)[1]) == wanted]


def conditions(record: RunRecord) -> tuple[tuple[Any, ...], Any]:
    """What losses of an evaluation depend on besides the model, and what scores do besides the questions."""
    evaluation = record.evaluation or {}
    of_losses = evaluation.get("data", EMBEDDED_ROWS), evaluation.get("stride") or 0, evaluation.get("max_batches") or 0
    return of_losses, (evaluation.get("max_new_tokens") or 0, evaluation.get("thinking") or "auto")


def write_report(records: Sequence[RunRecord], out_dir: Path) -> Path:
    """Draw the pictures and write report.md, and report.html, which has them inside; returns the path of the first.

    Raises:
        ValueError: the folder cannot be written to.
    """
    pictures = {}
    page = out_dir / "report.md"
    try:
        if any(record.has_curves for record in records):
            pictures["curves"] = "report_curves.png"
            draw_curves(records, out_dir / pictures["curves"])
        if comparable := comparable_scores(records):
            pictures["scores"] = "report_scores.png"
            draw_scores(comparable, out_dir / pictures["scores"])
        if draw_rewards(records, out_dir / "report_rewards.png"):
            pictures["rewards"] = "report_rewards.png"
        if draw_experts(records, out_dir / "report_experts.png"):
            pictures["experts"] = "report_experts.png"
        evaluated = [record for record in records if record.evaluation]
        for record in evaluated:
            if record.family_scores and record not in comparable:
                record.other_questions = True
                del record.evaluation["scores"]
            if conditions(record)[0] != conditions(evaluated[-1])[0]:
                record.evaluation.pop("losses", None)
        text = build_page(records, pictures)
        page.write_text(text, encoding="utf-8")
        page.with_suffix(".html").write_text(to_html(text, out_dir), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{page}: the report could not be written: {error}") from error
    return page


def main() -> None:
    """Entry point."""
    logging.disable_progress_bar()
    (arguments,) = parse_arguments(ReportArguments, description=__doc__.split("\n", 1)[0])
    if arguments.max_questions < 0 or arguments.batch_size < 1:
        raise ValueError("--max_questions must not be negative, and --batch_size must be at least 1")
    out_dir = Path(arguments.out_dir)
    records = find_records(out_dir, arguments.runs)
    print(f"runs: {', '.join(record.name for record in records)}", flush=True)
    evaluate_records(records, arguments)
    page = write_report(records, out_dir)
    print(f"wrote {page} and {page.with_suffix('.html').name}")


if __name__ == "__main__":
    with user_errors():
        main()
