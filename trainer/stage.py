"""`run_stage`: how any stage is put together, started, resumed and finished."""

import contextlib
import dataclasses
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import PreTrainedTokenizerBase

from dataset.store import tokenizer_fingerprint
from dataset.stream import StreamDataset
from dataset.token_bytes import token_byte_lengths
from dataset.tokenise import Say
from eval.stages import command_line
from model.model_minimind import MiniMindForCausalLM, count_parameters
from trainer import results, weights
from trainer.asking import ask_questions, questions_to_ask, sample_answers
from trainer.checkpoint import CheckpointFolder, capture_rng, restore_rng
from trainer.compiling import compile_layers, falling_back
from trainer.config import (
    DataArguments,
    ModelArguments,
    OptimizationArguments,
    RunArguments,
    Settings,
    parse_arguments,
    setup_seed,
)
from trainer.data import Data
from trainer.distributed import (
    World,
    init_distributed_mode,
    is_under_torchrun,
    main_decides,
    main_first,
    naming_lost_ranks,
    whole_model,
    wrap_model,
)
from trainer.engine import after_step, evaluate_and_keep_best, to_device, train_epoch
from trainer.evaluation import log_evaluation
from trainer.hardware import keep_freed_memory
from trainer.losses import Batch, StepContext, count_tokens, equal_expert_loads
from trainer.memory import advice_when_full, describe_memory, state_bytes
from trainer.optim import ParameterGroup, build_optimizers
from trainer.precision import choose_precision, has_native_bfloat16
from trainer.resume import resume
from trainer.rollout_data import RolloutData
from trainer.run import Run
from trainer.track import Tracker, format_seconds


def save_whole_model(
    run: Run, model: MiniMindForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path, record: dict[str, Any]
) -> None:
    """Leave the model behind as a folder that the next stage and every other tool opens."""
    card, metrics_path = results.model_card(record), run.checkpoints.folder / "metrics.jsonl"
    with results.writing_result(folder, record, card, metrics_path) as temporary:
        results.save_model(model, tokenizer, temporary, run.settings.run.save_dtype)


@dataclasses.dataclass(frozen=True)
class Stage:
    """What is particular to one stage.

    Attributes:
        name: the result's default name, `--save_weight`.
        description: the first lines of --help.
        build_data: (data flags, tokenizer, seed, what prints) -> training rows, and validation rows by source name.
        loss: see `trainer.losses`.
        defaults: this stage's own defaults of flags, by name.
        start_from: names that `--from_weight auto` looks for, the best first.
        sample_prompts: what the model is asked when it is sampled; plain text, or messages of a chat.
        flags: dataclass of flags that only this stage has; they come as `settings.stage`.
        adapt: (model, settings) -> notes: changes the model that the run starts from, in place.
        count: of a micro-batch, (3,): terms of the loss, supervised tokens, tokens.
        documents_a_row: how many documents the loss needs in a row, at least.
        prepare: (run, tokenizer) -> notes: what is due once, with the weights that the run starts from.
        evaluate: measures and logs in the middle of the training.
        save: (run, model, tokenizer, folder, record): leaves the result behind.
        marker: a file that tells this stage's result from another kind's.
        detach: takes off what `adapt` put beside the model, before it is saved.
        variant: (stage, settings) -> the stage as these settings want it.
    """

    name: str
    description: str
    build_data: Callable[[DataArguments, PreTrainedTokenizerBase, int, Say | None], Data]
    loss: Callable[..., Any]
    defaults: dict[str, Any]
    start_from: tuple[str, ...] = ()
    sample_prompts: tuple[str | list[dict[str, str]], ...] = ()
    flags: type | None = None
    adapt: Callable[[MiniMindForCausalLM, Settings], list[str]] | None = None
    count: Callable[[Batch], torch.Tensor] = count_tokens
    documents_a_row: int = 1
    prepare: Callable[[Run, PreTrainedTokenizerBase], list[str]] | None = None
    evaluate: Callable[[Run, int | None], dict[str, Any]] = log_evaluation
    save: Callable[[Run, MiniMindForCausalLM, PreTrainedTokenizerBase, Path, dict[str, Any]], None] = save_whole_model
    marker: str = "config.json"
    detach: Callable[[MiniMindForCausalLM], None] | None = None
    variant: Callable[["Stage", Settings], "Stage"] | None = None


