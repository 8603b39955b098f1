"""Preference pairs, prompts for reinforcement, and what happens to reasoning."""

import pytest

from dataset.chat import render_messages, render_prompt
from dataset.lm_dataset import IGNORED_LABEL, DPODataset, MixtureDataset, PretrainDataset, PromptDataset, SFTDataset
from tests.dataset.helpers import chat, pieces_of, write


def pair(prompt, chosen, rejected):
    question = {"role": "user", "content": prompt}
    return {
        name: [question, {"role": "assistant", "content": answer}]
        for name, answer in (("chosen", chosen), ("rejected", rejected))
    }


def test_preference_pairs_lie_side_by_side(tokenizer, tmp_path):
    rows = [pair(f"question {number}", "good " * (number % 7 + 1), "bad " * (number % 3)) for number in range(40)]
    data = DPODataset(write(tmp_path / "a.jsonl", rows), tokenizer, 96, say=None)
    found = []
    for index in range(len(data)):
        pieces = pieces_of(data[index])
        assert len(pieces) % 2 == 0
        found += [(pieces[number], pieces[number + 1]) for number in range(0, len(pieces), 2)]
    expected = []
    for row in rows:
        sides = [render_messages(row[name], tokenizer) for name in ("chosen", "rejected")]
        expected.append(tuple(
            (side.input_ids, [token if trained else IGNORED_LABEL for token, trained in
                              zip(side.input_ids, side.assistant_mask, strict=True)]) for side in sides
        ))  # fmt: skip
    assert sorted(found) == sorted(expected)
    labels = sum(label != IGNORED_LABEL for sides in expected for _, side in sides for label in side)
    assert data.summary.supervised_tokens == labels and data.summary.conversations == 40
    assert data.summary.fill_rate > 0.75
    with pytest.raises(ValueError, match="always packed"):
        DPODataset(tmp_path / "a.jsonl", tokenizer, 96, packing=False, say=None)


def test_all_forms_of_pairs(tokenizer, tmp_path):
    whole = pair("Hi?", "Yes.", "No.")
    answers = {"prompt": "Hi?", "chosen": "Yes.", "rejected": "No."}
    lists = {
        "prompt": [{"role": "user", "content": "Hi?"}],
        "chosen": [{"role": "assistant", "content": "Yes."}],
        "rejected": [{"role": "assistant", "content": "No."}],
    }
    first = None
    for row in (whole, answers, lists, whole | {"prompt": "Hi?"}):
        data = DPODataset(write(tmp_path / "a.jsonl", [row]), tokenizer, 64, say=None)
        first = first or pieces_of(data[0])
        assert pieces_of(data[0]) == first
    system = DPODataset(write(tmp_path / "a.jsonl", [answers | {"system": "S"}]), tokenizer, 64, say=None)
    assert "system\nS" in tokenizer.decode(pieces_of(system[0])[1][0])


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"chosen": "a", "rejected": "b"}, "'chosen' is an answer alone, so a 'prompt' must stand beside it"),
        ({"chosen": [], "rejected": "b", "prompt": "x"}, "'chosen' is an empty list, not a list of messages"),
        ({"chosen": "a", "rejected": 3, "prompt": "x"}, "'rejected' is a number, not a list of messages"),
        ({"chosen": "a", "rejected": "a", "prompt": "x"}, "'chosen' and 'rejected' are the same"),
        ({"chosen": [{"role": "user", "content": "a"}], "rejected": "b", "prompt": "x"}, "'chosen' ends with the user"),
        ({"chosen": [{"role": "x"}], "rejected": "b", "prompt": "x"}, "'chosen': message 1: role 'x'"),
        ({"text": "a"}, "its keys make it a text row; here pairs are expected"),
    ],
)
def test_bad_pairs(tokenizer, tmp_path, row, reason):
    with pytest.raises(ValueError, match=f"a.jsonl:1: {reason}"):
        DPODataset(write(tmp_path / "a.jsonl", [row]), tokenizer, 64, say=None)


def test_pairs_are_not_for_other_stages(tokenizer, tmp_path):
    for kind, expected in (
        (SFTDataset, "conversations"),
        (PretrainDataset, "documents"),
        (MixtureDataset, "documents or"),
    ):
        with pytest.raises(ValueError, match=f"a pair row; here {expected}"):
            kind(write(tmp_path / "a.jsonl", [pair("a", "b", "c")]), tokenizer, 64, say=None)


