"""Tokenising once: the cache and what makes it stale, worker processes, broken disks, ranks; nanoGPT's files."""

import gzip
import json
import os
import pickle
import signal
import time
import unicodedata

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataset import store, tokenise, units, workers
from dataset.chat import plain_encoder
from dataset.lm_dataset import PretrainDataset, SFTDataset
from dataset.readers import Row
from dataset.store import FlatArray, all_trained, load_cached
from dataset.tokenise import tokenise as tokenise_source
from dataset.units import UnitMaker, UnitOptions, stretches_of
from tests.conftest import ROOT
from tests.trainer.helpers import run_ranks
from trainer.distributed import main_first

DOCUMENTS = UnitOptions("document", 64)
CHATS = UnitOptions("conversation", 64)


def write(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def texts(count, word="row"):
    return [{"text": f"{word} {number} " + "字 and more " * (number % 5)} for number in range(count)]


def chats(count):
    return [{"question": f"What is {number}?", "answer": f"It is {number}."} for number in range(count)]


def same(first, second):
    assert (first.tokens == second.tokens).all() and (first.trained == second.trained).all()
    assert first.table.keys() == second.table.keys()
    for name, column in first.table.items():
        assert (column == second.table[name]).all(), name
    assert first.fingerprint == second.fingerprint and first.skipped == second.skipped
    return True


@pytest.mark.parametrize("options, rows", [(DOCUMENTS, texts(200)), (CHATS, chats(200))])
def test_the_cache_gives_what_was_tokenised(tokenizer, tmp_path, monkeypatch, options, rows):
    path, cache = write(tmp_path / "a.jsonl", [*rows, {"x": 1}]), tmp_path / "cache"
    said = []
    memory = tokenise_source(path, tokenizer, options, say=None)
    first = tokenise_source(path, tokenizer, options, cache_dir=cache, say=said.append)
    monkeypatch.setattr(units.UnitMaker, "make", None)  # whoever tokenises again fails
    second = tokenise_source(path, tokenizer, options, cache_dir=cache, say=said.append)
    assert same(memory, first) and same(first, second)
    assert isinstance(second.tokens, np.memmap) and second.tokens.dtype == np.uint16
    assert len(said) == 2 and said[0] == said[1] and f"{path}:201" in said[1], "bad rows are named each time"
    with pytest.raises(ValueError, match="a.jsonl:201"):
        tokenise_source(path, tokenizer, options, cache_dir=cache, strict=True, say=None)
    assert [entry.name for entry in cache.iterdir() if entry.name.startswith(".")] == []


def test_what_makes_another_source(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", chats(30))
    other = tokenizer.__class__.from_pretrained(ROOT / "model" / "tokenizer")
    other.chat_template = other.chat_template.replace("'Tools:'", "'The tools:'")

    def key(file=path, tokenizer=tokenizer, options=CHATS, split=False, text_as="file"):
        return store.cache_key([file], tokenizer, options, split, text_as)

    first = key()
    assert first == key() and len(first) == 32
    keys = {
        first,
        key(split=True),
        key(text_as="paragraph"),
        key(tokenizer=other),
        key(options=UnitOptions("conversation", 65)),
        key(options=UnitOptions("conversation", 64, train_on="last")),
        key(options=UnitOptions("conversation", 64, reasoning="drop")),
        key(options=UnitOptions("conversation", 64, thinking_mix=(0.5, 0.0, 0.5))),
        key(options=UnitOptions("both", 64)),
        key(file=write(tmp_path / "b.jsonl", chats(30))),
    }
    write(tmp_path / "a.jsonl", chats(31))
    keys.add(key())
    content = (tmp_path / "a.jsonl").read_text()
    status = os.stat(path)
    (tmp_path / "a.jsonl").write_text(content.replace("What is 7", "What is 8"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # same size, same time
    keys.add(key())
    assert len(keys) == 12
    assert key(options=DOCUMENTS) == key(options=UnitOptions("document", 128)), "documents know no window"


def test_parts_and_windows_share_what_is_cached(tokenizer, tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", texts(300))
    options = {"cache_dir": tmp_path / "cache", "say": None}
    train = PretrainDataset(path, tokenizer, 32, part="train", **options)
    monkeypatch.setattr(units.UnitMaker, "make", None)
    validation = PretrainDataset(path, tokenizer, 48, part="validation", **options)
    assert train.summary.documents + validation.summary.documents == 300


def test_a_damaged_folder_is_made_again(tokenizer, tmp_path):
    path, cache = write(tmp_path / "a.jsonl", texts(50)), tmp_path / "cache"
    first = tokenise_source(path, tokenizer, DOCUMENTS, cache_dir=cache, say=None)
    expected, (folder,) = np.array(first.tokens), cache.iterdir()
    for name, content in (("tokens.bin", b"\0\0"), ("summary.json", b"{"), ("length.bin", b"")):
        (folder / name).write_bytes(content)
        assert load_cached(path, folder) is None
        again = tokenise_source(path, tokenizer, DOCUMENTS, cache_dir=cache, say=None)
        assert (again.tokens == expected).all() and load_cached(path, folder) is not None


def test_a_full_disk_is_one_clear_error(tokenizer, tmp_path, monkeypatch):
    path, cache = write(tmp_path / "a.jsonl", texts(50)), tmp_path / "cache"

    class Full:
        def write(self, content):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    monkeypatch.setattr(store, "open", lambda *arguments: Full() if "b" in arguments[1] and "w" in arguments[1]
                        else open(*arguments), raising=False)  # fmt: skip
    with pytest.raises(
        ValueError, match=r"cache: .*No space left.* MiB are free; give another folder with --cache_dir"
    ):
        tokenise_source(path, tokenizer, DOCUMENTS, cache_dir=cache, say=None)
    assert list(cache.iterdir()) == [], "nothing half done is left"


def test_a_hub_that_cannot_be_reached(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="hub:nobody/nothing@train cannot be found on the hub: "):
        tokenise_source("hub:nobody/nothing@train", tokenizer, DOCUMENTS, cache_dir=tmp_path, say=None)


def test_a_cache_folder_that_cannot_be_made(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", texts(5))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="could not be written there .*--cache_dir"):
        tokenise_source(path, tokenizer, DOCUMENTS, cache_dir=tmp_path / "file" / "cache", say=None)


def test_leftovers_of_killed_runs_are_removed_and_those_of_others_are_not(tokenizer, tmp_path):
    path, cache = write(tmp_path / "a.jsonl", texts(20)), tmp_path / "cache"
    key = store.cache_key([path], tokenizer, DOCUMENTS, False, "file")
    gone = os.fork()
    if not gone:
        os._exit(0)
    os.waitpid(gone, 0)
    dead, alive = (cache / f".{key}.{store.socket.gethostname()}.{number}" for number in (gone, os.getppid()))
    for folder in (dead, alive):
        folder.mkdir(parents=True)
    tokenise_source(path, tokenizer, DOCUMENTS, cache_dir=cache, say=None)
    assert not dead.exists() and alive.exists() and (cache / key).is_dir()


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("options, rows", [(DOCUMENTS, texts(3000)), (CHATS, chats(3000))])
def test_processes_give_the_same_as_one(tokenizer, tmp_path, monkeypatch, options, rows, suffix):
    monkeypatch.setattr("dataset.readers.BLOCK_BYTES", 4096)
    rows = [*rows[:1000], {"x": 1}, *rows[1000:]]
    plain = write(tmp_path / "a.jsonl", rows)
    path = plain + suffix
    if suffix == ".gz":
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    elif suffix:
        with pyarrow.output_stream(path, compression="zstd") as file:
            file.write((tmp_path / "a.jsonl").read_bytes())
    one = tokenise_source(path, tokenizer, options, split=True, workers=1, say=None)
    two = tokenise_source(path, tokenizer, options, split=True, workers=2, say=None)
    assert same(one, two) and one.bad_rows.first[0].line == two.bad_rows.first[0].line == 1001
    assert one.bad_rows.rows_read == two.bad_rows.rows_read == 3001 and len(one.table["length"]) == 3000
    hashes = np.unique(one.table["row_hash"])
    assert len(hashes) == 3000 and 0.03 < one.table["held_out"].mean() < 0.07


def test_an_error_in_a_worker_or_its_death_is_an_error_here(tokenizer, tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", [*texts(100), {"x": 1}, *texts(100)])
    with pytest.raises(ValueError, match="a.jsonl:101: .*strict"):
        tokenise_source(path, tokenizer, DOCUMENTS, strict=True, workers=2, say=None)
    monkeypatch.setattr(workers, "make_from_block", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(ValueError, match="a process that tokenised was killed"):
        tokenise_source(path, tokenizer, DOCUMENTS, workers=2, say=None)


def test_workers_leave_when_their_parent_is_killed(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "make_from_block", lambda *_: time.sleep(60))
    path = write(tmp_path / "a.jsonl", texts(100))
    parent = os.fork()
    if not parent:
        tokenise_source(path, tokenizer, DOCUMENTS, workers=2, say=None)
        os._exit(0)
    children = _wait_for(lambda: len(_children(parent)) == 2 and _children(parent))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert _wait_for(lambda: not any(os.path.exists(f"/proc/{child}") for child in children))


def _children(parent):
    try:
        with open(f"/proc/{parent}/task/{parent}/children") as file:
            return file.read().split()
    except OSError:
        return []


def _wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if result := condition():
            return result
        time.sleep(0.1)
    return None


def tokenise_on_a_rank(world, tokenizer, path, cache, folder):
    made = []
    original = UnitMaker.make
    UnitMaker.make = lambda self, rows, held_out=None: (made.append(1), original(self, rows, held_out))[1]
    data = main_first(lambda: PretrainDataset(path, tokenizer, 32, cache_dir=cache, say=None))
    (folder / f"{world.rank}.json").write_text(json.dumps([len(made), data.summary.fingerprint]))


def test_two_ranks_tokenise_once(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", texts(100))
    run_ranks(tokenise_on_a_rank, tmp_path, tokenizer, path, tmp_path / "cache", tmp_path)
    (first, mark), (second, other) = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first > 0 and second == 0 and mark == other


def test_two_runs_at_once_both_end_well(tokenizer, tmp_path, monkeypatch):
    path, cache = write(tmp_path / "a.jsonl", texts(50)), tmp_path / "cache"
    faster = tokenise_source(path, tokenizer, DOCUMENTS, cache_dir=cache, say=None)
    monkeypatch.setattr(tokenise, "load_cached", lambda *_: None)  # the other run ended after our look
    slower = tokenise_source(path, tokenizer, DOCUMENTS, cache_dir=cache, say=None)
    assert same(faster, slower)


LINES = st.lists(
    st.sampled_from(["word", " ", "\n", "\n\n", "\r\n", ".", "é", "\u0301", "字", "  x", "\t", "9"]), max_size=40
)


@given(st.lists(LINES.map("".join), max_size=6))
def test_long_texts_are_cut_where_it_makes_no_difference(tokenizer, paragraphs):
    text = "\n".join(paragraphs)
    encode = plain_encoder(tokenizer).encode
    before, units.STRETCH_CHARACTERS = units.STRETCH_CHARACTERS, 8
    try:
        stretches = stretches_of(text)
    finally:
        units.STRETCH_CHARACTERS = before
    assert "".join(stretches) == text
    assert [token for stretch in stretches for token in encode(stretch).ids] == encode(text).ids


ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(st.lists(st.one_of(ANY_TEXT, LINES.map("".join)), min_size=1, max_size=4))
def test_documents_are_encoded_as_the_tokenizer_does(tokenizer, found):
    rows = [Row({"text": text}, "a", line) for line, text in enumerate(found, start=1)]
    batch = UnitMaker(tokenizer, DOCUMENTS).make(rows)
    encode = plain_encoder(tokenizer).encode
    expected = [[0, *encode(text).ids, 0] for text in found if text.strip()]
    assert [batch.tokens[unit["start"] :][: unit["length"]].tolist() for unit in batch.table] == expected
    assert batch.table["bytes"].tolist() == [
        len(unicodedata.normalize("NFC", text).encode()) for text in found if text.strip()
    ]


def test_flat_arrays_read_across_parts_and_travel_by_name(tmp_path):
    np.arange(5, dtype=np.uint16).tofile(tmp_path / "a.bin")
    mapped = np.memmap(tmp_path / "a.bin", np.uint16, "r")
    flat = FlatArray([mapped, np.empty(0, np.uint16), np.arange(10, 14, dtype=np.uint16)])
    assert len(flat) == 9 and flat[1:4].tolist() == [1, 2, 3] and flat[5:9].tolist() == [10, 11, 12, 13]
    packed = pickle.dumps(flat)
    assert len(packed) < 1000
    again = pickle.loads(packed)
    assert isinstance(again.parts[0], np.memmap) and again[3:5].tolist() == [3, 4]
    assert all_trained(10**12).nbytes == 10**12 and all_trained(10**12)[5:8].all(), "no memory behind it"


def test_progress_is_told_with_rate_and_time_left(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenise, "QUIET_SECONDS", -1)
    monkeypatch.setattr("dataset.readers.BLOCK_BYTES", 1024)
    said = []
    tokenise_source(write(tmp_path / "a.jsonl", texts(200)), tokenizer, DOCUMENTS, say=said.append)
    assert len(said) > 3
    assert all(part in said[2] for part in ("a.jsonl: ", " rows, ", " tokens, ", "tokens/s, ", "%, ", " s left"))


def write_bin(path, tokens):
    np.array(tokens, dtype=np.uint16).tofile(path)
    return str(path)


def pieces(data):
    found = []
    for index in range(len(data)):
        row = data[index]
        for number in range(1, int(row["document_ids"].max()) + 1):
            found.append(row["input_ids"][row["document_ids"] == number].tolist())
    return found


def test_nanogpts_files_are_read_in_place(tokenizer, tmp_path):
    documents = [[40, 41, 42], [50, 51], list(range(60, 90))]
    tokens = [token for document in documents for token in [*document, 0]]
    path = write_bin(tmp_path / "train.bin", tokens)
    data = PretrainDataset(path, tokenizer, 100, cache_dir=tmp_path / "cache", say=None)
    assert pieces(data) == [[40, 41, 42, 0], [0, 50, 51, 0], [0, *documents[2], 0]]
    assert data.summary.documents == 3 and data.summary.supervised_tokens == len(tokens) - 1
    decoded = tokenizer.decode(tokens, skip_special_tokens=True)
    assert data.summary.bytes <= len(decoded.encode()) + 4 * len(tokens)
    assert data.tokens.parts[0].filename == path, "mapped, not copied"
    assert PretrainDataset(path, tokenizer, 100, cache_dir=tmp_path / "cache", say=None)[0]["input_ids"].equal(
        data[0]["input_ids"]
    )


@given(st.lists(st.lists(st.integers(36, 99), max_size=30), min_size=1, max_size=30), st.booleans(), st.booleans())
def test_every_token_of_a_token_file_is_a_target_once(tokenizer, tmp_path_factory, documents, first, last):
    tokens = [0] * first + [token for document in documents for token in [*document, 0]]
    tokens = tokens if last else tokens[:-1]
    path = write_bin(tmp_path_factory.mktemp("bin") / "a.bin", tokens)
    if len(tokens) < 2 or not any(tokens):
        with pytest.raises(ValueError, match="16-bit tokens|nothing but separators"):
            PretrainDataset(path, tokenizer, 16, say=None)
        return
    try:
        data = PretrainDataset(path, tokenizer, 16, say=None)
    except ValueError as error:
        assert "nothing but separators" in str(error) and len(tokens) == 2
        return
    targets = [label for index in range(len(data)) for label in data[index]["labels"].tolist() if label >= 0]
    # All but the first token of all, and separators behind separators, which end no document.
    expected = [token for before, token in zip(tokens, tokens[1:], strict=False) if before or token]
    assert targets == expected
    train, validation = (PretrainDataset(path, tokenizer, 16, part=part, say=None) for part in ("train", "validation"))
    parts = train.summary.supervised_tokens + validation.summary.supervised_tokens
    assert parts in (data.summary.supervised_tokens, data.summary.supervised_tokens - 1)
    sizes = [content for content in (train.summary.bytes, validation.summary.bytes) if content]
    assert sum(sizes) >= data.summary.bytes


def test_token_files_that_do_not_fit(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"a.bin: token 1 is 60000, but the tokenizer has 4,657; .*--tokenizer_path"):
        PretrainDataset(write_bin(tmp_path / "a.bin", [40, 60000, 41]), tokenizer, 16, say=None)
    (tmp_path / "b.bin").write_bytes(b"abc")
    with pytest.raises(ValueError, match="b.bin has 3 bytes: not a file of 16-bit tokens"):
        PretrainDataset(tmp_path / "b.bin", tokenizer, 16, say=None)
    with pytest.raises(ValueError, match="a.bin holds tokens of documents; here conversations are expected"):
        SFTDataset(tmp_path / "a.bin", tokenizer, 16, say=None)
    with pytest.raises(ValueError, match="stands for 2 files, .bin among them"):
        PretrainDataset(tmp_path, tokenizer, 16, say=None)


def test_split_token_files_by_document_where_there_are_enough(tokenizer, tmp_path):
    tokens = [token for number in range(300) for token in [40 + number % 50, 90 + number // 50, 60, 0]]
    path = write_bin(tmp_path / "a.bin", tokens)
    train, validation = (PretrainDataset(path, tokenizer, 16, part=part, say=None) for part in ("train", "validation"))
    assert train.summary.documents + validation.summary.documents == 300
    assert 3 <= validation.summary.documents <= 35
