"""Contestants take turns on the same cores, each in a process of its own, so that a slow hour slows all of them."""

import contextlib
import dataclasses
import multiprocessing
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from trainer.hardware import peak_memory_gib


@dataclasses.dataclass
class Lap:
    """What a contestant did in one turn; `note` is whatever it had to say."""

    steps: int
    tokens: int
    seconds: float
    peak_memory_gib: float
    note: Any = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class Baton:
    """A contestant's side: `wait` when ready to run, then `step` after every optimizer step.

    A turn ends with the first step that ends after `seconds`, or after `steps` if they are given.
    """

    def __init__(self, connection: Connection, seconds: float, steps: int | None):
        self.connection, self.seconds, self.steps_in_turn = connection, seconds, steps
        self.steps = self.tokens = 0
        self.started = 0.0

    def wait(self) -> None:
        """Hand over, and come back when it is this contestant's turn. Raises SystemExit when all turns are over."""
        self.connection.send(None)
        if not self.connection.recv():
            raise SystemExit(0)
        self.steps = self.tokens = 0
        self.started = time.perf_counter()

    def step(self, tokens: int, note: Callable[[], Any] | None = None) -> None:
        """Count an optimizer step of so many tokens that are not padding; `note` is called, untimed, as a turn ends."""
        self.steps, self.tokens = self.steps + 1, self.tokens + tokens
        seconds = time.perf_counter() - self.started
        if self.steps >= self.steps_in_turn if self.steps_in_turn else seconds >= self.seconds:
            memory = peak_memory_gib(torch.device("cpu"))
            self.connection.send(Lap(self.steps, self.tokens, seconds, memory, note() if note else None))
            self.wait()


@dataclasses.dataclass(frozen=True)
class Contestant:
    """`work(options, baton)` in a process of its own; its first lap does not count."""

    name: str
    work: Callable[[Any, Baton], None]
    options: Any
    steps: int | None = None


def _child(contestant: Contestant, connection: Connection, seconds: float, log: str) -> None:
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        contestant.work(contestant.options, Baton(connection, seconds, contestant.steps))
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


class Runner:
    """The referee's side of one contestant."""

    def __init__(self, contestant: Contestant, seconds: float, folder: str):
        self.name, self.log = contestant.name, Path(folder) / f"{contestant.name.replace('/', '_')}.log"
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_child, args=(contestant, theirs, seconds, str(self.log)), daemon=True)
        self.process.start()
        theirs.close()
        self._receive()

    def _receive(self) -> Any:
        try:
            return self.connection.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f"contestant {self.name!r} failed:\n{self.log.read_text()[-3000:]}") from None

    def turn(self) -> Lap:
        """Let it run for one turn."""
        self.connection.send(True)
        lap = self._receive()
        self._receive()  # it waits again
        return lap

    def stop(self) -> None:
        """Let it go home."""
        with contextlib.suppress(OSError):
            self.connection.send(False)
        self.process.join(5)
        self.process.kill()


@contextlib.contextmanager
def runners(contestants: list[Contestant], seconds: float, say: Callable[[str], None]) -> Iterator[dict[str, Runner]]:
    """Every contestant, ready to run, made ready one after another."""
    started: dict[str, Runner] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for contestant in contestants:
                started[contestant.name] = Runner(contestant, seconds, folder)
                say(f"ready: {contestant.name}")
            yield started
        finally:
            for runner in started.values():
                runner.stop()


def alternate(
    contestants: list[Contestant], turns: int, seconds: float, say: Callable[[str], None], between: Callable[[], Any]
) -> dict[str, list[Lap]]:
    """Laps of each contestant: one to warm up, which does not count, then `turns`, in an order that turns round.

    Args:
        contestants: who runs.
        turns: laps of each that count.
        seconds: least length of a lap.
        say: is told of each lap.
        between: called before each round, while nobody runs.
    """
    laps: dict[str, list[Lap]] = {contestant.name: [] for contestant in contestants}
    with runners(contestants, seconds, say) as ready:
        for number in range(turns + 1):
            between()
            for contestant in contestants if number % 2 == 0 else reversed(contestants):
                lap = ready[contestant.name].turn()
                laps[contestant.name].append(lap)
                label = f"turn {number}/{turns}" if number > 0 else "warm-up"
                say(f"{label}: {contestant.name}, {lap.steps} steps, {lap.tokens_per_second:,.0f} tokens/s")
    return {name: found[-turns:] for name, found in laps.items()}


def median_and_spread(values: list[float]) -> tuple[float, float, float]:
    """Median, least, greatest."""
    return statistics.median(values), min(values), max(values)