def test_long_pairs_lose_the_same_turns_on_both_sides(tokenizer, tmp_path):
    history = [message for number in range(6) for message in chat(f"question {number}", "yes")["conversations"]]
    row = pair("last?", "a good answer", "bad")
    long = {name: [{"role": "system", "content": "S"}, *history, *messages] for name, messages in row.items()}
    short = {name: [{"role": "system", "content": "S"}, *history[-2:], *messages] for name, messages in row.items()}
    size = sum(len(render_messages(messages, tokenizer).input_ids) for messages in short.values())
    trimmed, expected = (
        DPODataset(write(tmp_path / f"{name}.jsonl", [rows]), tokenizer, size, say=None)
        for name, rows in (("long", long), ("short", short))
    )
    assert trimmed.summary.shortened == 1 and pieces_of(trimmed[0]) == pieces_of(expected[0])
    with pytest.raises(ValueError, match="1 longer than the window: the two answers do not fit with their prompt"):
        DPODataset(tmp_path / "long.jsonl", tokenizer, 24, say=None)


THINKING = chat("Why?", "So.", reasoning_content="Think first.")


def test_reasoning_is_kept_dropped_or_emptied(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [THINKING])

    def row(kind, reasoning, path=path):
        data = kind(path, tokenizer, 96, reasoning=reasoning, say=None)
        ids, labels = pieces_of(data[0])[0]
        return tokenizer.decode(ids), tokenizer.decode([label for label in labels if label != IGNORED_LABEL])

    question = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    thought = "<think>\nThink first.\n</think>\n\nSo.<|im_end|>"
    assert row(SFTDataset, "keep") == (question + thought + "\n", thought)
    assert row(SFTDataset, "drop") == (question + "So.<|im_end|>\n", "So.<|im_end|>")
    assert row(SFTDataset, "empty") == (question + "<think>\n\n</think>\n\nSo.<|im_end|>\n", "So.<|im_end|>")
    prompt = render_prompt([{"role": "user", "content": "Why?"}], tokenizer, open_thinking=False)
    assert row(SFTDataset, "empty")[0].startswith(tokenizer.decode(prompt)), (
        "what a chat without thinking is asked with"
    )
    rejected = chat("Why?", "No.", reasoning_content="Other thoughts.")
    both = {"chosen": THINKING["conversations"], "rejected": rejected["conversations"]}
    pairs = write(tmp_path / "b.jsonl", [both])
    for reasoning, blocks in (("keep", 2), ("drop", 0), ("empty", 2)):
        data = DPODataset(pairs, tokenizer, 128, reasoning=reasoning, say=None)
        sides = [tokenizer.decode(ids) for ids, _ in pieces_of(data[0])]
        assert sum(side.count("<think>") for side in sides) == blocks, "alike on both sides"
        assert any("thoughts" in side for side in sides) == (reasoning == "keep")


def test_prompts_end_where_the_answer_begins(tokenizer, tmp_path):
    tools = [{"type": "function", "function": {"name": "calculate"}}]
    rows = [
        THINKING | {"gt": ["So"], "difficulty": 3},
        {"messages": [{"role": "user", "content": "2+2?"}], "tools": tools},
        {"question": "x", "answer": "y"},
        {"messages": [{"role": "user", "content": "long " * 99}]},
    ]
    path = write(tmp_path / "a.jsonl", rows)
    data = PromptDataset(path, tokenizer, 64, say=None)
    assert len(data) == 3 and data.summary.skipped == {"prompt longer than the window": 1}
    first = data[0]
    assert first["input_ids"].tolist() == render_prompt([{"role": "user", "content": "Why?"}], tokenizer)
    assert (first["labels"] == IGNORED_LABEL).all() and first["labels"].shape == first["input_ids"].shape
    assert first["reference"]["content"] == "So." and first["extra"] == {"gt": ["So"], "difficulty": 3}
    whole = render_messages(THINKING["conversations"], tokenizer).input_ids
    assert whole[: len(first["input_ids"])] == first["input_ids"].tolist()
    assert data[1]["reference"] is None and data[1]["tools"] == tools
    assert data[2]["messages"] == [{"role": "user", "content": "x"}] and data[2]["extra"] == {"answer": "y"}
    thinking = PromptDataset(path, tokenizer, 64, open_thinking=True, say=None)
    assert tokenizer.decode(thinking[0]["input_ids"]).endswith("<think>\n")
    assert data.summary.fingerprint != thinking.summary.fingerprint
    with pytest.raises(ValueError, match="a.jsonl: no usable prompt; 3 prompt longer than the window|no usable prompt"):
        PromptDataset(path, tokenizer, 4, say=None)
    with pytest.raises(ValueError, match="a.jsonl:1: .*no message before the answer"):
        PromptDataset(write(tmp_path / "a.jsonl", [{"messages": [{"role": "assistant", "content": "x"}]}]), tokenizer)
