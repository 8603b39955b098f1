"""Where the time of our training goes: a trace for a viewer and a table of operations."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from scripts.benchmarking.ours import Task, prepare
from trainer.config import ROOT
from trainer.engine import train_epoch

WARM_UP_STEPS, PROFILED_STEPS, LINES = 2, 3, 25


def profile_training(task: Task, say: Callable[[str], None]) -> dict[str, Any]:
    """Profile a few optimizer steps: out/profile.json, to open in Perfetto, and a table of the costliest operations."""
    run = prepare(task)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    profiler = profile(activities=activities)

    def after_step() -> bool:
        if run.progress.step == WARM_UP_STEPS:
            profiler.start()
        if run.progress.step == WARM_UP_STEPS + PROFILED_STEPS:
            profiler.stop()
            return True
        return False

    run.stop_asked = after_step
    train_epoch(run)
    run.checkpoints.writer.wait()
    path = ROOT / "out" / "profile.json"
    path.parent.mkdir(exist_ok=True)
    profiler.export_chrome_trace(str(path))
    averages = profiler.key_averages()
    key = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    total = sum(getattr(event, key) for event in averages)
    say("| operation | calls a step | share of the time |\n|---|---|---|")
    costliest = sorted(averages, key=lambda event: getattr(event, key), reverse=True)[:LINES]
    shares = {event.key: round(getattr(event, key) / total, 4) for event in costliest}
    for event in costliest:
        say(f"| {event.key} | {event.count / PROFILED_STEPS:.0f} | {shares[event.key]:.1%} |")
    say(f"trace: {path}")
    return {"seconds_per_step": round(total / 1e6 / PROFILED_STEPS, 3), "shares": shares}