def run_stage(stage: Stage, arguments: Sequence[str] | None = None) -> Path:
    """Run a stage from the command line to its finished model folder, whose path is returned.

    Raises:
        ValueError: a mistake of the user's, in one message.
        SystemExit: the run was asked to stop by a signal; it is saved, and the code is 128 + the signal's number.
            Or another rank was lost; then the code is 3.
    """
    settings = read_settings(stage, arguments)
    stage = stage.variant(stage, settings) if stage.variant is not None else stage
    world = init_distributed_mode(settings.optimization.device)
    with contextlib.closing(world):
        # Until there is something to save, a signal ends the run at once: tokenising may take long.
        with naming_lost_ranks(world):
            run, tokenizer, notes, table = assemble(stage, settings, world)
        # Later on torchrun's SIGTERM, which follows the loss of a rank, must not come before the rank is named.
        with stop_on_signals() as asked, naming_lost_ranks(world), advice_when_full(run):
            run.stop_asked = lambda: asked.signal is not None
            resumed = resume(run)
            save_settings(run)
            introduce(run, stage, notes, table, resumed)
            with falling_back(run.bare_model, settings.model.use_compile) as failure:
                dry_run(run, stage)
            if failure:
                run.tracker.say(f"  {failure[0]}")
                dry_run(run, stage)
            if run.progress.step == 0:
                # Random weights score the logarithm of the vocabulary: one batch shows it, and steps come soon.
                run.evaluate(run, 1 if settings.model.from_weight == "none" else None)
                if settings.model.from_weight != "none":
                    run.ask(run)
            elif run.progress.step < run.total_steps:
                after_step(run)  # it was due when the checkpoint had been saved
            while run.progress.step < run.total_steps and train_epoch(run):
                pass
            run.checkpoints.writer.wait()
            if run.progress.step < run.total_steps:
                run.tracker.say(
                    f"stopped at step {run.progress.step}, saved; go on with the same command and --from_resume 1"
                )
                raise SystemExit(128 + (asked.signal or signal.SIGTERM))
            return finish(run, stage, tokenizer)


def read_settings(stage: Stage, arguments: Sequence[str] | None = None) -> Settings:
    """The stage's flags over its config file over its defaults, checked."""
    defaults = {"save_weight": stage.name} | stage.defaults
    groups = (ModelArguments, DataArguments, OptimizationArguments, RunArguments)
    groups += (stage.flags,) if stage.flags else ()
    settings = Settings(
        *parse_arguments(*groups, description=stage.description, defaults=defaults, arguments=arguments)
    )
    settings.validate()
    return settings


