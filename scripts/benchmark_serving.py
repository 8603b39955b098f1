"""How fast the server answers: one stream and many beside transformers' `generate`, and the time to the first token.

Example:
    python scripts/benchmark_serving.py --preset mini --streams 50
"""

import gc, pathlib, sys  # noqa: E401

sys.path[0] = sys.path[0] if __package__ else str(pathlib.Path(__file__).resolve().parents[1])
__package__ or gc.disable()  # a fifth of the time of the imports; `user_errors` turns it on again

import concurrent.futures
import contextlib
import dataclasses
import http.client
import itertools
import json
import statistics
import subprocess
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from model.config import MiniMindConfig
from model.model_minimind import MiniMindForCausalLM
from trainer.config import ROOT, flag, parse_arguments, raise_problems, user_errors
from trainer.results import save_model
from trainer.weights import DEFAULT_TOKENIZER, load_tokenizer

ROWS = {
    "generate": "transformers' generate, float32",
    "whole": "one answer, not streamed",
    "plain": "one stream, only read",
    "one": "one stream to the openai package",
    "many": "as many streams together as --streams says",
}
PROMPT = "Tell me a long story about a fox, a lighthouse and the sea."


@dataclasses.dataclass
class ServingArguments:
    """What is measured."""

    _argument_group_name = "measure"

    preset: str = flag("mini", "size of the model; its weights are random, which costs the same")
    quantize: Literal["f32", "f16", "bf16", "q8_0"] = flag("q8_0", "what llama.cpp stores weights as")
    streams: int = flag(50, "clients at a time")
    new_tokens: int = flag(128, "tokens of each answer")
    turns: int = flag(5, "alternations; medians and spreads are over them")

    def problems(self) -> list[str]:
        """What is out of range, by flag."""
        numbers = {name: getattr(self, name) for name in ("streams", "new_tokens", "turns")}
        return [f"--{name} {value} must be at least 1" for name, value in numbers.items() if value < 1]


class Contest:
    """One model, served and in transformers."""

    def __init__(self, url: str, folder: Path, new_tokens: int):
        self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=600)
        self.new_tokens = new_tokens
        self.numbers = itertools.count(100)
        self.theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = load_tokenizer(folder)
        self.ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]

    def stream(self, _number: int) -> tuple[float, int]:
        """One answer streamed to the openai package: seconds to its first token, and its tokens."""
        started, first, tokens = time.perf_counter(), 0.0, 0
        for chunk in self.client.completions.create(**self._request(), extra_body={"ignore_eos": True}):
            first = first or time.perf_counter() - started
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        return first, tokens

    def plain_stream(self) -> float:
        """Tokens a second of one answer whose stream is only read: what the package makes of it costs a fifth."""
        address = urllib.parse.urlsplit(str(self.client.base_url))
        started, last = time.perf_counter(), b""
        connection = http.client.HTTPConnection(address.hostname, address.port)
        with contextlib.closing(connection):
            body = json.dumps(self._request() | {"ignore_eos": True})
            connection.request("POST", f"{address.path}completions", body, {"Content-Type": "application/json"})
            for line in connection.getresponse():
                last = line if b"completion_tokens" in line else last
        seconds = time.perf_counter() - started
        return json.loads(last.removeprefix(b"data: "))["usage"]["completion_tokens"] / seconds

    def _request(self) -> dict[str, Any]:
        prompt = f"{next(self.numbers)}. {PROMPT}"  # another one each time: nothing of it is in a cache
        fields = {"model": "bench", "prompt": prompt, "max_tokens": self.new_tokens, "temperature": 0}
        return fields | {"stream": True, "stream_options": {"include_usage": True}}

    def whole(self) -> float:
        """Tokens a second of one answer that is not streamed."""
        started = time.perf_counter()
        answer = self.client.completions.create(
            model="bench", prompt=PROMPT, max_tokens=self.new_tokens, temperature=0, extra_body={"ignore_eos": True}
        )
        return answer.usage.completion_tokens / (time.perf_counter() - started)

    def served(self, streams: int) -> tuple[float, float]:
        """Tokens a second of so many streams together, and the median of seconds to the first token."""
        started = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(streams) as pool:
            answers = list(pool.map(self.stream, range(streams)))
        rate = sum(tokens for _, tokens in answers) / (time.perf_counter() - started)
        return rate, statistics.median(first for first, _ in answers)

    @torch.inference_mode()
    def generated(self) -> float:
        """Tokens a second of transformers' `generate`, one row, float32."""
        started = time.perf_counter()
        count = {"max_new_tokens": self.new_tokens, "min_new_tokens": self.new_tokens}
        out = self.theirs.generate(self.ids, do_sample=False, **count)
        return (out.shape[1] - self.ids.shape[1]) / (time.perf_counter() - started)


@contextlib.contextmanager
def served(folder: Path, arguments: ServingArguments) -> Iterator[str]:
    """The server's own command on a model folder; gives its URL. It is a process of its own, as it is for users."""
    words = [ROOT / "scripts" / "serve_openai_api.py", "--model_path", folder, "--port", 0, "--engine", "llama.cpp"]
    words += ["--quantize", arguments.quantize, "--slots", arguments.streams, "--context", arguments.new_tokens + 64]
    process = subprocess.Popen([sys.executable, *map(str, words)], stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("the server did not start; see what it printed")
        yield next(word.rstrip(":") for word in line.split() if word.startswith("http"))
    finally:
        process.terminate()
        process.wait()


def measure(arguments: ServingArguments) -> dict[str, list[float]]:
    """Every figure of every turn."""
    tokenizer = load_tokenizer(DEFAULT_TOKENIZER)
    overrides = {"vocab_size": -(-len(tokenizer) // 64) * 64, "zero_init_output": False}
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "bench"
        model = MiniMindForCausalLM(MiniMindConfig.from_preset(arguments.preset, overrides))
        save_model(model, tokenizer, folder)
        with served(folder, arguments) as url:
            contest = Contest(url, folder, arguments.new_tokens)
            found: dict[str, list[float]] = {}
            for turn in range(-1, arguments.turns):  # the first one warms up
                now = {"generate": contest.generated(), "whole": contest.whole(), "plain": contest.plain_stream()}
                now["one"], now["first_one"] = contest.served(1)
                now["many"], now["first_many"] = contest.served(arguments.streams)
                if turn >= 0:
                    for name, value in now.items():
                        found.setdefault(name, []).append(value)
                rates = ", ".join(f"{name} {now[name]:,.0f}" for name in ROWS)
                print(f"turn {turn + 1}: {rates} tokens/s", flush=True)
    return found


def main() -> None:
    """Entry point."""
    logging.disable_progress_bar()
    (arguments,) = parse_arguments(ServingArguments, description=__doc__.split("\n")[0])
    raise_problems(arguments.problems())
    found = measure(arguments)
    median = {name: statistics.median(values) for name, values in found.items()}
    print("\n| | tokens/s | times generate | seconds to the first token |\n|---|---|---|---|")
    for name, label in ROWS.items():
        first = f"{median[f'first_{name}']:.3f}" if f"first_{name}" in median else ""
        print(f"| {label} | {median[name]:,.0f} | {median[name] / median['generate']:.2f} | {first} |")
    print(f"\nmany / one: {median['many'] / median['one']:.2f}")
    print(json.dumps({"preset": arguments.preset, "quantize": arguments.quantize, **found}))


if __name__ == "__main__":
    with user_errors():
        main()
