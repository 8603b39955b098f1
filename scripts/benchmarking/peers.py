"""The others, beside us: the usual recipe with padded rows around transformers' own models, and TRL's trainer."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset as HubDataset
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from dataset.formats import messages_from_row
from dataset.sources import RowReader
from model.config import MiniMindConfig
from model.model_minimind import MiniMindForCausalLM
from scripts.benchmarking.ours import SEED, Task, validation_loss
from scripts.benchmarking.turns import Baton

PADDED_LEARNING_RATE = 5e-4
IGNORED = -100


def peer_model(config: MiniMindConfig, experts_implementation: str | None = None) -> PreTrainedModel:
    """transformers' Qwen3 or Qwen3-MoE of our shape, with its own random start; "eager" runs experts in a loop."""
    fields = config.to_hugging_face_dict()
    torch.manual_seed(SEED)
    if config.use_moe:
        peer_config = transformers.Qwen3MoeConfig(**fields)
        if experts_implementation is not None:
            peer_config._experts_implementation = experts_implementation
        return transformers.Qwen3MoeForCausalLM(peer_config)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**fields))


def padded_batches(rows: Dataset, size: int, window: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Endless (input_ids, labels, tokens that are not padding), rows shuffled and filled up to the window."""
    generator = torch.Generator().manual_seed(SEED)
    size = min(size, len(rows))
    while True:
        order = torch.randperm(len(rows), generator=generator).tolist()
        for first in range(0, len(order) - size + 1, size):
            items = [rows[index] for index in order[first : first + size]]
            input_ids = torch.zeros(size, window, dtype=torch.int64)
            labels = torch.full((size, window), IGNORED)
            for place, item in enumerate(items):
                length = len(item["input_ids"])
                input_ids[place, :length], labels[place, :length] = item["input_ids"], item["labels"]
            yield input_ids, labels, sum(len(item["input_ids"]) for item in items)


def train_padded(task: Task, baton: Baton) -> None:
    """The usual recipe: one piece a row, padded to the window, float32 on a CPU, AdamW at 5e-4, a plain loop.

    No attention mask: padding on the right changes nothing to the left of it, and without one attention is faster.
    With `task.steps` the rate falls by a cosine to a tenth, and a turn notes (seconds, validation loss) at its end.
    """
    ours, _, (rows, validation) = task.model_and_data()
    model = peer_model(ours.config, "eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=PADDED_LEARNING_RATE)
    if task.steps:
        schedule: Any = transformers.get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, 0, task.steps, min_lr_rate=0.1
        )
    batches = padded_batches(rows, task.rows, task.window)

    def note() -> float | None:
        return _loss_as_ours(model, ours, validation["text"]) if task.steps else None

    baton.wait()
    for _ in itertools.count():
        tokens = 0
        for input_ids, labels, count in itertools.islice(batches, task.accumulation):
            (model(input_ids=input_ids, labels=labels).loss / task.accumulation).backward()
            tokens += count
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if task.steps:
            schedule.step()
        baton.step(tokens, note)


def _loss_as_ours(model: PreTrainedModel, ours: MiniMindForCausalLM, rows: Dataset) -> float:
    """The peer's weights in our model, on the validation rows that ours is measured on."""
    ours.load_state_dict(model.state_dict())
    return validation_loss(ours, rows)


def train_trl(task: Task, baton: Baton, packing: bool, checkpointing: bool) -> None:
    """TRL's SFTTrainer at its defaults (bfloat16, activation checkpointing), 8 rows a micro-batch."""
    from trl import SFTConfig, SFTTrainer

    ours, tokenizer, _ = task.model_and_data()
    paths = task.settings().data.data_path
    conversations = [messages_from_row(row.value)[0] for row in RowReader(paths, say=None)]

    class Timed(SFTTrainer):
        """SFTTrainer that counts tokens and hands over between steps."""

        tokens = 0

        def training_step(self, model, inputs, *more):
            mask = inputs.get("attention_mask")
            self.tokens += int(inputs["input_ids"].numel() if mask is None else mask.sum())
            return super().training_step(model, inputs, *more)

    class Hand(transformers.TrainerCallback):
        """Hands over after each optimizer step."""

        def on_step_end(self, arguments, state, control, **kwargs):
            tokens, trainer.tokens = trainer.tokens, 0
            baton.step(tokens)

    config = SFTConfig(
        output_dir=str(Path(task.folder) / "trl"),
        max_length=task.window,
        packing=packing,
        per_device_train_batch_size=task.rows,
        gradient_accumulation_steps=task.accumulation,
        max_steps=10**6,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **({} if checkpointing else {"gradient_checkpointing": False}),
    )
    trainer = Timed(
        peer_model(ours.config),
        config,
        train_dataset=HubDataset.from_list([{"messages": messages} for messages in conversations]),
        processing_class=tokenizer,
    )
    trainer.add_callback(Hand())
    baton.wait()
    trainer.train()


def train_trl_packed(task: Task, baton: Baton) -> None:
    """TRL, packed, at its defaults."""
    train_trl(task, baton, packing=True, checkpointing=True)


def train_trl_packed_without_checkpointing(task: Task, baton: Baton) -> None:
    """TRL, packed, keeping its activations."""
    train_trl(task, baton, packing=True, checkpointing=False)


def train_trl_padded(task: Task, baton: Baton) -> None:
    """TRL, not packed, at its defaults."""
    train_trl(task, baton, packing=False, checkpointing=True)
