"""How fast we train and answer, beside the tools that people use today, in one run on the same cores.

Contestants take turns, so that a machine that drifts slows all of them alike; the table gives medians and spreads, and
the last line of the output is the same as JSON. The peers come from the package index (requirements-dev.txt).

    python scripts/benchmark.py --measure pretrain --preset mini --data_path gsm8k_train.jsonl shakespeare.txt
    python scripts/benchmark.py --measure sft --preset mini --data_path gsm8k_train.jsonl
    python scripts/benchmark.py --measure moe --preset mini --data_path gsm8k_train.jsonl shakespeare.txt
    python scripts/benchmark.py --measure loss --data_path gsm8k_train.jsonl shakespeare.txt
    python scripts/benchmark.py --measure decoding --preset nano
    python scripts/benchmark.py --measure rollouts --preset nano
    python scripts/benchmark.py --measure scaling --preset nano --data_path shakespeare.txt
    python scripts/benchmark.py --measure profile --preset mini
"""

import gc, pathlib, sys  # noqa: E401

sys.path[0] = sys.path[0] if __package__ else str(pathlib.Path(__file__).resolve().parents[1])
__package__ or gc.disable()  # a fifth of the time of the imports; `user_errors` turns it on again

import dataclasses
import importlib.util
import json
import tempfile
from typing import Any, Literal

import torch

from dataset.builtin.store import ensure_builtin_corpus
from scripts.benchmarking.answers import measure_decoding, measure_rollouts
from scripts.benchmarking.ours import Task, train_ours, train_ours_to_the_end
from scripts.benchmarking.peers import (
    train_padded,
    train_trl_packed,
    train_trl_packed_without_checkpointing,
    train_trl_padded,
)
from scripts.benchmarking.profiling import profile_training
from scripts.benchmarking.turns import Contestant, Lap, Runner, alternate, median_and_spread, runners
from trainer.config import flag, parse_arguments, user_errors
from trainer.data import BUILTIN_FOLDER
from trainer.hardware import has_working_amx, matmul_peak

# With it the largest of eight experts has 0.5 to 0.65 of a layer's rows after 30 steps; an even share would be 0.25.
BALANCE = ("--router_aux_loss_coef", "1e-2")
EIGHT_EXPERTS = ("--use_moe", "1", "--num_experts", "8", "--num_experts_per_tok", "2", *BALANCE)
FOUR_EXPERTS = ("--use_moe", "1", "--num_experts", "4", "--num_experts_per_tok", "1", "--norm_topk_prob", "0", *BALANCE)
WINDOWS = {"sft": 768}
LOSS_SLOTS = 4096
SCALES = ("parameters", "window", "micro-batch", "experts")


@dataclasses.dataclass
class BenchmarkArguments:
    """What is measured."""

    _argument_group_name = "benchmark"

    measure: Literal["pretrain", "sft", "moe", "loss", "decoding", "rollouts", "scaling", "profile"] = flag(
        "pretrain", "what is compared"
    )
    preset: str = flag("nano", "size of the models")
    data_path: list[str] | None = dataclasses.field(
        default=None, metadata={"help": "files to train on, as for the stages; by default the embedded corpus"}
    )
    peers: Literal[0, 1] = flag(1, "0: only ours")
    turns: int = flag(5, "turns of each contestant that count, after those that warm it up")
    seconds: float = flag(10.0, "least length of a turn")
    window: int = flag(0, "slots in a row; 0: 340, and 768 for sft")
    micro_batch: int = flag(8192, "slots in a micro-batch, about")
    step: int = flag(32768, "slots in an optimizer step, about")
    padded_step: int = flag(16384, "the same for the padded recipe, whose AdamW takes under 1 %% of such a step's time")
    # New routers send nearly all tokens of a layer to the same one or two experts. A training run is past that
    # after 20 to 40 steps; the few large steps of a benchmark alone would not be.
    settling_steps: int = flag(30, "moe: steps of one micro-batch before the turns, so that routers find their balance")
    padded_steps: int = flag(400, "loss: optimizer steps of the padded recipe, of 4,096 slots each")
    our_steps: int = flag(60, "loss: optimizer steps of our runs, of 4,096 slots each")
    new_tokens: int = flag(128, "decoding and rollouts: tokens in an answer, at most")
    scales: list[str] = dataclasses.field(
        default_factory=lambda: list(SCALES), metadata={"help": f"scaling: what grows, of {', '.join(SCALES)}"}
    )
    more: str = flag("", "further flags of our stages, in one string, such as '--use_compile 1'")


