"""Benchmarks by lm-evaluation-harness on a finished model: what the field quotes, your own YAML tasks, or ours.

Examples:
    python eval/eval_benchmarks.py --tasks embedded
    python eval/eval_benchmarks.py --tasks field --weight pretrain
    python eval/eval_benchmarks.py --tasks my_task --include_path my_tasks
"""

import gc, pathlib, sys  # noqa: E401

sys.path[0] = sys.path[0] if __package__ else str(pathlib.Path(__file__).resolve().parents[1])
__package__ or gc.disable()  # a fifth of the time of the imports; `user_errors` turns it on again

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from dataset.builtin.store import ensure_builtin_corpus
from eval.questions import Z_95, limit_questions, load_questions, wilson_interval
from eval.stages import replace_text
from trainer.config import ModelChoice, flag, parse_arguments, raise_problems, user_errors
from trainer.data import BUILTIN_FOLDER
from trainer.distributed import choose_device
from trainer.precision import choose_precision, has_native_bfloat16
from trainer.weights import find_folder, load_tokenizer, open_model

RESULT_FILE = "benchmarks.json"


@dataclasses.dataclass
class BenchmarkChoice:
    """What is run."""

    _argument_group_name = "benchmarks"

    tasks: list[str] = dataclasses.field(
        default_factory=lambda: ["embedded"],
        metadata={
            "help": "the harness's tasks and groups; field: what small models are quoted with (their data come from "
            "the hub); embedded: this repository's test questions"
        },
    )
    include_path: str | None = flag(None, "folder of your own YAML tasks")
    num_fewshot: int | None = flag(None, "examples in each prompt; by default as each task says (`embedded`: none)")
    chat: Literal[0, 1] = flag(0, "1: ask by the chat template (`embedded` always does)")
    limit: int = flag(0, "questions of each task; 0: all")
    batch_size: int = flag(32, "rows computed together")
    seed: int = flag(0, "of the choice of examples")

    def problems(self) -> list[str]:
        """What is out of range, by flag."""
        found = []
        if self.limit < 0 or (self.num_fewshot or 0) < 0:
            found.append(f"--limit {self.limit} and --num_fewshot {self.num_fewshot} must not be negative")
        if self.batch_size < 1:
            found.append(f"--batch_size {self.batch_size} must be at least 1")
        if self.num_fewshot and "embedded" in self.tasks:
            found.append(f"--num_fewshot {self.num_fewshot} is not for --tasks embedded, which are asked as they stand")
        if self.chat and "embedded" in self.tasks:
            found.append("--chat 1 is not for --tasks embedded, which always are asked by the template; run them alone")
        return found


def read_scores(path: Path) -> dict[str, Any]:
    """The scores of earlier runs.

    Raises:
        ValueError: the file is damaged.
    """
    if not path.is_file():
        return {}
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}; move it away") from error
    if not isinstance(before, dict):
        raise ValueError(f"{path}: holds no scores; move it away")
    return before


def run(choice: ModelChoice, asked: BenchmarkChoice) -> dict[str, Any]:
    """The harness's results."""
    try:
        from eval.harness import asked_by_harness, embedded_task, run_harness, task_names
    except ModuleNotFoundError as error:
        raise ValueError(f"this needs the package {error.name}: pip install lm-eval") from error
    folder = find_folder(choice)
    if (folder / "adapter_config.json").is_file():
        raise ValueError(f"{folder} is an adapter, which the harness does not open: make a model of it with --merge 1")
    open_model(folder)  # damaged weights are named here
    device = choose_device(choice.device)
    precision = choose_precision(device.type, has_native_bfloat16(device), choice.dtype)
    names, manager = task_names([name for name in asked.tasks if name != "embedded"], asked.include_path)
    print(f"model: {folder}, {str(precision.dtype).removeprefix('torch.')} on {device}", flush=True)
    with tempfile.TemporaryDirectory() as rows:
        tasks: list[Any] = list(names)
        if "embedded" in asked.tasks:
            questions = load_questions(ensure_builtin_corpus(BUILTIN_FOLDER)["eval.test"])
            questions = limit_questions(asked_by_harness(questions), asked.limit or None)
            tasks.append(embedded_task(questions, load_tokenizer(folder), Path(rows)))
        results = run_harness(
            folder, tasks, manager, str(device), str(precision.dtype).removeprefix("torch."), asked.batch_size,
            asked.num_fewshot, asked.limit or None, bool(asked.chat), asked.seed,
        )  # fmt: skip
    return results


def scores_of(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By task: each metric, the bounds of its 95 % interval, and how many questions there were."""
    scores = {}
    for name, values in results["results"].items():
        found: dict[str, float] = {}
        count = results.get("n-samples", {}).get(name, {}).get("effective") or _questions_of(values)
        for key, value in values.items():
            metric, _, rest = key.partition(",")
            if not metric.endswith("_stderr") and isinstance(value, int | float) and rest:
                error = values.get(f"{metric}_stderr,{rest}")
                metric += f" ({rest})" if rest != "none" else ""  # a task may read replies in several ways
                found[metric] = float(value)
                if isinstance(error, int | float):
                    found[f"{metric}_low"], found[f"{metric}_high"] = interval_of(value, error, count)
        if found:
            scores[name] = found | {"questions": count}
    return scores


def _questions_of(values: dict[str, Any]) -> int:
    """Of a group of tasks, which the harness counts elsewhere."""
    counts = values.get("sample_count") or {}
    return int(values.get("sample_len") or max((int(count) for count in counts.values()), default=0))


def interval_of(score: float, error: float, count: int) -> tuple[float, float]:
    """95 % bounds of a score from its standard error; of a share of right answers Wilson's, where 4 of 4 is not sure.

    The harness does not say which it is, but the error of a share follows from the share.
    """
    if count > 1 and 0 <= score <= 1 and abs(error**2 * (count - 1) - score * (1 - score)) < 1e-6:
        bounds = wilson_interval(round(score * count), count)
        return bounds.low, bounds.high
    low, high = score - Z_95 * error, score + Z_95 * error
    return (max(0.0, low), min(1.0, high)) if 0 <= score <= 1 else (low, high)


def print_scores(scores: dict[str, dict[str, float]], console: Console) -> None:
    """A row for each task and metric."""
    table = Table("task", "metric", "score", "95 % interval", "questions")
    for name, values in scores.items():
        for metric, value in values.items():
            if metric != "questions" and not metric.endswith(("_low", "_high")):
                bounds = [values.get(f"{metric}_{end}") for end in ("low", "high")]
                shown = "" if None in bounds else "{:.4f} to {:.4f}".format(*bounds)
                table.add_row(name, metric, f"{value:.4f}", shown, f"{values['questions']:,}")
    console.print(table)


def main() -> None:
    """Entry point."""
    choice, asked = parse_arguments(ModelChoice, BenchmarkChoice, description=__doc__.split("\n", 1)[0])
    raise_problems(asked.problems())
    path = find_folder(choice) / RESULT_FILE
    before = read_scores(path)
    scores = scores_of(run(choice, asked))
    try:  # other tasks' results stay
        replace_text(path, json.dumps(before | scores, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise ValueError(f"{path}: could not be written: {error}") from error
    print_scores(scores, Console(width=None if sys.stdout.isatty() else 120, markup=False))
    print(f"saved {path}")


if __name__ == "__main__":
    with user_errors():
        main()
