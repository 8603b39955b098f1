"""What finished runs left behind, read back: run.json, metrics.jsonl and eval.json of each model folder."""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.stages import read_evaluation

STAGE_ORDER = ("pretrain", "mid_train", "full_sft", "distillation", "dpo", "grpo", "ppo", "agent")


@dataclass
class RunRecord:
    """One finished run.

    Attributes:
        folder: the model's folder.
        run: run.json.
        metrics: lines of metrics.jsonl, by step.
        evaluation: eval.json, or None.
        earlier: the runs that its weights came through, the first ahead.
        other_questions: its evaluation asked others than the report's, so that its scores are left out.
    """

    folder: Path
    run: dict[str, Any]
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evaluation: dict[str, Any] | None = None
    earlier: list["RunRecord"] = field(default_factory=list, repr=False, compare=False)
    other_questions: bool = False

    @property
    def name(self) -> str:
        """The folder's name, such as pretrain_256."""
        return self.folder.name

    @property
    def stage(self) -> str:
        """The stage's name, such as pretrain."""
        return str(self.run.get("stage", self.name))

    @property
    def chain(self) -> str:
        """What the folders of one model's stages have in common: the part behind the stage's name, such as 256_moe."""
        head, _, tail = self.name.rpartition("_")
        if tail == "moe":
            head, _, width = head.rpartition("_")
            tail = f"{width}_moe"
        return tail

    @property
    def tokens(self) -> int:
        """Tokens processed, context included."""
        return int(self.run.get("progress", {}).get("tokens", 0))

    @property
    def first_token(self) -> int:
        """Tokens that the runs before it have processed."""
        return sum(record.tokens for record in self.earlier)

    @property
    def seconds(self) -> float:
        """Time spent in training steps."""
        return float(self.run.get("progress", {}).get("seconds", 0.0))

    @property
    def data_paths(self) -> list[str]:
        """The user's own files; empty when it was trained on the embedded corpus."""
        return list(self.run.get("settings", {}).get("data", {}).get("data_path") or [])

    def values(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of a metric."""
        return [(line["step"], line[key]) for line in self.metrics if isinstance(line.get(key), int | float)]

    @property
    def training_points(self) -> list[tuple[int, float]]:
        """(tokens so far in the chain, training loss in nats per token) of each progress line."""
        if self.values("rollout_reward") or self.values("preferred"):
            return []  # its loss is something else
        return [
            (self.first_token + line["tokens"], line.get("cross_entropy", line["loss"]))  # of distillation, a part
            for line in self.metrics
            if "loss" in line and "tokens" in line
        ]

    @property
    def has_curves(self) -> bool:
        """Whether there is a loss to draw over tokens."""
        return bool(self.training_points or self.validation_sources)

    def validation_points(self, source: str) -> list[tuple[int, float]]:
        """(tokens so far in the chain, bits per byte) of each evaluation on one validation source."""
        key = f"validation_bpb_{source}"
        lines = (line for line in self.metrics if isinstance(line.get(key), int | float) and "tokens" in line)
        return [(self.first_token + line["tokens"], line[key]) for line in lines]

    @property
    def validation_sources(self) -> list[str]:
        """Names of the validation sources, as logged."""
        keys = {key for line in self.metrics for key in line if key.startswith("validation_bpb_")}
        return sorted((key.removeprefix("validation_bpb_") for key in keys), reverse=True)

    @property
    def family_scores(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Scores by (family, language); empty when it was not evaluated."""
        families = (self.evaluation or {}).get("scores", {}).get("families", [])
        return {(score["family"], score["language"]): score for score in families}


def load_record(folder: Path) -> RunRecord:
    """Read one run back.

    Raises:
        ValueError: the folder is no finished run, or its files are damaged.
    """
    try:
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
        metrics = [json.loads(line) for line in lines if line.strip()]
    except FileNotFoundError as error:
        raise ValueError(f"{folder}: not a finished run, {Path(error.filename).name} is missing") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: the record of this run cannot be read: {error}") from error
    record = RunRecord(folder, run, metrics, read_evaluation(folder))
    try:
        _use(record)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(
            f"{folder}: the record of this run is damaged ({error!r}); train or evaluate it anew"
        ) from error
    return record


def _use(record: RunRecord) -> None:
    """Look at everything that a report looks at, so that a damaged file is named by its folder."""
    numbers = [record.tokens, record.seconds, *itertools.chain(*record.training_points)]
    for name in ("rollout_reward", "validation_reward", "preferred", "validation_preferred"):
        numbers += itertools.chain(*record.values(name))
    Path(record.run.get("started_from") or "")  # a TypeError unless it is a path
    for source in record.validation_sources:
        numbers += itertools.chain(*record.validation_points(source))
    for name in ("progress", "parameters", "environment", "settings", "model"):
        record.run.get(name, {}).keys()
    for data in record.run.get("data", {}).values():
        numbers += [data.get(name, 0) for name in ("documents", "tokens", "rows_read", "fill_rate")]
    evaluation = record.evaluation or {}
    for score in record.family_scores.values():
        numbers += [score["right"] / score["total"], score["constant_right"], score["constant"]]
    for sums in evaluation.get("losses", {}).values():
        parts = [sums, *sums.get("languages", {}).values()]
        numbers += [part["bits_per_byte"] for part in parts if part.get("bits_per_byte") is not None]
    if "scores" in evaluation:
        scores = evaluation["scores"]
        numbers += [scores[name] for name in ("right", "questions", "turns", "turns_ended")]
        numbers += scores["tools"].values()
        for sample in evaluation["samples"]:
            assert {"id", "family", "prompt", "expected", "reply", "right"} <= sample.keys(), "a sample lacks a part"
    if not isinstance(evaluation.get("questions", {}), dict):
        raise TypeError("questions is no object")
    sum(numbers)


def find_records(save_dir: Path, names: Sequence[str] | None = None) -> list[RunRecord]:
    """The runs of a folder in the order of their stages, or those that are named (folder names or paths), as given.

    Raises:
        ValueError: there is none, or a named one does not exist; the message has the command that makes one.
    """
    if names:
        folders = [path if (path := save_dir / name).is_dir() else Path(name) for name in names]
        for name, folder in zip(names, folders, strict=True):
            if not folder.is_dir():
                known = ", ".join(sorted(path.parent.name for path in save_dir.glob("*/run.json"))) or "none"
                raise ValueError(f"--runs {name}: no such run in {save_dir}; finished runs are: {known}")
        return chain_records([load_record(folder) for folder in dict.fromkeys(map(Path.resolve, folders))])
    found = sorted(path.parent for path in save_dir.glob("*/run.json") if not path.parent.name.startswith("."))
    if not found:
        raise ValueError(f"{save_dir}: no finished run; make one with: python trainer/train_pretrain.py")
    records = [load_record(folder) for folder in found]
    return chain_records(
        sorted(records, key=lambda record: (record.chain, _rank(record), record.run.get("finished", "")))
    )


def _rank(record: RunRecord) -> int:
    return STAGE_ORDER.index(record.stage) if record.stage in STAGE_ORDER else len(STAGE_ORDER)


def chain_records(records: Iterable[RunRecord]) -> list[RunRecord]:
    """Set which runs lie before each on the common axis of tokens: those that its weights came through."""
    records = list(records)
    for record in records:
        record.earlier = _ancestors(record, records)
    return records


def _ancestors(record: RunRecord, records: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs of `records` that a run's weights came through, the first ahead."""
    found: list[RunRecord] = []
    current, seen = record, set()
    while "started_from" in current.run:
        start, beside = current.run["started_from"], current.folder
        if start is None:
            return found
        path = Path(start)
        path = beside.parent / path.parent.name if path.suffix == ".pth" else path  # checkpoints/NAME/best.pth
        named = [other for other in records if other.name == path.name and other not in (record, *found)]
        # The very folder, or after a move the one beside it.
        named.sort(key=lambda other: (other.folder.resolve() != path.resolve(), other.folder.parent != beside.parent))
        if named:
            current = named[0]
            found.insert(0, current)
            continue
        folders = [folder for folder in (path, beside.parent / path.name) if (folder / "run.json").is_file()]
        if not folders or folders[0].resolve() in seen:
            return found
        seen.add(folders[0].resolve())
        current = RunRecord(folders[0], json.loads((folders[0] / "run.json").read_text(encoding="utf-8")))
    return [*(one for one in _earlier_by_name(current, records) if one not in (record, *found)), *found]


def _earlier_by_name(record: RunRecord, records: Sequence[RunRecord]) -> list[RunRecord]:
    """What lies before a run that does not say what it went on from: the earlier stages of the same model."""
    # Two runs of one stage stand side by side, not behind each other.
    longest: dict[str, RunRecord] = {}
    for other in records:
        if other.chain == record.chain and _rank(other) < _rank(record):
            if other.stage not in longest or other.tokens > longest[other.stage].tokens:
                longest[other.stage] = other
    return list(longest.values())
