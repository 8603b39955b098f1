"""A thousand broken files: each is read as far as it can be, or refused in one message that names it."""

import csv
import gzip
import io
import json
import random
import traceback
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from dataset.lm_dataset import DPODataset, MixtureDataset, PretrainDataset, PromptDataset, SFTDataset
from dataset.stream import StreamDataset
from dataset.units import UnitOptions
from tests.conftest import ROOT

FILES, BATCHES = 1000, 10
USER, ASSISTANT = {"role": "user", "content": "Hi <think>"}, {"role": "assistant", "content": "Ho.", "tool_calls": "[]"}
ROWS = [
    {"text": "A document. 文档。"},
    {"conversations": [USER, ASSISTANT]},
    {"messages": [USER, ASSISTANT], "tools": [{"type": "function", "function": {"name": "f"}}]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
    {"instruction": "Do", "input": "it", "output": "Done"},
    {"prompt": "Say", "completion": "so"},
    {"question": "2+2?", "answer": "4"},
    {"chosen": [USER, ASSISTANT], "rejected": [USER, {"role": "assistant", "content": "No"}]},
]
VALUES = [
    None,
    True,
    -1,
    1e308,
    "",
    " ",
    "\0",
    "\ud800",
    "<|im_end|>",
    [],
    [[]],
    {},
    {"role": 3},
    ["x", 1],
    "[{",
    "9" * 5000,
]
BYTES = [
    b"\xff\xfe",
    b"\x00",
    b"\n\n",
    b"\r",
    b'"',
    b"{",
    b"}]",
    b"\\",
    b"\xef\xbb\xbf",
    b",,",
    b"\xe4\xbd",
    b"[" * 2000,
]
KINDS = {
    "text": PretrainDataset,
    "chat": SFTDataset,
    "mixed": MixtureDataset,
    "pairs": DPODataset,
    "prompts": PromptDataset,
}
ROWS_OF = {"text": ROWS[:1], "chat": ROWS[1:7], "mixed": ROWS[:7], "pairs": ROWS[7:], "prompts": ROWS[1:7]}


def break_value(value, draw):
    """The value with something in it replaced, removed, or renamed."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        choice = draw.random()
        if choice < 0.2:
            return {name: part for name, part in value.items() if name != key}
        if choice < 0.3:
            return {draw.choice(["", "x", "role", "text", "\0"]) if name == key else name: part
                    for name, part in value.items()}  # fmt: skip
        return value | {key: break_value(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.7:
        index = draw.randrange(len(value))
        return [*value[:index], break_value(value[index], draw), *value[index + 1 :]]
    return draw.choice(VALUES)


def break_bytes(content: bytes, draw) -> bytes:
    """Bytes cut off, flipped, put in, or taken out."""
    for _ in range(draw.randrange(3)):
        position = draw.randrange(len(content) + 1)
        choice = draw.random()
        if choice < 0.25:
            content = content[:position]
        elif choice < 0.5:
            content = content[:position] + bytes([draw.randrange(256)]) + content[position + 1 :]
        elif choice < 0.8:
            content = content[:position] + draw.choice(BYTES) + content[position:]
        else:
            content = content[:position] + content[position + draw.randrange(60) :]
    return content


def write_broken(folder: Path, number: int) -> tuple[Path, str, random.Random]:
    """File number so and so of the thousand, and what it is of."""
    draw = random.Random(number)
    what = draw.choice(list(KINDS))
    rows = [dict(draw.choice(ROWS_OF[what])) for _ in range(draw.choice([1, 3, 30, 80]))]
    for _ in range(draw.randrange(4)):
        index = draw.randrange(len(rows))
        rows[index] = break_value(rows[index], draw)
    suffix = draw.choice(
        [".jsonl"] * 10 + [".jsonl.gz", ".jsonl.zst", ".txt", ".txt.gz", ".json", ".csv", ".parquet", ".bin"]
    )
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    if suffix == ".json":
        lines = json.dumps(rows).encode()
    elif suffix == ".csv":
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerows([["question", "answer"], *[["2+2?", str(index)] for index in range(len(rows))]])
        lines = text.getvalue().encode()
    elif suffix == ".parquet":
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table({"text": [f"row {index}" for index in range(len(rows))]}), buffer)
        lines = buffer.getvalue()
    elif suffix == ".bin":
        lines = bytes(draw.randrange(256) if draw.random() < 0.5 else 0 for _ in range(draw.randrange(400)))
    # What is compressed is broken before, after, or both.
    content = break_bytes(lines, draw)
    if suffix.endswith(".gz"):
        content = break_bytes(gzip.compress(content), draw)
    elif suffix.endswith(".zst"):
        content = break_bytes(pyarrow.compress(content, "zstd", asbytes=True), draw)
    path = folder / f"{number}{suffix}"
    path.write_bytes(content)
    return path, what, draw


def unreadable_lines(path: Path) -> list[int]:
    """Lines of a jsonl file that are no JSON object, by the standard library alone."""
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if not line.strip():
            continue
        try:
            good = isinstance(json.loads(line.decode()), dict)
        except (ValueError, RecursionError):
            good = False
        if not good:
            found.append(number)
    return found


def open_data(path: Path, what: str, draw, tokenizer):
    window = draw.choice([16, 64, 512])
    kind = KINDS[what if draw.random() < 0.9 else draw.choice(list(KINDS))]
    if kind is PromptDataset:
        return PromptDataset(path, tokenizer, window, say=None), None
    if draw.random() < 0.1 and kind is not DPODataset and path.suffix != ".bin":
        stream = StreamDataset(kind, path, tokenizer, UnitOptions(kind.kinds, window), say=None)
        return stream.preview, None
    part = draw.choice(["all", "train", "validation"])
    data = kind(path, tokenizer, window, part=part, say=None, text_as=draw.choice(["file", "paragraph"]))
    return data, [bad.line for source in data.units.sources for bad in source.bad_rows.first]


@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_thousand_broken_files(tokenizer, tmp_path, batch):
    refused = read = 0
    for number in range(batch, FILES, BATCHES):
        path, what, draw = write_broken(tmp_path, number)
        lines = unreadable_lines(path) if path.suffix == ".jsonl" else []
        try:
            data, bad_lines = open_data(path, what, draw, tokenizer)
            for index in range(min(len(data), 3)):
                assert data[index]["input_ids"].dtype.is_floating_point is False
            read += 1
            assert bad_lines is None or set(lines) <= set(bad_lines), (number, lines, bad_lines)
        except Exception as error:
            refused += 1
            innermost = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
            assert isinstance(error, ValueError), f"file {number}, {path.name}: {error!r}\n" + "".join(
                traceback.format_tb(error.__traceback__)[-3:]
            )
            ours = innermost.is_relative_to(ROOT / "dataset")
            assert ours, f"file {number}: {type(error).__name__} out of {innermost}: {error}"
            assert str(path) in str(error), f"file {number} is not named: {error}"
            if lines and "rows cannot be used" in str(error):
                named = [line for line in str(error).splitlines() if f"{path}:" in line]
                assert named, f"file {number}: no line is named: {error}"
                first = int(named[0].split(f"{path}:")[1].split(":")[0])
                assert first <= lines[0], f"file {number}: line {lines[0]} is broken, {first} is named"
    assert refused > 10 and read > 10, (refused, read)