def make_task(options: BenchmarkArguments, folder: str, shape: tuple[str, ...] = (), **changes: Any) -> Task:
    """The rows and portions that every contestant gets."""
    data = "conversations" if options.measure == "sft" else "documents"
    window = options.window or WINDOWS.get(options.measure, 340)
    rows = max(options.micro_batch // window, 1)
    corpus = {} if options.data_path else ensure_builtin_corpus(BUILTIN_FOLDER)
    paths = options.data_path or [str(corpus["sft.train" if data == "conversations" else "pretrain.train"])]
    words = ("--preset", options.preset, "--data_path", *paths, *shape, *options.more.split())
    task = Task(data, words, window, rows, max(round(options.step / (rows * window)), 1), folder)
    return dataclasses.replace(task, **changes)


def contestants(options: BenchmarkArguments, folder: str) -> list[Contestant]:
    """Who takes part; the first is ours."""
    steady = ("--schedule", "constant", "--warmup_ratio", "0")
    task = make_task(options, folder, steady)

    def padded(name: str, task: Task) -> Contestant:
        most = max(round(options.padded_step / (task.rows * task.window)), 1)
        return Contestant(name, train_padded, dataclasses.replace(task, accumulation=min(task.accumulation, most)))

    ours = Contestant("ours", train_ours, task)
    if options.measure == "pretrain":
        found = [ours, padded("padded float32 recipe", task)]
    elif options.measure == "sft":
        trl = make_task(options, folder, steady, rows=8, accumulation=max(options.step // (8 * task.window), 1))
        found = [
            ours,
            padded("padded float32 recipe", task),
            Contestant("TRL packed", train_trl_packed, trl),
            Contestant("TRL packed, activations kept", train_trl_packed_without_checkpointing, trl),
            Contestant("TRL padded", train_trl_padded, trl),
        ]
    else:
        eight, four = (
            make_task(options, folder, (*steady, *shape), settling_steps=options.settling_steps)
            for shape in (EIGHT_EXPERTS, FOUR_EXPERTS)
        )
        found = [
            ours,
            Contestant("ours, 8 half experts, 2 a token", train_ours, eight),
            Contestant("ours, 4 experts, 1 a token", train_ours, four),
            padded("padded float32 recipe, 8 half experts in a loop", eight),
        ]
    return [one for one in found if options.peers or one.work is train_ours]


def scales(options: BenchmarkArguments, folder: str) -> dict[str, list[Contestant]]:
    """What grows -> ours in several sizes of it. With a long text as data, every document fills its row."""
    steady = ("--schedule", "constant", "--warmup_ratio", "0")

    def ours(name: str, *shape: str, **changes: Any) -> Contestant:
        return Contestant(name, train_ours, make_task(dataclasses.replace(options, **changes), folder, steady + shape))

    def experts(count: int) -> tuple[str, ...]:
        return ("--use_moe", "1", "--num_experts", str(count), "--num_experts_per_tok", "2")

    return {
        "parameters": [
            ours(f"{preset}, {layers} layers", "--preset", preset, "--num_hidden_layers", str(layers), step=8192)
            for preset, layers in (("nano", 4), ("nano", 8), ("mini", 8), ("base", 8))
        ],
        "window": [ours(f"{window} slots in a row", window=window) for window in (128, 512, 2048, 8192)],
        "micro-batch": [ours(f"{size} slots", micro_batch=size, step=8192) for size in (1024, 2048, 4096, 8192)],
        "experts": [ours("dense"), *[ours(f"{count} experts, 2 a token", *experts(count)) for count in (4, 8, 16, 32)]],
    }


def measure_scaling(options: BenchmarkArguments, folder: str) -> dict[str, Any]:
    """One table for each thing that grows; the first line of each is what the others are compared with."""
    results = {}
    found = scales(options, folder)
    for name in options.scales:
        say(f"\n{name}:")
        results[name] = measure_training(options, found[name])
    return results


def measure_training(options: BenchmarkArguments, found: list[Contestant]) -> dict[str, Any]:
    """Tokens a second, utilization and memory of each contestant; the first is compared with the others."""
    peaks: list[float] = []

    def measure_peak() -> None:
        matmul_peak.cache_clear()
        peaks.append(matmul_peak(torch.device("cpu"), torch.bfloat16))

    laps = alternate(found, options.turns, options.seconds, say, measure_peak)
    peak = median_and_spread(peaks[-options.turns :])
    results = {name: summarise(found, peak[0]) for name, found in laps.items()}
    rates = {name: [lap.tokens_per_second for lap in found] for name, found in laps.items()}
    for name, row in results.items():
        ratios = [mine / theirs for mine, theirs in zip(rates[found[0].name], rates[name], strict=True)]
        row["first_times_faster"] = [round(value, 2) for value in median_and_spread(ratios)]
    print_training(results, found[0].name, peak)
    return {"bfloat16_peak_gflops": [round(value / 1e9) for value in peak], "contestants": results}


def summarise(laps: list[Lap], peak: float) -> dict[str, Any]:
    """Medians over the laps of one contestant."""
    rates = median_and_spread([lap.tokens_per_second for lap in laps])
    row = {
        "tokens_per_second": [round(rate) for rate in rates],
        "steps_in_a_turn": round(sum(lap.steps for lap in laps) / len(laps), 1),
        "peak_memory_gib": round(laps[-1].peak_memory_gib, 2),
    }
    if laps[-1].note:
        row["model_flops_utilization"] = round(rates[0] * laps[-1].note["flops_per_token"] / peak, 3)
    return row


def print_training(results: dict[str, dict[str, Any]], first: str, peak: tuple[float, float, float]) -> None:
    """The markdown table."""
    say(f"\nbfloat16 matrix products: {peak[0] / 1e9:,.0f} GFLOP/s ({peak[1] / 1e9:,.0f} to {peak[2] / 1e9:,.0f})\n")
    say(f"| | tokens/s (least to greatest) | {first}: times as fast | MFU | peak memory |\n|---|---|---|---|---|")
    for name, row in results.items():
        median, least, greatest = row["tokens_per_second"]
        ratio, low, high = row["first_times_faster"]
        utilization = f"{row['model_flops_utilization']:.1%}" if "model_flops_utilization" in row else ""
        say(
            f"| {name} | {median:,} ({least:,} to {greatest:,}) | {ratio:.2f} ({low:.2f} to {high:.2f}) | "
            f"{utilization} | {row['peak_memory_gib']:.2f} GiB |"
        )


def measure_loss(options: BenchmarkArguments, folder: str) -> dict[str, Any]:
    """How much sooner we reach the validation loss that the padded recipe has after its 400 steps.

    The recipe runs in as many parts as there are turns; after each part comes a whole run of ours, another seed each.
    """
    padded = make_task(options, folder, steps=options.padded_steps)
    rows = LOSS_SLOTS // padded.window
    padded = dataclasses.replace(padded, rows=rows, accumulation=1)
    part = options.padded_steps // options.turns
    curves, laps = [], []
    with runners([Contestant("padded float32 recipe", train_padded, padded, steps=part)], 0.0, say) as ready:
        for turn in range(options.turns):
            laps.append(ready["padded float32 recipe"].turn())
            say(f"padded recipe: {part * (turn + 1)} steps, validation loss {laps[-1].note:.4f}")
            shape = ("--seed", str(42 + turn))
            mine = make_task(options, folder, shape, rows=rows, accumulation=1, steps=options.our_steps)
            runner = Runner(Contestant("ours", train_ours_to_the_end, mine, steps=options.our_steps), 0.0, folder)
            curves.append(runner.turn().note)
            runner.stop()
            say(f"ours: {curves[-1][-1][0]:.1f} s of training, validation loss {curves[-1][-1][1]:.4f}")
    goal, needed = laps[-1].note, sum(lap.seconds for lap in laps)
    reached = [next((seconds for seconds, loss in curve if loss <= goal), float("inf")) for curve in curves]
    middle = median_and_spread(reached)
    say(f"\n| | seconds of training to a validation loss of {goal:.4f} | share |\n|---|---|---|")
    say(f"| padded float32 recipe, {options.padded_steps} steps of {LOSS_SLOTS} slots | {needed:.1f} | 1 |")
    say(f"| ours | {middle[0]:.1f} ({middle[1]:.1f} to {middle[2]:.1f}) | {middle[0] / needed:.3f} |")
    return {
        "goal": goal,
        "padded_seconds": round(needed, 1),
        "our_seconds": [round(value, 1) for value in reached],
        "share": round(middle[0] / needed, 4),
        "our_curves": curves,
    }


def say(line: str) -> None:
    """Print at once: a benchmark is long."""
    print(line, flush=True)


def main() -> None:
    """Entry point."""
    (options,) = parse_arguments(BenchmarkArguments, description=__doc__)
    if options.measure == "sft" and options.peers and importlib.util.find_spec("trl") is None:
        raise ValueError("--measure sft: TRL is not installed; pip install -r requirements-dev.txt, or take --peers 0")
    if unknown := sorted(set(options.scales) - set(SCALES)):
        raise ValueError(f"--scales {' '.join(unknown)}: choose of {', '.join(SCALES)}")
    if options.turns < 1:
        raise ValueError(f"--turns {options.turns} must be above 0")
    if options.settling_steps < 0:
        raise ValueError(f"--settling_steps {options.settling_steps} must not be below 0")
    if options.measure == "loss" and options.padded_steps % options.turns:
        raise ValueError(f"--turns {options.turns} must divide --padded_steps {options.padded_steps}")
    has_working_amx()
    with tempfile.TemporaryDirectory() as folder:
        if options.measure not in ("decoding", "rollouts"):
            make_task(options, folder).model_and_data()  # a user's mistake shows here rather than in a contestant
        if options.measure == "loss":
            result = measure_loss(options, folder)
        elif options.measure == "decoding":
            result = measure_decoding(options.preset, options.turns, options.new_tokens, say)
        elif options.measure == "rollouts":
            result = measure_rollouts(options.preset, options.turns, options.new_tokens, say)
        elif options.measure == "profile":
            result = profile_training(make_task(options, folder), say)
        elif options.measure == "scaling":
            result = measure_scaling(options, folder)
        else:
            result = measure_training(options, contestants(options, folder))
    versions = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    print(json.dumps({"measure": options.measure, "preset": options.preset} | versions | result))


if __name__ == "__main__":
    with user_errors():
        main()
