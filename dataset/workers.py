"""Making units on all cores: blocks go to worker processes, batches of units come back in order."""

import collections
import concurrent.futures
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator

from dataset.readers import Block, parse_block
from dataset.units import UnitBatch, UnitMaker


def make_from_block(maker: UnitMaker, block: Block, held_out: bool | None = None) -> UnitBatch:
    """The units of a block's rows; see `UnitMaker.make`."""
    return maker.make(parse_block(block), held_out)


def map_in_order(blocks: Iterable[Block], maker: UnitMaker, held_out: bool | None, workers: int) -> Iterator[UnitBatch]:
    """`make_from_block` of each block, by several processes, in the blocks' order; only a few wait in memory.

    Raises:
        ValueError: a process was killed.
    """
    # By fork, a process starts in a few milliseconds and shares the libraries' memory; not every system has it.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, (maker, os.getpid()))
    waiting: collections.deque[concurrent.futures.Future] = collections.deque()
    try:
        with pool:
            for block in blocks:
                waiting.append(pool.submit(_make_in_worker, block, held_out))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    except concurrent.futures.process.BrokenProcessPool as error:
        raise ValueError("a process that tokenised was killed, probably for want of memory") from error


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_maker: UnitMaker | None = None  # of a worker process; set once, before its first task


def _start_worker(maker: UnitMaker, parent: int) -> None:
    global _maker
    _maker = maker
    gc.freeze()  # what the parent had is not looked through again and again
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def leave_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    if sys.platform != "win32":
        threading.Thread(target=leave_with_parent, daemon=True).start()


def _make_in_worker(block: Block, held_out: bool | None) -> UnitBatch:
    return make_from_block(_maker, block, held_out)
