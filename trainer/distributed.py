"""Ranks: the only file that imports torch.distributed. Everything here also works, as a no-op, without torchrun."""

import atexit
import contextlib
import datetime
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# A rank may tokenise for a while before the others hear from it; a real hang is still noticed.
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)

# Groups that this process joined; see `free_groups`.
_joined: list[dist.ProcessGroup] = []


@dataclass(frozen=True)
class World:
    """This process's place among the ranks. A plain `python` run is rank 0 of 1."""

    rank: int
    local_rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and speaks."""
        return self.rank == 0


def init_distributed_mode(device: str = "auto") -> World:
    """Join the other ranks that torchrun started (gloo on a CPU, nccl on CUDA) and pick this rank's device.

    Args:
        device: "auto" (cuda, else mps, else cpu), or a torch device such as "cpu" or "cuda:1".

    Raises:
        ValueError: the device does not exist here.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    chosen = choose_device(device, local_rank)
    if "RANK" not in os.environ:
        return World(rank=0, local_rank=0, size=1, device=chosen)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT)
        _joined.append(dist.group.WORLD)
    return World(rank=dist.get_rank(), local_rank=local_rank, size=dist.get_world_size(), device=chosen)


def choose_device(device: str, local_rank: int = 0) -> torch.device:
    """The torch device that `--device` means on this machine; see `init_distributed_mode`."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", local_rank)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"--device {device}: not a device; use auto, cpu, cuda, cuda:1 or mps") from error
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(chosen.type, False):
        usable = ", ".join(name for name, there in available.items() if there)
        raise ValueError(f"--device {device}: not available here; this machine has: {usable}")
    if chosen.type == "cuda":
        index = local_rank if chosen.index is None else chosen.index
        if index >= torch.cuda.device_count():
            raise ValueError(f"--device {device}: rank {local_rank} wants GPU {index} of {torch.cuda.device_count()}")
        chosen = torch.device("cuda", index)
    return chosen


def shutdown() -> None:
    """Leave the group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


@atexit.register
def free_groups() -> None:
    """Free the groups while Python still runs, after the models that used them.

    Gloo's threads need Python's lock to let go of the last tensor that they reduced. Freed by
    DistributedDataParallel's reducer, a group waits for its threads with that lock held: 1 two-rank run in 5 hung at
    its end on two busy cores. Freed when Python is gone, it aborts the process. Our own reference gives the lock up.
    """
    if _joined:
        gc.collect()
        _joined.clear()


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over ranks, in place; returns the same tensor."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def any_rank(condition: bool, device: torch.device) -> bool:
    """True on every rank if the condition holds on any."""
    return bool(all_reduce_sum(torch.tensor(int(condition), device=device)).item())


def gather_objects(value: Any) -> list[Any]:
    """The value of every rank, in rank order, on every rank. For small things such as RNG states."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def main_first(work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0, then on the others, so that these find its files. A failure on rank 0 fails everywhere."""
    if not dist.is_initialized():
        return work()
    error: Exception | None = None
    result = None
    if dist.get_rank() == 0:
        try:
            result = work()
        except Exception as caught:
            error = caught
    failure = gather_objects(None if error is None else f"{error}")[0]
    if error is not None:
        raise error
    if failure is not None:
        raise ValueError(failure)
    if dist.get_rank() != 0:
        result = work()
    dist.barrier()
    return result


def wrap_model(model: nn.Module, world: World) -> nn.Module:
    """DistributedDataParallel around the model when there are several ranks, else the model itself."""
    if world.size == 1:
        return model
    device_ids = [world.device.index] if world.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)


@contextlib.contextmanager
def gradient_sync(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Reduce gradients over ranks in this backward only if enabled: the last micro-batch of a step does it for all."""
    if enabled or not isinstance(model, DistributedDataParallel):
        yield
    else:
        with model.no_sync():
            yield
