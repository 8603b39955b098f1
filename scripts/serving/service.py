"""A model folder or a GGUF file as a running service: flags, the file that llama.cpp opens, engine and front."""

import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from model.gguf_file import read_gguf_header
from scripts.serving.engines import Engine, Load, choose_engine, running_engine
from scripts.serving.front import FrontOptions
from scripts.serving.requests import control_text_breaker
from trainer.config import flag
from trainer.results import save_gguf
from trainer.weights import load_tokenizer, open_model, trained_window

DEFAULT_CONTEXT = 2048


@dataclasses.dataclass
class EngineArguments:
    """What answers, and how much at a time."""

    _argument_group_name = "engine"

    engine: Literal["auto", "llama.cpp", "vllm", "transformers"] = flag(
        "auto", "auto: vLLM if it is installed and there is a GPU, else llama.cpp, else transformers"
    )
    quantize: Literal["f32", "f16", "bf16", "q8_0"] = flag(
        "q8_0", "llama.cpp: what weights are stored as in the GGUF, which is made once and kept beside them"
    )
    slots: int = flag(64, "answers at the same time; a request with n=3 takes three, one more gets 429")
    context: int | None = flag(
        None, f"tokens of a prompt and its answer; by default the window of its training, at least {DEFAULT_CONTEXT}"
    )
    threads: int = flag(0, "llama.cpp: threads; 0: one a core")

    def problems(self) -> list[str]:
        """What is out of range, by flag."""
        found = [] if self.slots >= 1 else [f"--slots {self.slots} must be at least 1"]
        if self.context is not None and self.context < 16:
            found.append(f"--context {self.context} must be at least 16")
        if self.threads < 0:
            found.append(f"--threads {self.threads} must not be negative; 0 takes every core")
        return found


@dataclasses.dataclass(frozen=True)
class Service:
    """A running engine and what the front in front of it lets pass."""

    engine: Engine
    options: FrontOptions


@contextlib.contextmanager
def running_service(
    path: Path,
    arguments: EngineArguments,
    sampling: dict[str, float],
    api_key: str | None = None,
    max_request_bytes: int = 2**20,
) -> Iterator[Service]:
    """Start the engine on a model folder or GGUF file and wait until it is ready.

    Raises:
        ValueError: the engine is missing, cannot open the model, or does not start.
    """
    kind = choose_engine(arguments.engine, path)
    name = path.stem if path.suffix == ".gguf" else path.resolve().name
    context, tokens = describe(path)
    context = arguments.context or context
    served = path
    if kind == "llama.cpp" and path.suffix != ".gguf":
        served = cached_gguf(path, arguments.quantize)
    is_float32 = served.suffix == ".gguf" and read_gguf_header(served).is_float32
    load = Load(arguments.slots, context, arguments.threads, exact=is_float32)
    with running_engine(kind, served, name, load) as engine:
        broken = control_text_breaker(tokens)
        yield Service(
            engine, FrontOptions(name, api_key, arguments.slots, max_request_bytes, sampling, broken, context)
        )


def leave_on_sigterm() -> None:
    """Let SIGTERM end this process by SystemExit, on whose way out engines of their own processes are stopped."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def describe(path: Path) -> tuple[int, list[str]]:
    """The context that suits a model, in tokens, and every token of its tokenizer that acts as control."""
    if path.suffix == ".gguf":
        header = read_gguf_header(path)
        return min(header.context, DEFAULT_CONTEXT), header.control_tokens
    positions = json.loads((path / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    return min(max(trained_window(path) or 0, DEFAULT_CONTEXT), positions), list(load_tokenizer(path).get_added_vocab())


def cached_gguf(folder: Path, quantize: str) -> Path:
    """The GGUF of a model folder, beside its weights; made again when anything there is newer.

    Raises:
        ValueError: llama.cpp cannot compute this model, or the file cannot be written.
    """
    path = folder / f"{folder.resolve().name}-{quantize}.gguf"
    sources = [file for file in folder.iterdir() if file.suffix in (".safetensors", ".json", ".jinja")]
    if path.is_file() and path.stat().st_mtime_ns >= max(file.stat().st_mtime_ns for file in sources):
        return path
    save_gguf(open_model(folder), load_tokenizer(folder), path, quantize, path.stem)
    return path
