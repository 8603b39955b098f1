"""Streams: every row a function of data and seed alone; killed anywhere and resumed by any ranks, nothing differs."""

import gzip
import itertools
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataset import stream as module
from dataset.chat import plain_encoder
from dataset.lm_dataset import IGNORED_LABEL, MixtureDataset, PretrainDataset, SFTDataset
from dataset.sources import is_held_out, row_hash
from dataset.stream import Cursor, StreamDataset, merge_states
from dataset.units import UnitOptions

WINDOW = 24


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_TOKENS", 400)
    monkeypatch.setattr(module, "LEAST_ROWS", 4)
    monkeypatch.setattr(module, "PREVIEW_TOKENS", 100)
    monkeypatch.setattr(module, "BLOCK_ROWS", 3)


def rows_of(count, word="row"):
    return [{"text": f"{word} {number} " + "and more " * (number % 7)} for number in range(count)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def stream(paths, tokenizer, kind=PretrainDataset, **options):
    return StreamDataset(kind, paths, tokenizer, UnitOptions(kind.kinds, WINDOW), say=None, **options)


def take(data, count, batch_size=1):
    """Rows of one rank: a list of tuples of ids, of micro-batches."""
    batches = list(itertools.islice(data.batches(batch_size), count))
    return [tuple(row.tolist()) for batch in batches for row in batch["input_ids"]]


def run(paths, tokenizer, ranks, steps, batch_size, state=None, **options):
    """Global rows of some steps over several ranks, in order, and the merged state behind them."""
    streams = [stream(paths, tokenizer, **options) for _ in range(ranks)]
    for rank, data in enumerate(streams):
        data.start(rank, ranks, json.loads(json.dumps(state)))
    shares = [take(data, steps, batch_size) for data in streams]
    merged = merge_states([data.state() for data in streams])
    rows = [shares[index % ranks][index // ranks] for index in range(steps * batch_size * ranks)]
    return rows, merged


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(
    files=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    ranks=st.integers(1, 3),
    before=st.integers(0, 30),
    ranks_after=st.integers(1, 3),
    batch_size=st.integers(1, 3),
    mixed=st.booleans(),
)
def test_killed_and_resumed_on_other_ranks(
    tokenizer, tmp_path_factory, files, ranks, before, ranks_after, batch_size, mixed
):
    folder = tmp_path_factory.mktemp("data")
    paths = [write(folder / f"{number}.jsonl", rows_of(count, "abc"[number % 3])) for number, count in enumerate(files)]
    if mixed:
        paths = [f"{path}:{number + 1}" for number, path in enumerate(paths)]
    rows, state = run(paths, tokenizer, ranks, before, batch_size)
    total = ranks * ranks_after * 12
    more, _ = run(paths, tokenizer, ranks_after, total // ranks_after, 1, state)
    straight, _ = run(paths, tokenizer, ranks, before + -(-total // (ranks * batch_size)), batch_size)
    assert (rows + more)[: len(straight)] == straight[: len(rows) + total]


def documents_in(rows, tokenizer):
    """Documents that lie whole in rows, as text."""
    separator = tokenizer.pad_token_id
    found = []
    for row in rows:
        parts = " ".join(map(str, row)).split(f" {separator} {separator} ")
        found += [tokenizer.decode([int(token) for token in part.split() if int(token) != separator]) for part in parts]
    return found


def test_a_pass_gives_every_target_once(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LEAST_ROWS", 0)
    rows = rows_of(300)
    path = write(tmp_path / "a.jsonl", rows)
    encode = plain_encoder(tokenizer).encode
    expected = sorted(token for row in rows for token in [*encode(row["text"]).ids, tokenizer.pad_token_id])
    for ranks in (1, 2, 3):
        labels = []
        for rank in range(ranks):
            data = stream(path, tokenizer)
            data.start(rank, ranks)
            lane = data.lanes[rank]
            chunk, following = lane.rows_of_chunk(10**9)
            assert following.cursors == [Cursor(epoch=1)], "without a limit of tokens, a chunk is a pass"
            labels += [label for index in range(len(chunk)) for label in chunk[index]["labels"].tolist()]
        assert sorted(label for label in labels if label != IGNORED_LABEL) == expected, ranks


def test_lanes_share_the_work(tokenizer, tmp_path):
    """Each rank reads blocks of its own: no document is on two ranks in one pass, be there one file or many."""
    whole = write(tmp_path / "a.jsonl", rows_of(400))
    many = [write(tmp_path / f"{number}.jsonl", rows_of(40, f"file{number}")) for number in range(5)]
    for paths in (whole, many):
        seen = []
        for rank in range(2):
            data = stream(paths, tokenizer)
            data.start(rank, 2)
            chunk, following = data.lanes[rank].rows_of_chunk(10**9 if paths is whole else 800)
            seen.append(
                {
                    document
                    for index in range(len(chunk))
                    for document in documents_in([chunk[index]["input_ids"].tolist()], tokenizer)
                }
            )
        whole_documents = {row["text"] for row in rows_of(400)} | {
            row["text"] for number in range(5) for row in rows_of(40, f"file{number}")
        }
        first, second = (documents & whole_documents for documents in seen)
        assert len(first) > 20 and len(second) > 20 and not first & second


def test_held_out_rows_are_never_trained(tokenizer, tmp_path):
    rows = rows_of(500)
    path = write(tmp_path / "a.jsonl", rows)
    data = stream(path, tokenizer, hold_out=True)
    held_out = [row["text"] for row in rows if is_held_out(row_hash(row))]
    validation = data.validation(PretrainDataset)
    assert validation.summary.documents == len(held_out) > 5
    trained = documents_in(take(data, 900), tokenizer)
    assert not set(trained) & set(held_out) and len(set(trained)) > 100


def test_weights_are_token_shares(tokenizer, tmp_path):
    first, second = (
        write(tmp_path / "a.jsonl", rows_of(100, "letter")),
        write(tmp_path / "b.jsonl", rows_of(30, "字母")),
    )
    for weights, share in (((3, 1), 0.25), ((0.1, 0.9), 0.9)):
        data = stream([f"{first}:{weights[0]}", f"{second}:{weights[1]}"], tokenizer, MixtureDataset)
        take(data, 1500)
        given = data.lanes[0].state.given
        assert given[1] / sum(given) == pytest.approx(share, abs=0.02)


def test_chunks_are_shuffled_and_differ_from_pass_to_pass(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", rows_of(30))
    rows = take(stream(path, tokenizer), 200)
    assert rows == take(stream(path, tokenizer), 200), "the same again"
    assert rows != take(stream(path, tokenizer, seed=1), 200)
    first = rows.index(rows[0])
    again = [index for index, row in enumerate(rows) if row == rows[0]]
    assert len(again) > 2 and rows[first + 1 : first + 4] != rows[again[1] + 1 : again[1] + 4]


def test_every_kind_of_file_streams(tokenizer, tmp_path):
    rows = rows_of(60)
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    with pyarrow.output_stream(str(tmp_path / "a.jsonl.zst"), compression="zstd") as file:
        file.write(lines)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text("\n\n".join(row["text"] for row in rows), encoding="utf-8")
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.txt"):
        straight, _ = run(str(tmp_path / name), tokenizer, 1, 60, 1, text_as="paragraph")
        before, state = run(str(tmp_path / name), tokenizer, 1, 25, 1, text_as="paragraph")
        after, _ = run(str(tmp_path / name), tokenizer, 1, 35, 1, state, text_as="paragraph")
        assert before + after == straight, name
        assert len({document for document in documents_in(straight, tokenizer)}) > 30, name


def test_conversations_stream_too(tokenizer, tmp_path):
    rows = [{"question": f"What is {number}?", "answer": f"It is {number}."} for number in range(50)]
    data = stream(write(tmp_path / "a.jsonl", rows), tokenizer, SFTDataset)
    for batch in itertools.islice(data.batches(4), 20):
        assert (batch["labels"] != IGNORED_LABEL).any(dim=1).all()
        assert set(batch) == {"input_ids", "labels", "document_ids"}


def test_one_row_and_more_ranks_than_rows(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": "The only row there is."}])
    rows, _ = run(path, tokenizer, 3, 4, 2)
    assert len(rows) == 24
    real = [row for row in rows if any(token != tokenizer.pad_token_id for token in row)]
    assert len(real) == 8, "one lane has the row, again and again; the others run masked ones"


def test_bad_rows_are_named_and_too_many_stop_the_stream(tokenizer, tmp_path):
    good = rows_of(300)
    path = write(tmp_path / "a.jsonl", [*good[:40], {"x": 1}, *good[40:]])
    said = []
    data = StreamDataset(PretrainDataset, path, tokenizer, UnitOptions("document", WINDOW), say=said.append)
    take(data, 100)
    assert any(f"{path}:41: no known row format" in line for line in said)
    with pytest.raises(ValueError, match="a.jsonl:41: .*strict"):
        take(stream(path, tokenizer, strict=True), 100)
    bad = write(tmp_path / "b.jsonl", [*good[:200], *[{"x": 1}] * 100])
    with pytest.raises(ValueError, match="rows cannot be used"):
        take(stream(bad, tokenizer), 400)
    with pytest.raises(ValueError, match="b.jsonl: no usable row|rows cannot be used"):
        stream(write(tmp_path / "b.jsonl", [{"x": 1}] * 10), tokenizer)


def test_an_error_of_the_reader_reaches_the_training(tokenizer, tmp_path):
    content = gzip.compress("".join(json.dumps(row) + "\n" for row in rows_of(3000)).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz cannot be read after line \d+"):
        take(stream(str(tmp_path / "a.jsonl.gz"), tokenizer), 3000)


def test_changed_data_changes_the_fingerprint_and_moved_data_does_not(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", rows_of(20))
    before = stream(path, tokenizer).summary.fingerprint
    (tmp_path / "elsewhere").mkdir()
    moved = write(tmp_path / "elsewhere" / "a.jsonl", rows_of(20))
    assert stream(moved, tokenizer).summary.fingerprint == before
    assert stream(write(tmp_path / "a.jsonl", rows_of(21)), tokenizer).summary.fingerprint != before


def test_token_files_are_not_streamed(tokenizer, tmp_path):
    np.arange(40, 90, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(ValueError, match="a.bin holds tokens that are mapped as they are; leave --streaming out"):
        stream(str(tmp_path / "a.bin"), tokenizer)


def test_the_state_is_plain_and_small(tokenizer, tmp_path):
    data = stream(write(tmp_path / "a.jsonl", rows_of(200)), tokenizer)
    take(data, 50)
    state = data.state()
    assert json.loads(json.dumps(state)) == state and len(json.dumps(state)) < 1000
    assert np.isfinite(state["row"]) and state["row"] == 50
