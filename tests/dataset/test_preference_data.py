"""Preference pairs, prompts for reinforcement, and what happens to reasoning."""

from collections import Counter

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
ASKED = [{"role": "user", "content": "Why?"}]


QUESTION = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
FREE, ON, OFF = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)
MODES = ((FREE, None), (ON, True), (OFF, False))


def test_reasoning_is_kept_dropped_or_shown_as_asked_for(tokenizer, tmp_path):
    thinking, plain = write(tmp_path / "a.jsonl", [THINKING]), write(tmp_path / "p.jsonl", [chat("Why?", "So.")])

    def row(path, **rules):
        ids, labels = pieces_of(SFTDataset(path, tokenizer, 96, say=None, **rules)[0])[0]
        return tokenizer.decode(ids), tokenizer.decode([label for label in labels if label != IGNORED_LABEL])

    thought = "<think>\nThink first.\n</think>\n\nSo.<|im_end|>"
    opening = {
        mix: tokenizer.decode(render_prompt(ASKED, tokenizer, open_thinking=thinking)) for mix, thinking in MODES
    }
    assert row(thinking) == row(thinking, thinking_mix=FREE) == (QUESTION + thought + "\n", thought)
    assert row(thinking, reasoning="drop") == row(plain) == (QUESTION + "So.<|im_end|>\n", "So.<|im_end|>")
    assert row(thinking, thinking_mix=ON) == (QUESTION + thought + "\n", thought.removeprefix("<think>\n"))
    empty = "<think>\n\n</think>\n\nSo.<|im_end|>"
    assert row(plain, thinking_mix=ON) == (QUESTION + empty + "\n", "\n</think>\n\nSo.<|im_end|>")
    assert row(thinking, thinking_mix=OFF) == row(plain, thinking_mix=OFF) == (QUESTION + empty + "\n", "So.<|im_end|>")
    for path in (thinking, plain):
        for mix, _ in MODES:
            shown, trained = row(path, thinking_mix=mix)
            assert shown == opening[mix] + trained + "\n", "a chat in that mode asks with just what is not trained"


def test_sides_of_a_pair_think_alike_and_shares_are_kept(tokenizer, tmp_path):
    rows = [pair(f"{number}?", "Yes.", "No.") for number in range(2000)]
    data = DPODataset(write(tmp_path / "b.jsonl", rows), tokenizer, 128, thinking_mix=(0.5, 0.2, 0.3), say=None)
    shown = {}
    for index in range(len(data)):
        for ids, labels in pieces_of(data[index]):
            text = tokenizer.decode(ids)
            trained = tokenizer.decode([label for label in labels if label != IGNORED_LABEL])
            mode = "on" if "</think>" in trained else "off" if "</think>" in text else "free"
            shown.setdefault(text.partition("?")[0], set()).add(mode)
    assert len(shown) == 2000 and all(len(modes) == 1 for modes in shown.values())
    counts = Counter(mode for modes in shown.values() for mode in modes)
    for mode, share in (("free", 0.5), ("on", 0.2), ("off", 0.3)):  # a standard deviation is 0.011
        assert abs(counts[mode] / 2000 - share) < 0.04


@pytest.mark.parametrize("mix", [(0.5, 0.5), (0.5, 0.6, -0.1), (0.5, 0.2, 0.2)])
def test_a_mix_that_is_none_is_refused(tokenizer, tmp_path, mix):
    with pytest.raises(ValueError, match="must be three shares, none negative, that sum to 1"):
        SFTDataset(write(tmp_path / "a.jsonl", [THINKING]), tokenizer, 96, thinking_mix=mix, say=None)


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