def assemble(
    stage: Stage, settings: Settings, world: World
) -> tuple[Run, PreTrainedTokenizerBase, list[str], list[ParameterGroup]]:
    """Everything that a run needs, in the order in which it can fail: cheap checks first."""
    optimization, options = settings.optimization, settings.run
    setup_seed(optimization.seed)
    source = weights.resolve_from_weight(settings.model, options.save_dir, stage.start_from)
    model, tokenizer, notes = weights.init_model(settings.model, source, world.device, settings.data.max_seq_len)
    folder = results.result_folder(options.save_dir, options.save_weight, model.config)
    results.check_result_folder(folder, model.config, stage.marker)
    if stage.adapt is not None:
        notes += stage.adapt(model, settings)
    say = print if world.is_main else None
    train_data, validation_data = main_first(lambda: stage.build_data(settings.data, tokenizer, optimization.seed, say))
    if isinstance(train_data, StreamDataset):
        train_data.start(world.rank, world.size)

    precision = choose_precision(world.device.type, has_native_bfloat16(world.device), optimization.dtype)
    notes.append(f"precision: {str(precision.dtype).removeprefix('torch.')} on {world.device} ({precision.reason})")
    if world.device.type == "cpu":
        keep_freed_memory()
    if settings.model.activation_checkpointing:
        model.activation_checkpointing_enable()
    if note := compile_layers(model, settings.model.use_compile, world.device):
        notes.append(note)
    wrapped = wrap_model(model, world, optimization.parallel, precision)
    optimizers, table = build_optimizers(
        model,
        optimization.optimizer,
        optimization.learning_rate,
        optimization.weight_decay,
        optimization.embedding_learning_rate,
    )
    # From here on the ranks draw their own dropout; weights and row order came from the common seed.
    setup_seed(optimization.seed + world.rank)
    run_folder = Path(options.checkpoint_dir) / folder.name
    run = Run(
        settings=settings,
        world=world,
        precision=precision,
        model=wrapped,
        optimizers=optimizers,
        scaler=torch.amp.GradScaler(world.device.type, enabled=precision.use_scaler),
        loss=stage.loss,
        train_data=train_data,
        validation_data=validation_data,
        token_bytes=token_byte_lengths(tokenizer),
        total_steps=0,
        tracker=Tracker(run_folder / "metrics.jsonl" if world.is_main else None),
        checkpoints=CheckpointFolder(run_folder, options.keep_last),
        evaluate=stage.evaluate,
        count=stage.count,
        expert_loads=equal_expert_loads(model.config, world.device),
        fingerprints={"data": train_data.summary.fingerprint, "tokenizer": tokenizer_fingerprint(tokenizer)},
        started_from=None if source is None else str(source.resolve()),
    )
    run.total_steps = run.estimate_total_steps()
    main_decides(lambda: check_room_for_all(run))
    is_chat = not all(isinstance(prompt, str) for prompt in stage.sample_prompts)
    questions, found = questions_to_ask(settings, is_chat, tokenizer, model.config.max_position_embeddings)
    notes += found
    run.sample = lambda run: sample_answers(run, stage.sample_prompts, tokenizer)
    run.ask = lambda run: ask_questions(run, questions, tokenizer)
    if stage.prepare is not None:
        with advice_when_full(run), falling_back(model, settings.model.use_compile) as failure:
            notes += stage.prepare(run, tokenizer)
        if failure:
            notes += [*failure, *stage.prepare(run, tokenizer)]
    return run, tokenizer, notes, table


def check_room_for_all(run: Run) -> None:
    """Raise ValueError unless the disk has room for the checkpoints that are kept, the one being written, the best."""
    existing = sum(path.stat().st_size for path in run.checkpoints.steps())
    needed = state_bytes(run) * (run.settings.run.keep_last + 2) - existing
    run.checkpoints.check_room(max(needed, 0), "a run's checkpoints (--keep_last and the best)")


def save_settings(run: Run) -> None:
    """Leave every resolved setting beside the checkpoints, in a form that `--config` takes."""
    if run.world.is_main:
        text = yaml.safe_dump(run.settings.to_dict(), sort_keys=False, allow_unicode=True)
        (run.checkpoints.folder / "settings.yaml").write_text(text, encoding="utf-8")


def introduce(run: Run, stage: Stage, notes: list[str], table: list[ParameterGroup], resumed: list[str]) -> None:
    """Say before the first step what will happen, and start the tracker's service if asked."""
    settings, say = run.settings, run.tracker.say
    total, active = count_parameters(run.bare_model)
    data = run.train_data.summary
    window = settings.data.max_seq_len
    say(f"{stage.name}: {total / 1e6:.2f}M parameters" + (f", {active / 1e6:.2f}M active" if active != total else ""))
    for note in notes:
        say(f"  {note}")
    say(f"  data: {run.train_data.describe()}")
    for reason, count in data.skipped.items():
        say(f"  left out: {count:,} {reason}")
    validation = ", ".join(f"{name} {len(rows):,} rows" for name, rows in run.validation_data.items())
    say(f"  validation: {validation or 'none'}")
    rows, optimization = run.rows_per_step, settings.optimization
    step = f"{rows} rows ({rows * window:,} tokens): {optimization.batch_size} a micro-batch"
    step += f" x {optimization.accumulation_steps} x {run.world.size} ranks"
    if isinstance(run.train_data, RolloutData):
        step = f"rollouts, {optimization.batch_size} rows of {window} slots a micro-batch"
    say(f"  steps: {run.total_steps:,} of {step}; {optimization.schedule} schedule")
    for group in table:
        say(
            f"  {group.optimizer}: {group.name}, {group.tensors} tensors, {group.parameters:,} parameters, "
            f"learning rate {group.learning_rate:g}, decay {group.weight_decay:g}"
        )
    say(f"  memory: {describe_memory(run)}")
    for note in resumed:
        say(f"  {note}")
    options = settings.run
    service = "swanlab" if options.use_wandb and options.tracker == "none" else options.tracker
    if service != "none":
        run.tracker.start(
            service,
            mode=options.tracker_mode,
            project=options.wandb_project,
            name=run.checkpoints.folder.name,
            folder=run.checkpoints.folder / service,
            config=settings.to_dict(),
        )


