"""Golden conversations: every form that users have, as text with what is supervised marked, and TRL's own mask."""

import itertools
import json
import re

import pytest

from dataset.chat import chat_renderer, plain_encoder, render_messages
from dataset.formats import messages_from_row


def said(text):
    """An assistant turn as the template writes it, in brackets what is supervised."""
    return f"<|im_start|>assistant\n[{text}<|im_end|>]\n"


def turn(role, text):
    """Any other turn."""
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


TOOLS = [{"type": "function", "function": {"name": "calculate"}}]
TOOLS_BLOCK = 'Tools:\n{"name": "calculate"}'
CALL = {"name": "calculate", "arguments": {"expression": "2+2"}}
OPENAI_CALL = {"id": "a", "type": "function", "function": CALL | {"arguments": json.dumps(CALL["arguments"])}}
CALL_BLOCK = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "2+2"}}\n</tool_call>'
RESULTS = '<tool_response>\n4\n</tool_response>\n<tool_response>\n{"note": "é"}\n</tool_response>'
THINKER = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "<think>Greet.</think>\n\nHello."},
    ]
}
MINIMIND = {
    "conversations": [
        {"role": "system", "content": "", "tools": json.dumps(TOOLS)},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "", "tool_calls": json.dumps([CALL])},
        {"role": "tool", "content": "4"},
        {"role": "tool", "content": {"note": "é"}},
        {"role": "assistant", "content": "It is 4.", "reasoning_content": ""},
    ]
}
OPENAI = {
    "messages": [
        {"role": "developer", "content": "S"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [OPENAI_CALL]},
    ],
    "tools": TOOLS,
}
# Reasoning, words, a call and its result, in each of the forms that users have; all mean the same conversation.
ACTED = "<think>\nAdd them.\n</think>\n\nLet me see.\n" + CALL_BLOCK
PARTS = {"reasoning_content": "Add them.", "content": "Let me see."}
RESULT = {"role": "tool", "content": "4"}
ENDED = {"role": "assistant", "content": "<think>Done.</think>\n\nIt is 4."}
ACTING = turn("system", "S\n\n" + TOOLS_BLOCK) + turn("user", "2+2?") + said(ACTED)
ACTING_TWICE = (
    ACTING
    + turn("user", "\n<tool_response>\n4\n</tool_response>".removeprefix("\n"))
    + said("<think>\nDone.\n</think>\n\nIt is 4.")
)
ASKED = [{"role": "system", "content": "S"}, {"role": "user", "content": "2+2?"}]
SAME = [
    ({"conversations": [ASKED[0] | {"tools": json.dumps(TOOLS)}, ASKED[1],
                        {"role": "assistant", "tool_calls": json.dumps([CALL]), **PARTS}, RESULT, ENDED]},
     ACTING_TWICE),
    ({"messages": [*ASKED, {"role": "assistant", "tool_calls": [OPENAI_CALL], **PARTS}, RESULT, ENDED], "tools": TOOLS},
     ACTING_TWICE),
    ({"messages": [*ASKED,
                   {"role": "assistant", "tool_calls": [CALL], "content": "<think>Add them.</think>Let me see."},
                   RESULT, ENDED], "tools": json.dumps([{"name": "calculate"}])}, ACTING_TWICE),
    ({"conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "2+2?"},
                        {"from": "gpt", "value": ACTED}, {"from": "observation", "value": "4"},
                        {"from": "gpt", "value": ENDED["content"]}], "tools": json.dumps(TOOLS)}, ACTING_TWICE),
    ({"instruction": "2+2?", "input": "", "output": ACTED, "system": "S", "tools": TOOLS}, ACTING),
    ({"prompt": ASKED, "completion": [{"role": "assistant", "content": ACTED}], "tools": TOOLS}, ACTING),
    ({"prompt": "2+2?", "completion": ACTED, "system": "S", "tools": json.dumps(TOOLS)}, ACTING),
    ({"question": "2+2?", "answer": ACTED, "system": "S", "tools": TOOLS}, ACTING),
]  # fmt: skip
WRITTEN_OUT = {"prompt": [{"role": "user", "content": "2+2?"}], "completion": "So.\n" + CALL_BLOCK}
GOLDEN = [
    ({"question": "2+2?", "answer": "4"}, turn("user", "2+2?") + said("4")),
    ({"prompt": "Say", "completion": " hi"}, turn("user", "Say") + said(" hi")),
    ({"instruction": "A.", "input": "b", "output": "猫", "system": "S"},
     turn("system", "S") + turn("user", "A.\nb") + said("猫")),
    ({"conversations": [{"from": "human", "value": "你好"}, {"from": "gpt", "value": "你好！"}]},
     turn("user", "你好") + said("你好！")),
    (THINKER, turn("system", "Be brief.") + turn("user", "Hi") + said("<think>\nGreet.\n</think>\n\nHello.")),
    (MINIMIND, turn("system", TOOLS_BLOCK) + turn("user", "2+2?") + said(CALL_BLOCK) + turn("user", RESULTS)
     + said("It is 4.")),
    (OPENAI, turn("system", "S\n\n" + TOOLS_BLOCK) + turn("user", "2+2?") + said("Let me see.\n" + CALL_BLOCK)),
    (WRITTEN_OUT, turn("user", "2+2?") + said("So.\n" + CALL_BLOCK)),
]  # fmt: skip


