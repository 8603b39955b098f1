"""How fast a large jsonl is tokenised and packed, in how much memory, and how soon a second start trains.

The file is made by repeating and perturbing real text. The raw speed beside ours is that of the tokenizers library's
own `encode_batch_fast` with all of its threads, on texts that are in memory already, measured before and after ours.

    python scripts/benchmark_data.py --data_path text.txt rows.jsonl --gigabytes 2
"""

import gc, pathlib, sys  # noqa: E401

sys.path[0] = sys.path[0] if __package__ else str(pathlib.Path(__file__).resolve().parents[1])
__package__ or gc.disable()  # a fifth of the time of the imports; `user_errors` turns it on again

import dataclasses
import json
import os
import random
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from dataset.chat import plain_encoder
from dataset.formats import text_from_row
from dataset.sources import RowReader
from trainer.config import ROOT, flag, parse_arguments, user_errors
from trainer.weights import DEFAULT_TOKENIZER, load_tokenizer

CHANGED_SHARE = 0.1
RAW_BYTES = 100_000_000
BATCH_TEXTS = 1000
# What a stage's first start does with its data, and no more.
WORK = """
import sys, time
sys.path.insert(0, sys.argv[1])
import trainer.stage
from trainer.config import DataArguments
from trainer.data import build_pretrain_data
from trainer.weights import load_tokenizer
tokenizer = load_tokenizer(sys.argv[4])
started = time.perf_counter()
arguments = DataArguments(data_path=[sys.argv[2]], cache_dir=sys.argv[3], max_seq_len=512)
data, _ = build_pretrain_data(arguments, tokenizer, seed=42)
print(f"{len(data.tokens)} {data.summary.rows} {data.summary.fill_rate} {time.perf_counter() - started}")
"""


@dataclasses.dataclass
class BenchmarkArguments:
    """What is measured."""

    _argument_group_name = "benchmark"

    data_path: list[str] | None = dataclasses.field(default=None, metadata={"help": "real text to make the file of"})
    gigabytes: float = flag(2.0, "size of the file")
    tokenizer_path: str = flag(str(DEFAULT_TOKENIZER), "tokenizer folder")


def write_file(paths: list[str], path: Path, size: int) -> None:
    """Rows of real text in random order, a tenth of their words replaced by other words and numbers."""
    draw = random.Random(0)
    pool = [text_from_row(row.value) for row in RowReader(paths, text_as="paragraph", say=None)]
    words = sorted({word for text in pool for word in text.split() if word.isalpha()})
    written = 0
    with open(path, "w", encoding="utf-8") as file:
        while written < size:
            text = draw.choice(pool).split(" ")
            for _ in range(1 + int(len(text) * CHANGED_SHARE)):
                other = draw.choice(words) if draw.random() < 0.5 else str(draw.randrange(10**6))
                text[draw.randrange(len(text))] = other
            line = json.dumps({"text": " ".join(text)}, ensure_ascii=False) + "\n"
            file.write(line)
            written += len(line.encode())


def raw_speed(path: Path, tokenizer, start: int) -> float:
    """Tokens a second of the library's batch encoding, of 100 MB of the file from `start` on."""
    encoder = plain_encoder(tokenizer)
    with open(path, "rb") as file:
        file.seek(start)
        file.readline()
        texts = [json.loads(line)["text"] for line in file.readlines(RAW_BYTES)]
    tokens, started = 0, time.perf_counter()
    for first in range(0, len(texts), BATCH_TEXTS):
        batch = encoder.encode_batch_fast(texts[first : first + BATCH_TEXTS], add_special_tokens=False)
        tokens += sum(len(encoding) for encoding in batch)
    return tokens / (time.perf_counter() - started)


def run_watched(command: list[str], folder: Path) -> tuple[str, float, dict[str, float]]:
    """Output of a command, seconds until it first says "step 1/" (or until its end), and its peak memory in GB.

    "resident" adds the resident memory of all its processes, in which what they share counts several times;
    "proportional" counts it once.
    """
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    peak = {"resident": 0.0, "proportional": 0.0}

    def watch() -> None:
        while process.poll() is None:
            for name, used in memory_of(process.pid).items():
                peak[name] = max(peak[name], used)
            time.sleep(0.5)

    watcher = threading.Thread(target=watch)
    watcher.start()
    lines, seconds = [], None
    for line in process.stdout:
        print("  " + line, end="", flush=True)
        lines.append(line)
        if seconds is None and line.startswith("step 1/"):
            seconds = time.perf_counter() - started
    watcher.join()
    if process.wait():
        raise ValueError(f"{' '.join(command[:2])} failed with code {process.returncode}")
    return "".join(lines), seconds or time.perf_counter() - started, peak


def memory_of(process: int) -> dict[str, float]:
    """Memory of a process and its children, in GB."""
    total = {"resident": 0.0, "proportional": 0.0}
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        for number in (str(process), *children):
            for line in Path(f"/proc/{number}/smaps_rollup").read_text().splitlines():
                name, _, value = line.partition(":")
                if name in ("Rss", "Pss"):
                    total["resident" if name == "Rss" else "proportional"] += int(value.split()[0]) * 1024 / 1e9
    except OSError:
        pass  # it has just ended
    return total


def main() -> None:
    (options,) = parse_arguments(BenchmarkArguments, description=__doc__)
    if not options.data_path:
        raise ValueError("--data_path: give real text to make the file of")
    if options.gigabytes < 0.3:
        raise ValueError(f"--gigabytes {options.gigabytes} is too little to measure; use at least 0.3")
    tokenizer = load_tokenizer(options.tokenizer_path)
    with tempfile.TemporaryDirectory(dir=ROOT / "data") as name:
        folder = Path(name)
        path, cache = folder / "large.jsonl", folder / "cache"
        write_file(options.data_path, path, int(options.gigabytes * 1e9))
        size = os.path.getsize(path)
        raw = [raw_speed(path, tokenizer, 0)]
        work = [sys.executable, "-c", WORK, str(ROOT), str(path), str(cache), options.tokenizer_path]
        printed, _, peak = run_watched(work, folder)
        raw.append(raw_speed(path, tokenizer, size - 2 * RAW_BYTES))
        tokens, rows, fill_rate, seconds = printed.splitlines()[-1].split()
        stage = [sys.executable, str(ROOT / "trainer/train_pretrain.py"), "--data_path", str(path), "--max_steps", "1"]
        stage += ["--max_seq_len", "512", "--log_interval", "1", "--tokenizer_path", options.tokenizer_path]
        stage += ["--cache_dir", str(cache), "--save_dir", str(folder), "--checkpoint_dir", str(folder)]
        starts = [run_watched(stage, folder)[1] for _ in range(3)]
    ours, library = int(tokens) / float(seconds), sum(raw) / 2
    result = {
        "gigabytes": round(size / 1e9, 2),
        "tokens": int(tokens),
        "rows": int(rows),
        "fill_rate": float(fill_rate),
        "seconds": round(float(seconds), 1),
        "tokens_per_second": round(ours),
        "library_tokens_per_second": round(library),
        "library_before_and_after": [round(speed) for speed in raw],
        "share_of_library": round(ours / library, 3),
        "peak_resident_gigabytes": round(peak["resident"], 2),
        "peak_proportional_gigabytes": round(peak["proportional"], 2),
        "second_start_seconds": [round(seconds, 1) for seconds in starts],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    with user_errors():
        main()
