"""What a run says: the console, `metrics.jsonl`, and SwanLab or Weights & Biases when asked."""

import importlib
import json
from collections.abc import Callable
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
    `run_id` is the service's id of this run, kept in checkpoints.
    """

    def __init__(self, metrics_path: Path | None):
        self.metrics_path = metrics_path
        self.service_run: Any | None = None
        self.service_text: Callable[[str], Any] = str
        self.run_id: str | None = None

    def start(self, service: str, **options: Any) -> None:
        """Send everything to a service too, see `start_service`; a resumed run goes on with its id."""
        if self.metrics_path is not None:
            self.service_run, self.service_text = start_service(service, run_id=self.run_id, **options)
            self.run_id = str(self.service_run.id)

    def say(self, text: str = "") -> None:
        """Print for the user."""
        if self.metrics_path is not None:
            print(text, flush=True)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Append one record to metrics.jsonl and send its numbers, and samples as text, to the service.

        Raises:
            ValueError: the disk is full.
        """
        if self.metrics_path is None:
            return
        try:
            with open(self.metrics_path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **metrics}, ensure_ascii=False) + "\n")
        except OSError as error:
            raise ValueError(f"{self.metrics_path}: cannot be written ({error.strerror})") from error
        if self.service_run is not None:
            sent = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
            for number, sample in enumerate(metrics.get("samples", [])):
                sent[f"samples/{number}"] = self.service_text(f"{sample['prompt']}\n\n{sample['reply']}")
            self.service_run.log(sent, step=step)

    def cut_back(self, step: int) -> None:
        """Drop what a run resumed at a step writes again: later records, this step's evaluation and samples.

        A half-written last line goes too.
        """
        if self.metrics_path is None or not self.metrics_path.exists():
            return
        kept = []
        for line in self.metrics_path.read_text(encoding="utf-8").split("\n"):
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            of_step = "loss" in record or "rollout_reward" in record or "rollouts" in record
            if record["step"] < step or (record["step"] == step and of_step):
                kept.append(line + "\n")
        temporary = self.metrics_path.with_suffix(".writing")
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(self.metrics_path)

    def finish(self) -> None:
        """Close the service's run."""
        if self.service_run is not None:
            self.service_run.finish()


def start_service(
    service: str, mode: str, project: str, name: str, folder: Path, config: dict[str, Any], run_id: str | None
) -> tuple[Any, Callable[[str], Any]]:
    """Start a run of SwanLab or Weights & Biases; only mode "cloud" touches a network.

    Args:
        service: "swanlab" or "wandb"; the latter must be installed by the user.
        mode: "offline", "local" (SwanLab's own dashboard), "cloud" or "disabled".
        run_id: of the run that is continued, if one is.

    Returns:
        The run, with `log`, `finish` and `id`, and what makes a text into something that it logs.

    Raises:
        ValueError: the service is not installed, or cloud mode cannot log in.
    """
    try:
        module = importlib.import_module(service)
    except ImportError as error:
        raise ValueError(f"--tracker {service}: not installed; pip install {service}") from error
    settings: dict[str, Any] = {"project": project, "name": name, "config": config}
    settings["mode"] = "online" if mode == "cloud" else mode
    if run_id is not None:
        settings |= {"id": run_id, "resume": "allow"}
    settings["log_dir" if service == "swanlab" else "dir"] = str(folder)
    try:
        return module.init(**settings), module.Text if service == "swanlab" else module.Html
    except Exception as error:
        # Each way of failing to log in raises a type of its own; all of them mean the same to a user.
        raise ValueError(
            f"--tracker {service} did not start in mode {mode}: {error}; --tracker_mode offline needs no network"
        ) from error
