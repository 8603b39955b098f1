"""Ranks: the only file that imports torch.distributed. Everything here also works, as a no-op, without torchrun."""

import atexit
import contextlib
import datetime
import gc
import hashlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from model.config import MiniMindConfig
from model.model_minimind import MiniMindForCausalLM
from model.moe import Router
from trainer.hardware import has_working_amx
from trainer.precision import Precision

# A rank may tokenise for a while before the others hear from it; a real hang is still noticed.
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)

# Groups that this process joined; see `free_groups`.
_joined: list[dist.ProcessGroup] = []

# Exit code of a rank that leaves because another one is gone.
RANK_LOST = 3

Parallel = Literal["ddp", "fsdp"]


@dataclass(frozen=True)
class World:
    """This process's place among the ranks. A plain `python` run is rank 0 of 1.

    Attributes:
        processes: host name and process number of each rank; see `lost_ranks`.
    """

    rank: int
    local_rank: int
    size: int
    device: torch.device
    processes: tuple[tuple[str, int], ...] = ()

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and speaks."""
        return self.rank == 0

    def close(self) -> None:
        """Leave the group, if there is one."""
        if dist.is_initialized():
            dist.destroy_process_group()


def init_distributed_mode(device: str = "auto") -> World:
    """Join the other ranks that torchrun started and pick this rank's device.

    Tensors on a CPU go by gloo, those on CUDA by nccl.

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
        store, rank, size = next(dist.rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
        if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
            # On one node torchrun keeps its store when it starts the ranks again, with the addresses of those that
            # are gone: 4 of 8 restarts waited for them for ever. (Between nodes, c10d makes a store for each start.)
            store = dist.PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
        _joined.append(dist.group.WORLD)
    return World(dist.get_rank(), local_rank, dist.get_world_size(), chosen, meet())


def meet() -> tuple[tuple[str, int], ...]:
    """Host name and process number of each rank."""
    return tuple(gather_objects((socket.gethostname(), os.getpid())))


def is_under_torchrun() -> bool:
    """True where torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_restart() -> bool:
    """True where torchrun started this process again after a rank was lost (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def lost_ranks(world: World, patience_seconds: float = 5.0) -> list[int]:
    """Ranks of this host whose process has ended, once a collective has failed; empty if all of them are there.

    A process that ends closes its connections a moment before it is gone, so this looks for a while.
    """
    here = [(rank, process) for rank, (host, process) in enumerate(world.processes) if host == socket.gethostname()]
    deadline = time.monotonic() + patience_seconds
    while True:
        lost = [rank for rank, process in here if not _is_alive(process)]
        if lost or time.monotonic() > deadline:
            return lost
        time.sleep(0.05)


@contextlib.contextmanager
def naming_lost_ranks(world: World) -> Iterator[None]:
    """Turn a collective that failed because a rank is gone into one message that names it, and exit code 3."""
    try:
        yield
    except RuntimeError as error:
        lost = lost_ranks(world) if world.size > 1 else []
        other_hosts = {host for host, _ in world.processes} - {socket.gethostname()}
        if not lost and not (other_hosts and isinstance(error, dist.DistError)):
            raise
        who = f"rank {', '.join(map(str, lost))} is gone" if lost else f"a rank on {', '.join(other_hosts)} is gone"
        if world.rank == min(set(range(world.size)) - set(lost)) or not lost:
            print(
                f"error: {who}, so this run cannot go on ({str(error).splitlines()[0]}); "
                "go on from its last checkpoint with the same command and --from_resume 1",
                file=sys.stderr,
                flush=True,
            )
        raise SystemExit(RANK_LOST) from error


def _is_alive(process: int) -> bool:
    try:
        return psutil.Process(process).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def choose_device(device: str, local_rank: int = 0) -> torch.device:
    """The torch device that `--device` means on this machine; see `init_distributed_mode`."""
    has_working_amx()  # before any product
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


def any_rank(condition: bool) -> bool:
    """True on every rank if the condition holds on any."""
    return bool(all_reduce_sum(torch.tensor(int(condition))).item())


def gather_objects(value: Any) -> list[Any]:
    """The value of every rank, in rank order, on every rank. For small things such as RNG states."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def main_decides(work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0 alone; its small result, or its failure, is everybody's."""
    result, failure = None, None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            result = work()
        except ValueError as error:
            failure = str(error)
    result, failure = gather_objects((result, failure))[0]
    if failure is not None:
        raise ValueError(failure)
    return result


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


def wrap_model(model: MiniMindForCausalLM, world: World, parallel: Parallel, precision: Precision) -> nn.Module:
    """The model as several ranks train it; with one rank, the model itself.

    Args:
        parallel: "ddp": every rank holds the whole model (DistributedDataParallel). "fsdp": every rank holds its share
            of each weight, gradient and moment, and borrows a layer's rest while it computes it (FSDP2).
        precision: what FSDP borrows weights in; its shares are float32 whatever this says.
    """
    if world.size == 1:
        return model
    if parallel == "ddp":
        # No device_ids: with them it would move labels and document ids to the GPU, see engine.to_device.
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    mesh = init_device_mesh(world.device.type, (world.size,))
    exact = MixedPrecisionPolicy()
    # Hidden states between layers, norms inside autocast, the router, embedding and head keep their precision; what a
    # layer borrows has that of its matrix products, and gradients are summed in float32.
    reduced = MixedPrecisionPolicy(
        param_dtype=precision.dtype if precision.use_autocast else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for layer in model.model.layers:
        for module in layer.modules():
            if isinstance(module, Router):
                fully_shard(module, mesh=mesh, mp_policy=exact)
        fully_shard(layer, mesh=mesh, mp_policy=reduced)
    fully_shard(model, mesh=mesh, mp_policy=exact)
    return model


@contextlib.contextmanager
def gradient_sync(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Reduce gradients over ranks in this backward only if enabled: the last micro-batch of a step does it for all."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
        yield
    elif isinstance(model, DistributedDataParallel) and not enabled:
        with model.no_sync():
            yield
    else:
        yield


def clip_gradients(model: nn.Module, limit: float) -> torch.Tensor:
    """Scale all gradients so that their norm over all ranks is at most `limit`; returns the norm before that."""
    return whole(nn.utils.clip_grad_norm_(model.parameters(), limit))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or, where ranks hold shares of it, all of it (then all ranks must call)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def share_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor that every rank has whole, shared out as another one of its shape is: each takes its part."""
    if isinstance(like, DTensor) and tensor.shape == like.shape:
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return tensor


def copy_of_whole(tensor: torch.Tensor, keep: bool) -> torch.Tensor | None:
    """A copy on the CPU, whole even if ranks hold shares of it (then all of them must call); None unless `keep`."""
    everything = whole(tensor).detach()
    return everything.to("cpu", copy=not isinstance(tensor, DTensor)) if keep else None


def model_hash(model: MiniMindForCausalLM) -> str:
    """The sha256 of a model's shape and all its weights; every rank must call."""
    is_main = not dist.is_initialized() or dist.get_rank() == 0
    names = MiniMindConfig.__annotations__.keys() - {"fast_path", "moe_implementation"}  # another way to the same
    shape = {name: getattr(model.config, name) for name in names}
    digest = hashlib.sha256(repr(sorted(shape.items())).encode())
    for name, tensor in model.state_dict().items():
        everything = copy_of_whole(tensor, keep=is_main)
        if everything is not None:
            digest.update(name.encode() + everything.contiguous().view(torch.uint8).numpy().tobytes())
    return main_decides(digest.hexdigest)


def copy_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A copy of a whole tensor on the device of another; where that one is a share, this rank's share of it."""
    return share_of(tensor.to(like.device, copy=True), like)


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks hold shares of the weights."""
    return isinstance(model, FSDPModule)


def whole_model(model: nn.Module, world: World) -> MiniMindForCausalLM | None:
    """The model for what one rank does alone, such as sampling or saving: on rank 0, else None.

    Under FSDP all ranks must call, and it is a copy.
    """
    bare = getattr(model, "module", model)
    if not is_sharded(model):
        return bare if world.is_main else None
    copy = copy_of_model(bare, world, keep=world.is_main)
    return None if copy is None else copy.train(bare.training)


def copy_of_model(bare: nn.Module, world: World, keep: bool = True) -> MiniMindForCausalLM | None:
    """A whole copy of a model whose ranks may hold shares (then all of them must call); None unless `keep`."""
    state = {name: copy_of_whole(tensor, keep) for name, tensor in bare.state_dict().items()}
    if not keep:
        return None
    state = {name: tensor for name, tensor in state.items() if not name.startswith("critic.")}  # of PPO
    with torch.random.fork_rng(devices=[]):  # new weights are drawn, and the training's generator must not notice
        copy = MiniMindForCausalLM(bare.config)
    copy.load_state_dict(state)
    return copy.to(world.device)
