"""What a run says: the console, `metrics.jsonl`, and SwanLab when asked."""

import json
from pathlib import Path
from typing import Any


def format_seconds(seconds: float) -> str:
    """A duration as people say it: 45s, 3m20s, 2h05m."""
    seconds = int(seconds + 0.5)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds // 60 % 60:02d}m"


class Tracker:
    """Rank 0's voice; the other ranks hold a silent one.

    `metrics.jsonl` is the continuous record of a run over all its resumes: one JSON object a line, each with `step`.
    """

    def __init__(self, metrics_path: Path | None, swanlab_run: Any | None = None):
        self.metrics_path = metrics_path
        self.swanlab_run = swanlab_run

    @property
    def run_id(self) -> str | None:
        """SwanLab's id of this run, kept in checkpoints so that a resumed run continues it."""
        return None if self.swanlab_run is None else str(self.swanlab_run.id)

    def say(self, text: str = "") -> None:
        """Print for the user."""
        if self.metrics_path is not None:
            print(text, flush=True)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Append one record to metrics.jsonl and send its numbers to SwanLab."""
        if self.metrics_path is None:
            return
        with open(self.metrics_path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}, ensure_ascii=False) + "\n")
        if self.swanlab_run is not None:
            numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
            self.swanlab_run.log(numbers, step=step)

    def cut_back(self, step: int) -> None:
        """Drop records after a step: a run resumed there writes them again. A half-written last line goes too."""
        if self.metrics_path is None or not self.metrics_path.exists():
            return
        kept = []
        for line in self.metrics_path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if record["step"] <= step:
                kept.append(line + "\n")
        temporary = self.metrics_path.with_suffix(".writing")
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(self.metrics_path)

    def finish(self) -> None:
        """Close SwanLab's run."""
        if self.swanlab_run is not None:
            self.swanlab_run.finish()


def start_swanlab(project: str, name: str, mode: str, folder: Path, config: dict[str, Any]) -> Any:
    """Start a SwanLab run; only mode "cloud" touches a network.

    Raises:
        ValueError: SwanLab is not installed, or cloud mode cannot log in.
    """
    try:
        import swanlab
    except ImportError as error:
        raise ValueError("--use_wandb 1 needs SwanLab: pip install -r requirements.txt") from error
    try:
        return swanlab.init(
            project=project, name=name, mode="online" if mode == "cloud" else mode, log_dir=str(folder), config=config
        )
    except Exception as error:
        # SwanLab raises a different type for each way of failing to log in; all of them mean the same to a user.
        raise ValueError(
            f"SwanLab did not start in mode {mode}: {error}; --swanlab_mode offline needs no network"
        ) from error
