"""Judge a model: loss, perplexity and bits per byte on validation text, and scored answers to questions by family.

Examples:
    python eval/eval_llm.py --weight full_sft
    python eval/eval_llm.py --model_path out/pretrain_256 --max_questions 500
    python eval/eval_llm.py --data_path my.val.jsonl --questions my_questions.jsonl
"""

import gc, pathlib, sys  # noqa: E401

sys.path[0] = sys.path[0] if __package__ else str(pathlib.Path(__file__).resolve().parents[1])
__package__ or gc.disable()  # a fifth of the time of the imports; `user_errors` turns it on again

import dataclasses
import time
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from dataset.builtin.store import ensure_builtin_corpus
from dataset.chat import OPEN_THINKING
from eval.comparison import compare, question_key, verdicts_of
from eval.questions import Question, limit_questions, load_questions
from eval.stages import (
    EMBEDDED_ROWS,
    WINDOW,
    builtin_loss_data,
    command_line,
    evaluate_stage,
    loss_data_of,
    questions_fingerprint,
    short_path,
    write_evaluation,
)
from eval.tasks import TaskReport
from eval.windows import SlidingWindows
from model.model_minimind import count_parameters
from trainer.config import ModelChoice, flag, parse_arguments, user_errors
from trainer.data import BUILTIN_FOLDER
from trainer.distributed import choose_device
from trainer.precision import choose_precision, has_native_bfloat16
from trainer.weights import find_folder, load_tokenizer, open_model


@dataclasses.dataclass
class EvaluationArguments:
    """What it is judged on. Without these flags: the embedded validation rows and test questions."""

    _argument_group_name = "evaluation"

    data_path: list[str] | None = dataclasses.field(
        default=None, metadata={"help": "validation files for the losses: documents, conversations or both"}
    )
    questions: str | None = flag(None, "jsonl of your own questions: conversations, answers, family, check")
    split: Literal["test", "val"] = flag("test", "which of the embedded questions")
    max_questions: int = flag(0, "ask at most so many, evenly from all families; 0: all")
    max_batches: int = flag(0, "batches of validation rows for each loss; 0: all")
    max_new_tokens: int = flag(0, "longest reply; 0: three times the longest right one of the family, and some")
    thinking: Literal["auto", "on", "off"] = flag("auto", "reasoning before the answer; auto: as the model likes")
    batch_size: int = flag(128, "questions answered together")
    stride: int = flag(0, "slide windows of 512 tokens over long documents by so many; 0: packed rows, as in training")
    compare_with: str | None = flag(None, "folder of another evaluated model: differences on the same questions")
    strict: Literal[0, 1] = flag(0, "1: any unusable row of --data_path is an error")
    samples: int = flag(6, "replies printed")
    seed: int = flag(0, "seed of the sampler (which is greedy)")

    def validate(self) -> None:
        """Raise ValueError that names the first flag out of range."""
        for name in ("max_questions", "max_batches", "max_new_tokens", "samples"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name} {getattr(self, name)} must not be negative; 0 means no limit")
        if not 0 <= self.stride < WINDOW:
            raise ValueError(f"--stride {self.stride} must lie in 0 to {WINDOW - 1}: windows of {WINDOW} overlap")
        if self.batch_size < 1:
            raise ValueError(f"--batch_size {self.batch_size} must be at least 1")


def evaluate(choice: ModelChoice, arguments: EvaluationArguments) -> tuple[Path, dict[str, Any], TaskReport | None]:
    """Evaluate what the flags name; returns the model's folder, what goes into eval.json, and the replies."""
    arguments.validate()
    if arguments.compare_with:
        verdicts_of(Path(arguments.compare_with))  # a mistake shows now
    questions_path = Path(arguments.questions or ensure_builtin_corpus(BUILTIN_FOLDER)[f"eval.{arguments.split}"])
    questions = limit_questions(load_questions(questions_path), arguments.max_questions or None)
    folder = find_folder(choice)
    device = choose_device(choice.device)
    precision = choose_precision(device.type, has_native_bfloat16(device), choice.dtype)
    tokenizer = load_tokenizer(folder)
    model = open_model(folder).to(device)
    picked = "" if choice.model_path else " (the newest of that name)"
    print(f"model: {folder}{picked}, {count_parameters(model)[0] / 1e6:.2f}M parameters")
    print(f"precision: {str(precision.dtype).removeprefix('torch.')} on {device} ({precision.reason})", flush=True)
    if arguments.data_path is None:
        loss_data = builtin_loss_data(BUILTIN_FOLDER, tokenizer)
    else:
        loss_data = loss_data_of(arguments.data_path, tokenizer, strict=bool(arguments.strict))
    if arguments.stride:
        loss_data = {name: SlidingWindows(data, WINDOW, arguments.stride) for name, data in loss_data.items()}
    result, report = evaluate_stage(
        model, tokenizer, loss_data, questions, precision.dtype, arguments.batch_size,
        arguments.max_new_tokens or None, arguments.max_batches or None, arguments.seed,
        OPEN_THINKING[arguments.thinking],
    )  # fmt: skip
    return folder, {"model": folder.name} | describe(choice, arguments, questions, questions_path) | result, report


