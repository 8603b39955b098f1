"""A small model that knows four conversations by heart, so that what it says is known before it is asked."""

import pytest
import torch

from dataset.chat import render_messages
from dataset.tools import TOOL_SCHEMAS
from tests.model.helpers import tiny_model
from trainer.results import save_model

TOOLS = [TOOL_SCHEMAS[name] for name in ("calculate", "lookup")]
CALL = {"name": "calculate", "arguments": {"expression": "12 + 30"}}
CALCULATION = [
    {"role": "user", "content": "What is 12 + 30?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "It is 42."},
]
THINKING = [
    {"role": "user", "content": "谁是米拉？"},
    {"role": "assistant", "content": "米拉是医生。", "reasoning_content": "Mila is a doctor."},
]
HOSTILE = [
    {"role": "user", "content": "Show me HTML."},
    {
        "role": "assistant",
        "content": "<img src=x onerror=\"document.title='owned'\"><b>bold</b> **stars** [x](javascript:1)",
    },
]
LONG = [
    {"role": "user", "content": "Count."},
    {"role": "assistant", "content": " ".join(str(number) for number in range(1, 120))},
]


@pytest.fixture(scope="session")
def taught(tokenizer, tmp_path_factory):
    """The folder of a model that says what the conversations above say."""
    model = tiny_model(vocab_size=len(tokenizer), hidden_size=128, max_position_embeddings=1024, initializer_range=0.02)
    chats = [
        render_messages(CALCULATION, tokenizer, TOOLS),
        render_messages(THINKING, tokenizer),
        render_messages(HOSTILE, tokenizer),
        render_messages(LONG, tokenizer),
    ]
    rows = [
        (
            torch.tensor([chat.input_ids]),
            torch.tensor([chat.input_ids]).where(torch.tensor([chat.assistant_mask]) > 0, -100),
        )
        for chat in chats
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(600):
        loss = sum(model(ids, labels=labels).loss for ids, labels in rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss < 0.01:
            break
    assert loss < 0.05
    folder = tmp_path_factory.mktemp("taught") / "full_sft_128"
    save_model(model.eval(), tokenizer, folder)
    return folder