def dry_run(run: Run, stage: Stage) -> None:
    """The largest micro-batch that can come, forward and backward, so that what would fail later fails now.

    Rows of as few documents as can be that fill them, every token with a loss. It leaves no trace: gradients are
    dropped and the random state is put back.
    """
    size, window = run.settings.optimization.batch_size, run.settings.data.max_seq_len
    tokens = run.train_data.preview[0]["input_ids"]
    input_ids = tokens.repeat(-(-size * window // len(tokens)))[: size * window].view(size, window)
    documents = 1 + torch.arange(window) * stage.documents_a_row // window
    batch = {"input_ids": input_ids, "labels": input_ids, "document_ids": documents.expand_as(input_ids)}
    state = capture_rng(run.world.device)
    counts = run.count(batch)
    batch = to_device(batch, run.world.device)
    try:
        with run.autocast():
            loss, _, _ = run.loss(run.bare_model, batch, StepContext(counts[0], counts[2], run.expert_loads))
        (loss / counts[0].clamp(min=1)).backward()
    finally:
        run.bare_model.zero_grad(set_to_none=True)
        restore_rng(state, run.world.device)


def finish(run: Run, stage: Stage, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Last evaluation, samples, and the model folder that the next stage and every other tool opens."""
    folder = results.result_folder(run.settings.run.save_dir, run.settings.run.save_weight, run.bare_model.config)
    metrics = evaluate_and_keep_best(run)
    run.ask(run)
    run.sample(run)
    run.checkpoints.writer.wait()
    run.tracker.finish()
    if (model := whole_model(run.model, run.world)) is not None:
        if stage.detach is not None:
            stage.detach(model)
        record = describe_run(run, stage, metrics)
        stage.save(run, model, tokenizer, folder, record)
        run.tracker.say(f"saved {folder} after {format_seconds(run.progress.seconds)} of training")
    return folder


def describe_run(run: Run, stage: Stage, metrics: dict[str, Any]) -> dict[str, Any]:
    """What run.json says of a finished run."""
    total, active = count_parameters(run.bare_model)
    return results.to_plain(
        {
            "stage": stage.name,
            "command": command_line(),
            "finished": time.strftime("%Y-%m-%d %H:%M:%S"),
            "settings": run.settings.to_dict(),
            "started_from": run.started_from,
            "model": results.describe_config(run.bare_model.config),
            "parameters": {"total": total, "active": active},
            "data": {"train": run.train_data.summary.to_dict()}
            | {name: data.summary.to_dict() for name, data in run.validation_data.items()},
            "progress": run.progress,
            "total_steps": run.total_steps,
            "tokens_per_second": run.progress.tokens / max(run.progress.seconds, 1e-9),
            "metrics": metrics,
            "precision": f"{str(run.precision.dtype).removeprefix('torch.')} ({run.precision.reason})",
            "environment": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "device": str(run.world.device),
                "ranks": run.world.size,
                "threads": torch.get_num_threads(),
                "machine": platform.machine(),
            },
        }
    )


@dataclasses.dataclass
class StopRequest:
    """Which signal asked this run to stop, if any, and when."""

    signal: int | None = None
    time: float = 0.0


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """SIGTERM and SIGINT ask for a stop at the next step boundary; a second one leaves at once.

    Ctrl-C reaches a rank twice, from the terminal and from torchrun: that is one.
    """
    request = StopRequest()
    same_seconds = 3.0 if is_under_torchrun() else 0.0
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(number: int, _frame: Any) -> None:
        if request.signal is None:
            request.signal, request.time = number, time.monotonic()
        elif time.monotonic() - request.time > same_seconds:
            os._exit(128 + number)  # not even the checkpoint that is being written is waited for

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
