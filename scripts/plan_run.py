"""How long a run will take, how much memory it needs, and which batch and parallel form to choose, before it starts.

Examples:
    python scripts/plan_run.py --preset base --tokens 1.3e9 --devices "RTX 3090:2"
    python scripts/plan_run.py --preset mini --devices cpu "RTX 4090" H100:8
"""

import gc, pathlib, sys  # noqa: E401

sys.path[0] = sys.path[0] if __package__ else str(pathlib.Path(__file__).resolve().parents[1])
__package__ or gc.disable()  # a fifth of the time of the imports; `user_errors` turns it on again

import dataclasses
import json
from typing import Literal

import psutil
import torch

from model.config import MiniMindConfig
from trainer.config import flag, parse_arguments, raise_problems, user_errors
from trainer.hardware import KNOWN_GPUS, matmul_peak
from trainer.planning import Device, Plan, plan_run
from trainer.track import format_seconds
from trainer.weights import DEFAULT_TOKENIZER, load_tokenizer


@dataclasses.dataclass
class PlanArguments:
    """What is planned."""

    _argument_group_name = "plan"

    preset: str = flag("base", "size: nano, nano-moe, mini, base, base-moe, large")
    hidden_size: int | None = flag(None, "width of the residual stream, over the preset's")
    num_hidden_layers: int | None = flag(None, "number of layers, over the preset's")
    tokens: float | None = flag(
        None, "tokens to train on, over all epochs (prepare_data.py counts a file's); by default 20 a parameter"
    )
    tokenizer_path: str = flag(str(DEFAULT_TOKENIZER), "tokenizer folder")
    max_seq_len: int = flag(512, "window: tokens in a row")
    devices: list[str] = dataclasses.field(
        default_factory=lambda: ["cpu"],
        metadata={"help": f"cpu (this one, measured), or NAME:COUNT of {', '.join(KNOWN_GPUS)}; several are compared"},
    )
    optimizer: Literal["muon", "adamw"] = flag("muon", "as for the stages")
    utilization: float | None = flag(None, "share of the peak that is reached; by default 0.65 on a CPU, 0.35 on a GPU")


def find_device(words: str) -> tuple[Device, int]:
    """The device and how many of it. Raises ValueError for one that is not known."""
    name, _, count = words.partition(":")
    if count and not count.isdigit() or count == "0":
        raise ValueError(f"--devices {words}: expected NAME or NAME:COUNT, such as 'RTX 3090:2'")
    if name == "cpu":
        peak = matmul_peak(torch.device("cpu"), torch.bfloat16)
        return Device("cpu", peak, psutil.virtual_memory().total, is_gpu=False), int(count or 1)
    for known, (peak, memory) in KNOWN_GPUS.items():
        if known.lower() == name.lower():
            return Device(known, peak * 1e12, memory * 1e9), int(count or 1)
    raise ValueError(f"--devices {words}: unknown; use cpu or one of {', '.join(KNOWN_GPUS)}")


def describe(plan: Plan, device: Device, count: int, options: PlanArguments) -> list[str]:
    """The plan as lines."""
    gibibyte = 2**30
    lines = [
        f"{count} x {device.name} ({device.flops / 1e12:,.1f} TFLOP/s, {device.memory_bytes / gibibyte:,.0f} GiB each)",
        f"  {plan.tokens_per_second:,.0f} tokens/s, {format_seconds(plan.hours * 3600)} for {plan.tokens:,} tokens "
        f"({plan.flops:.2e} operations)",
        f"  {plan.memory_bytes / gibibyte:.2f} GiB each: {plan.state_bytes / gibibyte:.2f} for weights, gradients and "
        f"optimizer, {plan.activation_bytes / gibibyte:.2f} for activations of {plan.rows} rows",
    ]
    flags = f"--preset {options.preset} --max_seq_len {options.max_seq_len} --batch_size {plan.rows} "
    flags += f"--accumulation_steps {plan.accumulation} --optimizer {options.optimizer}"
    flags += " --activation_checkpointing 1" if plan.activation_checkpointing else ""
    flags += f" --parallel {plan.parallel}" if count > 1 else ""
    start = f"torchrun --nproc_per_node {count}" if count > 1 else "python"
    lines.append(f"  {start} trainer/train_pretrain.py {flags}")
    return lines + [f"  cannot work: {problem}" for problem in plan.problems]


def main() -> None:
    """Entry point."""
    (options,) = parse_arguments(PlanArguments, description=__doc__)
    positive = {name: getattr(options, name) for name in ("tokens", "max_seq_len", "utilization")}
    raise_problems(
        [f"--{name} {value} must be above 0" for name, value in positive.items() if value is not None and value <= 0]
    )
    shape = {name: getattr(options, name) for name in ("hidden_size", "num_hidden_layers")}
    vocabulary = len(load_tokenizer(options.tokenizer_path))
    config = MiniMindConfig.from_preset(
        options.preset, {name: value for name, value in shape.items() if value} | {"vocab_size": vocabulary}
    )
    tokens = int(options.tokens) if options.tokens else None
    results = []
    for words in options.devices:
        device, count = find_device(words)
        plan = plan_run(config, device, count, tokens, options.max_seq_len, options.optimizer, options.utilization)
        if not results:
            print(f"{plan.parameters / 1e6:.1f}M parameters, {plan.active_parameters / 1e6:.1f}M active")
        print("\n".join(describe(plan, device, count, options)))
        results.append({"device": device.name, "count": count} | dataclasses.asdict(plan))
    print(json.dumps(results))


if __name__ == "__main__":
    with user_errors():
        main()