def describe(
    choice: ModelChoice, arguments: EvaluationArguments, questions: list[Question], questions_path: Path
) -> dict[str, Any]:
    """What eval.json says of how it was made."""
    return {
        "finished": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": command_line(),
        "questions": {
            "path": short_path(questions_path),
            "count": len(questions),
            "fingerprint": questions_fingerprint(questions),
        },
        "data": arguments.data_path or EMBEDDED_ROWS,
        "stride": arguments.stride,
        "max_batches": arguments.max_batches,
        "max_new_tokens": arguments.max_new_tokens,
        "thinking": arguments.thinking,
        "device": choice.device,
    }


def print_evaluation(result: dict[str, Any], report: TaskReport | None, num_samples: int, console: Console) -> None:
    """The losses, the scores by family, tools and turns, and some replies, as tables."""
    losses = Table("validation", "loss", "perplexity", "bits per byte", "tokens", "bytes", title="Losses")
    for name, sums in result["losses"].items():
        languages = sums["languages"] if len(sums["languages"]) > 1 else {}
        for label, part in [(name, sums), *((f"  {language}", part) for language, part in languages.items())]:
            values = [part[key] for key in ("loss", "perplexity", "bits_per_byte")]
            figures = ["-" if value is None else f"{value:.4f}" for value in values]
            losses.add_row(label, *figures, f"{part['tokens']:,}", f"{part['bytes']:,}")
    console.print(losses)
    if report is None:
        return
    console.print(scores_table(report))
    tools = report.tools
    if tools.total:
        console.print(
            f"tool calls: {tools.total} asked for, well-formed {tools.well_formed / tools.total:.1%}, right tool "
            f"{tools.right_name / tools.total:.1%}, right arguments {tools.right_arguments / tools.total:.1%}, right "
            f"final answer {tools.right_final_answer / tools.total:.1%}"
        )
    for score in report.families:
        if score.right_by_bytes is not None:
            console.print(
                f"{score.family}, {score.language}: right by log-likelihood {score.right / score.total:.1%}, "
                f"per character {score.right_by_characters / score.total:.1%}, "
                f"per byte {score.right_by_bytes / score.total:.1%}"
            )
    if any(item.turns for item in report.answered):
        console.print(f"turns that the model ended itself: {report.turn_ending_rate:.2%}")
        repeated = f"{report.repetition_rate:.2%}"
        console.print(f"sequences of four words that repeat earlier ones of the same reply: {repeated}")
    console.print(
        f"{len(report.answered):,} questions in {report.seconds:.0f} s, with the losses {result['seconds']:.0f} s"
    )
    for sample in report.samples()[:: max(1, len(report.samples()) // max(1, num_samples))][:num_samples]:
        verdict = "right" if sample["right"] else f"wrong, expected {sample['expected']!r}"
        line = f"  {sample['family']} | {sample['prompt']} -> {sample['reply']!r} ({verdict})"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def describe_comparison(other: Path, report: TaskReport) -> str:
    """How the evaluated model differs from another one on the same questions."""
    found = compare(
        verdicts_of(other),
        {question_key(item.to_dict()): item.right for item in report.answered},
    )
    if not found.shared:
        return f"beside {other.name}: no question in common"
    sure = "more than chance" if found.p_value < 0.05 else "may be chance"
    change = f"{found.difference:+.1%} [{found.interval.low:+.1%} to {found.interval.high:+.1%}]"
    return (
        f"beside {other.name}, {found.shared:,} questions: {found.only_second:,} newly right, "
        f"{found.only_first:,} newly wrong, {change}, {sure} (McNemar's exact test, p = {found.p_value:.1e})"
        + f"; {found.missing:,} not shared"
        * bool(found.missing)
    )


def scores_table(report: TaskReport) -> Table:
    """A row for each family, a column for each language: right/total, accuracy, interval, best constant reply."""
    scores = {(score.family, score.language): score for score in report.families}
    languages = sorted({language for _, language in scores})
    table = Table("family", *languages, title="Questions: right, 95 % interval, and the best constant reply's score")
    for family in sorted({family for family, _ in scores}):
        cells = []
        for language in languages:
            score = scores.get((family, language))
            cells.append("" if score is None else (
                f"{score.right:>3}/{score.total:<3} {score.accuracy:>6.1%} [{score.interval.low:.0%}-"
                f"{score.interval.high:.0%}]  ({score.constant_right / score.total:.0%})"
            ))  # fmt: skip
        arithmetic = any(score.free_arithmetic for score in report.families if score.family == family)
        table.add_row(family + (" *" if arithmetic else ""), *cells)
    right, total = sum(item.right for item in report.answered), len(report.answered)
    table.caption = f"all: {right:,}/{total:,} {right / total:.1%}" + (
        "; * needs arithmetic without a tool" if any(score.free_arithmetic for score in report.families) else ""
    )
    return table


def main() -> None:
    """Entry point."""
    description = __doc__.split("\n", 1)[0]
    logging.disable_progress_bar()
    choice, arguments = parse_arguments(ModelChoice, EvaluationArguments, description=description)
    folder, result, report = evaluate(choice, arguments)
    compared = describe_comparison(Path(arguments.compare_with), report) if arguments.compare_with and report else ""
    path = write_evaluation(folder, result, report)  # before anything that printing may meet
    console = Console(width=None if sys.stdout.isatty() else 120, markup=False)
    print_evaluation(result, report, arguments.samples, console)
    if compared:
        print(compared)
    print(f"saved {path}")


if __name__ == "__main__":
    with user_errors():
        main()
