"""Readers: every way a file can be wrong, named by file and line; mixtures; the held-out split."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataset.formats import row_kind, text_from_row
from dataset.readers import Row
from dataset.sources import RowReader, expand_path, is_held_out, parse_sources, row_hash, split_held_out


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path, **options):
    reader = RowReader(path, say=None, **options)
    rows = list(reader)
    reader.check()
    return rows


GOOD = [{"text": f"row {number}"} for number in range(40)]


@pytest.mark.parametrize(
    "line, reason",
    [
        (b'{"text": "a"', "not valid JSON (Expecting ',' delimiter at column 13)"),
        (b"[1, 2]", "not a JSON object but list"),
        (b'{"text": "\xff"}', "not valid UTF-8 (byte 0xff at column 11)"),
        (b"[" * 100_000, "not readable JSON (maximum recursion depth"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not readable JSON (Exceeds the limit"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, reason):
    path = write_jsonl(tmp_path / "rows.jsonl", GOOD)
    content = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*content[:2], b"", line, *content[2:]]) + b"\n")
    reader = RowReader(path, say=None)
    assert [row.value for row in reader] == GOOD
    reader.check()
    assert (reader.bad_rows.rows_read, reader.bad_rows.count) == (41, 1)
    assert str(reader.bad_rows.first[0]).startswith(f"{path}:4: {reason}")
    with pytest.raises(ValueError, match=r"rows.jsonl:4: not .* \(strict: no bad row is accepted\)"):
        read(path, strict=True)


def test_more_than_five_percent_bad_is_an_error_that_lists_them(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n' * 50 + "x\n" * 7)
    with pytest.raises(ValueError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith("7 of 57 rows cannot be used (12.3%); up to 5% would be left out. Mend or remove them:")
    assert f"{path}:51: not valid JSON" in message and message.endswith("and 2 more")


def test_accepted_bad_rows_are_reported(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n' * 50 + "x\n")
    said = []
    reader = RowReader(path, say=said.append)
    list(reader)
    reader.check()
    reason = "not valid JSON (Expecting value at column 1)"
    assert said == [f"1 of 51 rows cannot be used (2.0%) and are left out:\n  {path}:51: {reason}"]


@pytest.mark.parametrize(
    "name, content, problem",
    [
        ("missing.jsonl", None, "missing.jsonl does not exist; give a file"),
        ("empty.jsonl", b"", "empty.jsonl is empty: it has no rows"),
        ("blank.jsonl", b"\n \n", "blank.jsonl is empty"),
        ("blank.txt", b" \n", "blank.txt is empty"),
        ("latin.txt", b"caf\xe9", r"latin.txt:1: not valid UTF-8 \(byte 0xe9, number 3 of the file\)"),
        ("rows.xml", b"<a/>", "rows.xml is of an unknown kind; known are .jsonl"),
        ("folder", "folder", "folder is a folder without a data file"),
        ("no*.jsonl", None, "no data file matches"),
        ("broken.jsonl.gz", b"not gzip", "broken.jsonl.gz cannot be read"),
        ("broken.parquet", b"not parquet", "broken.parquet cannot be read"),
        ("empty.csv", b"", "empty.csv is empty"),
        ("broken.json", b"{", "broken.json cannot be read"),
    ],
)
def test_unreadable_files(tmp_path, name, content, problem):
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=problem):
        read(path)


def test_kinds_of_files(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": "a\u2028b"}, {"text": "你好"}]
    assert [row.value for row in read(write_jsonl(tmp_path / "a.jsonl", rows))] == rows
    with gzip.open(tmp_path / "a.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\ufeff" + "".join(json.dumps(row) + "\r\n" for row in rows))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.csv").write_text("text\na\u2028b\n你好\n", encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.jsonl.gz", "a.json", "a.csv", "a.parquet"):
        assert [row.value for row in read(tmp_path / name)] == rows, name
    assert len(read([tmp_path / "a.jsonl", tmp_path / "a.json"])) == 4
    assert len(read(tmp_path)) == 10
    assert len(read(str(tmp_path / "*.csv"))) == 2


def test_text_files_are_one_document_or_one_a_paragraph(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n\n \nthree\n\n\nfour\n", encoding="utf-8")
    assert read(path) == [Row({"text": "one\ntwo\n\n \nthree\n\n\nfour\n"}, str(path), 1)]
    paragraphs = read(path, text_as="paragraph")
    assert [(row.value["text"].strip(), row.line) for row in paragraphs] == [("one\ntwo", 1), ("three", 5), ("four", 8)]
    with pytest.raises(ValueError, match="text_as='page' must be"):
        read(path, text_as="page")


def test_absent_columns_are_absent_keys(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "a"}, {"question": "b", "answer": "c"}]))
    assert [row_kind(row.value) for row in read(path)] == ["text", "chat"]


def test_sources_with_weights(tmp_path):
    odd = tmp_path / "odd:0.5"
    odd.write_text("x")
    assert parse_sources(str(odd)) == [(str(odd), None)]
    assert parse_sources(["a.jsonl:0.7", "b.txt:3"]) == [("a.jsonl", 0.7), ("b.txt", 3.0)]
    assert parse_sources("hub:owner/name") == [("hub:owner/name", None)]
    with pytest.raises(ValueError, match="b.txt has no weight but others do"):
        parse_sources(["a.jsonl:0.7", "b.txt"])
    for bad in ("a.jsonl:0", "a.jsonl:-1", "a.jsonl:inf", "a.jsonl:nan"):
        with pytest.raises(ValueError, match="must be a number above 0"):
            parse_sources(bad)
    with pytest.raises(ValueError, match="no data"):
        parse_sources([])


def test_hub_names_are_left_to_datasets():
    assert expand_path("hub:owner/name") == ["hub:owner/name"]


@pytest.mark.parametrize(
    "row, problem",
    [
        ({"txt": "a", "id": 1}, "no known row format: its keys are 'txt', 'id'; expected text; conversations"),
        ({}, "its keys are none"),
        ({"text": 3}, "'text' is a number, not a string"),
        ({"text": None}, "'text' is null"),
        ({"text": " \n"}, "the text is empty"),
        ({"text": "\ud800"}, "half a surrogate pair"),
        ({"conversations": "x"}, "'conversations' is a string, not a list of messages"),
        ({"messages": []}, "'messages' is an empty list"),
    ],
)
def test_unusable_rows(row, problem):
    with pytest.raises(ValueError, match=problem):
        text_from_row(row)


def test_words_of_a_conversation_are_a_document():
    assert text_from_row({"question": "2+2?", "answer": "4"}) == "2+2?\n4"


def rows_of(texts):
    return [Row({"text": text}, "file", number) for number, text in enumerate(texts)]


@given(st.lists(st.text("abc", min_size=1), min_size=20, max_size=60), st.randoms())
def test_held_out_rows_stay_where_they_are(texts, random):
    def parts(rows):
        return [[row.value["text"] for row in split_held_out(rows, part)] for part in ("train", "validation")]

    train, validation = parts(rows_of(texts))
    assert sorted(train + validation) == sorted(texts)
    assert not set(train) & set(validation)
    more = texts + ["new row"]
    random.shuffle(more)
    train_after, validation_after = parts(rows_of(more))
    assert set(train) <= set(train_after) and set(validation) <= set(validation_after)


def test_held_out_share():
    share = sum(is_held_out(row_hash({"text": str(number)})) for number in range(10_000)) / 10_000
    assert 0.04 < share < 0.06


@given(st.lists(st.text("ab", min_size=1, max_size=50), min_size=1, max_size=19))
def test_few_documents_give_their_last_characters(texts):
    train = [row.value["text"] for row in split_held_out(rows_of(texts), "train")]
    validation = [row.value["text"] for row in split_held_out(rows_of(texts), "validation")]
    assert "".join(train + validation) == "".join(texts)
    size = sum(map(len, texts))
    assert sum(map(len, train)) == int(size * 0.9)


def test_few_conversations_give_their_last_rows():
    rows = [Row({"question": str(number), "answer": "x"}, "file", number) for number in range(4)]
    assert [row.line for row in split_held_out(rows, "train")] == [0, 1, 2]
    assert [row.line for row in split_held_out(rows, "validation")] == [3]
    assert len(list(split_held_out(rows[:1], "train"))) == 1
    with pytest.raises(ValueError, match="part='test' must be"):
        list(split_held_out(rows, "test"))


PIECES = [
    b'{"text": "a"}', b"\n", b"{", b"}", b'"', b"\xff", b"\x00", b"[", b"null", b"1e999", b"\xef\xbb\xbf", b"\\ud800",
    b'{"text": "\\ud800"}', b'{"conversations": [{"role": "user"}]}', b" ", b":", b",", b"\r\n", b'{"text": 1}',
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=12))
def test_fuzzed_files_give_rows_or_one_plain_error(tmp_path_factory, pieces):
    path = tmp_path_factory.mktemp("fuzz") / "rows.jsonl"
    path.write_bytes(b"".join(pieces))
    reader = RowReader(path, say=None)
    try:
        for row in reader:
            try:
                assert text_from_row(row.value).strip()
            except ValueError as error:
                reader.reject(row, str(error))
        reader.check()
    except ValueError as error:
        assert str(path) in str(error)
