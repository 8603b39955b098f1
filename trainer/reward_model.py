"""A reward that a model gives: any sequence-classification folder, such as one that was trained on preference pairs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from trainer.rewards import Reply

TOGETHER = 32
"""Texts scored at a time."""


class RewardModel:
    """Scores whole replies; the logistic function of the score lies in 0 to 1 as other rewards do.

    A Bradley-Terry model's differences of scores are log-odds, so that function gives how probably a reply would be
    preferred to one of score 0. A classifier with two labels scores the second's log-odds.

    Args:
        folder: config.json, weights and tokenizer; nothing in it is run.
        device: where it computes.

    Raises:
        ValueError: no such model, or not one score.
    """

    def __init__(self, folder: str, device: torch.device):
        if not (Path(folder) / "config.json").is_file():
            raise ValueError(f"--reward_model {folder}: no config.json there")
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            self.model, found = AutoModelForSequenceClassification.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=torch.float32,
                output_loading_info=True,
            )  # fmt: skip
        except Exception as error:  # each architecture raises its own
            raise ValueError(f"--reward_model {folder}: cannot be opened: {error}") from error
        if found["missing_keys"]:  # a language model would get a random head
            missing = ", ".join(sorted(found["missing_keys"])[:3])
            raise ValueError(f"--reward_model {folder}: is no classifier, it lacks {missing}")
        if self.model.config.num_labels not in (1, 2):
            raise ValueError(
                f"--reward_model {folder}: it has {self.model.config.num_labels} labels; a reward needs one score, or "
                "two labels of which the second is the better"
            )
        if self.tokenizer.pad_token_id is None:
            raise ValueError(f"--reward_model {folder}: its tokenizer has no pad token")
        self.tokenizer.truncation_side = "left"  # of a text that is too long the reply is kept
        self.model.config.pad_token_id = self.tokenizer.pad_token_id
        self.model.to(device).eval().requires_grad_(False)
        self.device = device

    @torch.no_grad()
    def __call__(self, replies: Sequence[Reply], rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """The reward of each reply to its row."""
        texts = [self.text_of(reply, row) for reply, row in zip(replies, rows, strict=True)]
        rewards: list[float] = []
        for first in range(0, len(texts), TOGETHER):
            batch = self.tokenizer(texts[first : first + TOGETHER], return_tensors="pt", padding=True, truncation=True)
            logits = self.model(**{name: tensor.to(self.device) for name, tensor in batch.items()}).logits.float()
            scores = logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]
            rewards += scores.sigmoid().tolist()
        return rewards

    def text_of(self, reply: Reply, row: Mapping[str, Any]) -> str:
        """The conversation as the model's own template has it; without one, its words, a message a line."""
        messages = [*row["messages"], reply.message]
        if self.tokenizer.chat_template:
            return self.tokenizer.apply_chat_template(messages, tokenize=False)
        return "\n".join(str(message.get("content") or "") for message in messages)