def ids_of(tokenizer, marked: str) -> tuple[list[int], list[int]]:
    """Ids and mask of a golden text: cut at its control tokens and brackets, each stretch encoded whole."""
    controls = tokenizer.get_added_vocab()
    pattern = "|".join(re.escape(token) for token in sorted(controls, key=len, reverse=True))
    ids, mask, inside = [], [], 0
    for part in re.split(rf"({pattern}|(?<=\n)\[|(?<=<\|im_end\|>)\])", marked):
        if part in ("[", "]"):
            inside = int(part == "[")
            continue
        encoded = [controls[part]] if part in controls else plain_encoder(tokenizer).encode(part).ids
        ids += encoded
        mask += [inside] * len(encoded)
    return ids, mask


@pytest.mark.parametrize("row, expected", GOLDEN + SAME)
def test_golden_rows(tokenizer, row, expected):
    chat = chat_renderer(tokenizer).render_many([messages_from_row(row)])[0]
    assert (chat.input_ids, chat.assistant_mask) == ids_of(tokenizer, expected)
    text = ""
    for trained, group in itertools.groupby(
        zip(chat.assistant_mask, chat.input_ids, strict=True), lambda pair: pair[0]
    ):
        stretch = tokenizer.decode([token for _, token in group])
        text += f"[{stretch}]" if trained else stretch
    assert text == expected


def test_golden_ids(tokenizer):
    """Control ids stand where the template writes them; the line break after a turn is not trained."""
    chat = render_messages([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}], tokenizer)
    encode = plain_encoder(tokenizer).encode
    user, assistant = encode("user\nHi").ids, encode("assistant\n").ids
    answer, newline = encode("Ho").ids, encode("\n").ids
    assert chat.input_ids == [1, *user, 2, *newline, 1, *assistant, *answer, 2, *newline]
    prompt = 1 + len(user) + 1 + len(newline) + 1 + len(assistant)
    assert chat.assistant_mask == [0] * prompt + [1] * (len(answer) + 1) + [0] * len(newline)
    assert chat.turns == [("user", 0), ("assistant", 2 + len(user) + len(newline))]


@pytest.mark.slow
def test_mask_equals_trl(tokenizer, tmp_path):
    """TRL's assistant_only_loss computes the same ids and the same mask from the same template."""
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl import SFTConfig, SFTTrainer

    rows = [messages_from_row(row)[0] for row, _ in GOLDEN + SAME]
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    options = SFTConfig(
        output_dir=str(tmp_path), assistant_only_loss=True, use_cpu=True, bf16=False, report_to="none", max_length=512
    )
    trainer = SFTTrainer(
        model=Qwen3ForCausalLM(config), args=options, processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"messages": row} for row in rows]),
    )  # fmt: skip
    for row, theirs in zip(rows, trainer.train_dataset, strict=True):
        chat = render_messages(row, tokenizer)
        assert chat.input_ids == theirs["input_ids"]
        labels = [
            token if trained else -100 for token, trained in zip(chat.input_ids, chat.assistant_mask, strict=True)
        ]
        assert labels == theirs["labels"]
