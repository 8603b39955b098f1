"""How much memory a run takes, and what to do when that is too much."""

import contextlib
from collections.abc import Iterator

import torch

from trainer.engine import save_checkpoint
from trainer.hardware import peak_memory_gib
from trainer.rollout import RolloutArguments
from trainer.run import Run

# Moments that an optimizer keeps for each parameter, in float32.
MOMENTS = {"Muon": 1, "AdamW": 2}


def state_bytes(run: Run) -> int:
    """Bytes of float32 weights and moments: what a checkpoint holds."""
    weights = sum(parameter.numel() for parameter in run.bare_model.parameters())
    moments = sum(
        MOMENTS[type(optimizer).__name__] * parameter.numel()
        for optimizer in run.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
    return 4 * (weights + moments)


def describe_memory(run: Run) -> str:
    """What training takes on each rank before activations, and on a GPU what there is."""
    weights = sum(parameter.numel() for parameter in run.bare_model.parameters())
    shares = run.world.size if run.settings.optimization.parallel == "fsdp" else 1
    needed = (state_bytes(run) + 4 * weights) / shares / 2**30
    text = f"{needed:.2f} GiB for weights, gradients and optimizer in float32, activations come on top"
    if run.world.device.type == "cuda":
        text += f"; the GPU has {torch.cuda.get_device_properties(run.world.device).total_memory / 2**30:.0f} GiB"
    return text


def is_out_of_memory(error: BaseException) -> bool:
    """True for what torch raises when a device, or a CPU's allocator, has no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in str(error) or "out of memory" in str(error))
    )


@contextlib.contextmanager
def advice_when_full(run: Run) -> Iterator[None]:
    """Turn running out of memory into a saved checkpoint and advice in numbers.

    Raises:
        ValueError: the advice. Weights and optimizer stand as after the last whole step, which is saved, unless other
            ranks wait in the middle of that step: then the last checkpoint stands.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        peak = peak_memory_gib(run.world.device)
        saved = run.checkpoints.steps()[0].name if run.checkpoints.steps() else "none"
        if run.world.size == 1 and run.progress.step:
            for optimizer in run.optimizers:
                optimizer.zero_grad(set_to_none=True)
            save_checkpoint(run)
            run.checkpoints.writer.wait()
            saved = run.checkpoints.path_of(run.progress.step).name
        raise ValueError(
            f"out of memory at {peak:.1f} GiB in step {run.progress.step + 1}; {advice(run)} "
            f"(checkpoint: {saved}; go on from it with --from_resume 1)"
        ) from error


def advice(run: Run) -> str:
    """Settings that need less memory and train the same, in the order in which to try them."""
    optimization = run.settings.optimization
    size, accumulation = optimization.batch_size, optimization.accumulation_steps
    smaller = next((part for part in range(size // 2, 0, -1) if size % part == 0), None)
    options = []
    if smaller is not None:
        more = f" --accumulation_steps {accumulation * size // smaller}"
        if isinstance(run.settings.stage, RolloutArguments):
            more = ""  # a step takes as many micro-batches as its rollouts fill
        options.append(f"--batch_size {smaller}{more} (the same step)")
    if not run.settings.model.activation_checkpointing:
        options.append("--activation_checkpointing 1 (a third slower)")
    if run.world.size > 1 and optimization.parallel == "ddp":
        options.append(f"--parallel fsdp (weights and optimizer in {run.world.size} shares)")
    options.append(f"--max_seq_len {run.settings.data.max_seq_len // 2} (another run)")
    return "try " + ", or ".join(options)
