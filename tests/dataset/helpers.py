"""What the tests of data sets share: rows on disk, and a packed row taken apart."""

import json

from dataset.lm_dataset import IGNORED_LABEL


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat(question, answer, **extra):
    return {"conversations": [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **extra}]}


def pieces_of(row):
    """(tokens, labels) of each piece of a row; checks what holds for every row."""
    tokens, labels, documents = (row[name].tolist() for name in ("input_ids", "labels", "document_ids"))
    used = sum(document > 0 for document in documents)
    assert all(documents[:used]) and not any(documents[used:])
    assert all(label == IGNORED_LABEL for label in labels[used:])
    assert all(label in (IGNORED_LABEL, token) for token, label in zip(tokens, labels, strict=True))
    result = []
    for number in range(1, max(documents, default=0) + 1):
        first = documents.index(number)
        last = first + documents.count(number)
        assert documents[first:last] == [number] * (last - first)
        assert labels[first] == IGNORED_LABEL
        assert last - first >= 2
        result.append((tokens[first:last], labels[first:last]))
    return result
