"""Tiny models, rows and runs for the training tests."""

import json
import os
from dataclasses import dataclass

import torch

from model.config import MiniMindConfig
from model.model_minimind import MiniMindForCausalLM
from trainer.checkpoint import CheckpointFolder
from trainer.config import (
    DataArguments,
    ModelArguments,
    OptimizationArguments,
    RunArguments,
    Settings,
    parse_arguments,
    setup_seed,
)
from trainer.distributed import World, copy_of_whole, meet, wrap_model
from trainer.engine import after_step, train_epoch
from trainer.evaluation import log_evaluation
from trainer.losses import equal_expert_loads, language_model_loss
from trainer.optim import build_optimizers
from trainer.precision import choose_precision
from trainer.resume import resume
from trainer.run import Run
from trainer.track import Tracker

GROUPS = (ModelArguments, DataArguments, OptimizationArguments, RunArguments)
VOCABULARY = 96
TINY_FLAGS = (
    "--max_seq_len 16 --batch_size 4 --dtype float32 --optimizer adamw --learning_rate 0.01 "
    "--log_interval 1 --eval_interval 0"
).split()


def tiny_model(seed: int = 0, **overrides) -> MiniMindForCausalLM:
    """A two-layer model of 32 wide; output projections are random, so that every part matters from step one."""
    torch.manual_seed(seed)
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "zero_init_output": False,
    }
    return MiniMindForCausalLM(MiniMindConfig(**(fields | overrides)))


TINY_MOE = {
    "use_moe": True,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "router_aux_loss_coef": 0.1,
}


@dataclass
class Summary:
    fingerprint: str = "rows"


class RandomRows(torch.utils.data.Dataset):
    """Packed rows with random documents and loss masks: the number of supervised tokens differs from row to row."""

    group_lengths = None

    def state(self):
        return None

    @property
    def preview(self):
        return self

    def __init__(self, num_rows: int, window: int = 16, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.window = window
        self.rows = []
        for _ in range(num_rows):
            input_ids = torch.randint(1, VOCABULARY, (window,), generator=generator)
            cut = int(torch.randint(2, window - 2, (1,), generator=generator))
            filled = int(torch.randint(cut + 1, window + 1, (1,), generator=generator))
            document_ids = torch.ones(window, dtype=torch.long)
            document_ids[cut:] = 2
            document_ids[filled:] = 0
            keep = torch.rand(window, generator=generator) < torch.rand(1, generator=generator)
            labels = torch.where(keep & (document_ids > 0), input_ids, -100)
            labels[[0, cut]] = -100
            self.rows.append({"input_ids": input_ids, "labels": labels, "document_ids": document_ids})
        self.summary = Summary()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index < 0:
            empty = torch.zeros(self.window, dtype=torch.long)
            return {"input_ids": empty, "labels": torch.full_like(empty, -100), "document_ids": empty.clone()}
        return self.rows[index]


def tiny_run(folder, rows, world=None, model=None, validation=None, flags=()):
    """A `Run` as `run_stage` assembles it, without a tokenizer or a command line."""
    settings = Settings(*parse_arguments(*GROUPS, description="test", arguments=[*TINY_FLAGS, *map(str, flags)]))
    settings.run.checkpoint_dir = str(folder)
    settings.validate()
    world = world or World(0, 0, 1, torch.device("cpu"))
    model = model or tiny_model()
    optimization = settings.optimization
    precision = choose_precision("cpu", True, optimization.dtype)
    setup_seed(optimization.seed + world.rank)
    wrapped = wrap_model(model, world, optimization.parallel, precision)
    optimizers, _ = build_optimizers(
        model, optimization.optimizer, optimization.learning_rate, optimization.weight_decay
    )
    run = Run(
        settings=settings,
        world=world,
        precision=precision,
        model=wrapped,
        optimizers=optimizers,
        scaler=torch.amp.GradScaler("cpu", enabled=precision.use_scaler),
        loss=language_model_loss,
        train_data=rows,
        validation_data=validation or {},
        token_bytes=torch.ones(VOCABULARY, dtype=torch.long),
        total_steps=0,
        tracker=Tracker(folder / "run" / "metrics.jsonl" if world.is_main else None),
        checkpoints=CheckpointFolder(folder / "run"),
        evaluate=log_evaluation,
        expert_loads=equal_expert_loads(model.config, world.device),
        fingerprints={"data": rows.summary.fingerprint},
    )
    run.total_steps = run.estimate_total_steps()
    return run


def train(run):
    """Run to the end, resuming first if the flags say so; returns the logged losses by step."""
    resume(run)
    if 0 < run.progress.step < run.total_steps:
        after_step(run)
    while run.progress.step < run.total_steps and train_epoch(run):
        pass
    run.checkpoints.writer.wait()
    return logged(run, "loss")


def logged(run, name):
    """{step: value} of a metric in metrics.jsonl."""
    if run.tracker.metrics_path is None:
        return {}
    records = [json.loads(line) for line in run.tracker.metrics_path.read_text().splitlines()]
    return {record["step"]: record[name] for record in records if name in record}


def weights_of(run):
    """A copy of every weight by name, whole even if ranks hold shares of it."""
    return {name: copy_of_whole(tensor, keep=True) for name, tensor in run.bare_model.state_dict().items()}


def close(first, second, tolerance):
    """Whether two records of losses by step have the same steps and nearly the same losses."""
    return first.keys() == second.keys() and all(abs(first[step] - second[step]) <= tolerance for step in first)


def run_ranks(function, folder, *arguments, ranks=2):
    """Call function(world, *arguments) in that many forked processes joined by a file; raises if one fails."""
    context = torch.multiprocessing.get_context("fork")
    rendezvous = folder / f"rendezvous-{os.urandom(4).hex()}"
    processes = [
        context.Process(target=_rank_main, args=(function, rank, ranks, rendezvous, arguments)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        if process.exitcode is None:
            process.kill()
    assert [process.exitcode for process in processes] == [0] * ranks


def _rank_main(function, rank, ranks, rendezvous, arguments):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    function(World(rank, rank, ranks, torch.device("cpu"), meet()), *arguments)
    torch.distributed.destroy_process_group()
