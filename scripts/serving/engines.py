"""The programs that answer: llama.cpp in this process, vLLM or `transformers serve` in one of its own.

Each is started on the loopback, behind a key that only the front knows, and is ready when its function returns.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import torch
from transformers import AutoConfig, GenerationConfig

LLAMA_CPP_DEFAULTS = {"top_k": 0, "min_p": 0.0}
# llama.cpp's own order filters before it applies the temperature; ours, transformers' and vLLM's do it after.
LLAMA_CPP_FIELDS = {"samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"]}
READY_SECONDS = 600.0  # vLLM compiles for minutes on its first start


@dataclasses.dataclass(frozen=True)
class Engine:
    """A running engine.

    Attributes:
        kind: "llama.cpp", "vllm" or "transformers".
        url: where it listens, without a path.
        model: the name by which it knows the model.
        key: what it wants as bearer token.
        defaults: fields of a request that leaves them out.
        fields: what every request says besides.
    """

    kind: str
    url: str
    model: str
    key: str
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Load:
    """How much it serves at a time.

    Attributes:
        slots: answers together.
        context: tokens of prompt and answer of each.
        threads: of llama.cpp; 0: one a core.
        exact: attention in float32, for weights in float32; llama.cpp's own default moves logits by up to 3e-3.
    """

    slots: int
    context: int
    threads: int = 0
    exact: bool = False


def choose_engine(asked: str, path: Path) -> str:
    """The engine for a model folder or a GGUF file; "auto" takes vLLM with a GPU, else llama.cpp, else transformers.

    Raises:
        ValueError: the engine that was asked for is not installed, or cannot open such a file.
    """
    is_gguf = path.suffix == ".gguf"
    if asked == "auto":
        if torch.cuda.is_available() and shutil.which("vllm") and not is_gguf:
            return "vllm"
        if is_gguf or importlib.util.find_spec("xllamacpp"):
            asked = "llama.cpp"
        else:
            asked = "transformers"
    if is_gguf and asked != "llama.cpp":
        raise ValueError(f"--engine {asked} does not open {path}; GGUF is llama.cpp's")
    if asked == "llama.cpp" and not importlib.util.find_spec("xllamacpp"):
        raise ValueError("--engine llama.cpp needs xllamacpp: pip install -r requirements-serve.txt")
    if asked == "vllm" and not shutil.which("vllm"):
        raise ValueError("--engine vllm: vLLM is not installed; see its documentation, or take --engine llama.cpp")
    return asked


@contextlib.contextmanager
def running_engine(kind: str, path: Path, name: str, load: Load) -> Iterator[Engine]:
    """Start an engine on a model folder (vllm, transformers) or a GGUF file (llama.cpp) and stop it afterwards.

    Raises:
        ValueError: it does not start; the message has its last words.
    """
    key = secrets.token_urlsafe(24)
    if kind == "llama.cpp":
        server = _start_llama_cpp(path, name, load, key)
        yield Engine(kind, server.listening_address, name, key, LLAMA_CPP_DEFAULTS, LLAMA_CPP_FIELDS)
        del server  # its end stops it
        return
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    if kind == "vllm":
        engine, words = Engine(kind, url, name, key), _vllm_words(path, name, load, key, port)
    else:
        # Without do_sample it takes a temperature and picks the likeliest token all the same.
        generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(path)).to_diff_dict()
        fields = {"generation_config": json.dumps(generation | {"do_sample": True})}
        engine = Engine(kind, url, str(path.resolve()), key, fields=fields)
        words = [_beside_python("transformers"), "serve", str(path.resolve()), "--host", "127.0.0.1", "--port", port]
    with _running_process([str(word) for word in words]) as (process, log):
        _wait_until_ready(engine, process, log)
        yield engine


def _start_llama_cpp(path: Path, name: str, load: Load, key: str) -> Any:
    """Load the file and listen, in threads of this process, until the result is dropped."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.model_alias = {name}
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = 0
    parameters.api_keys = [key]
    parameters.n_parallel = load.slots
    parameters.n_ctx = load.slots * load.context
    parameters.cpuparams.n_threads = load.threads or os.cpu_count()
    parameters.cpuparams_batch.n_threads = load.threads or os.cpu_count()
    if load.exact:
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    parameters.ui = False
    parameters.endpoint_slots = False
    parameters.verbosity = -1
    parameters.use_jinja = True
    try:
        return xllamacpp.Server(parameters)
    except RuntimeError as error:
        raise ValueError(f"llama.cpp cannot open {path}: {error}") from error


def _vllm_words(path: Path, name: str, load: Load, key: str, port: int) -> list:
    return [
        *("vllm", "serve", path, "--host", "127.0.0.1", "--port", port, "--api-key", key),
        *("--served-model-name", name, "--max-model-len", load.context, "--max-num-seqs", load.slots),
        *("--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    ]


def _beside_python(program: str) -> str:
    """A program of this environment, also when the environment is not activated."""
    beside = Path(sys.executable).with_name(program)
    return str(beside) if beside.exists() else program


@contextlib.contextmanager
def _running_process(words: Sequence[str]) -> Iterator[tuple[subprocess.Popen, Path]]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "engine.log"
        with open(log, "wb") as file:
            process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            yield process, log
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(engine: Engine, process: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        with contextlib.suppress(httpx2.HTTPError):
            if httpx2.get(f"{engine.url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    last_words = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    raise ValueError(f"--engine {engine.kind} did not start; its last words:\n{last_words}")


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
