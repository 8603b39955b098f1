"""Multiple choice by log-likelihood: the model is asked nothing, each choice is weighed as the text that follows.

The rules are lm-evaluation-harness's, so that scores are equal question by question: prompt and choice are encoded
together, the choice's tokens are what comes behind the prompt's own, and the longest texts lose their beginning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dataset.lm_dataset import IGNORED_LABEL

BATCH_TOKENS = 8192


class Continuation(NamedTuple):
    """A text and what may follow it."""

    prompt: str | list[int]
    text: str


@dataclass(frozen=True)
class Weighed:
    """One continuation, weighed.

    Attributes:
        log_likelihood: nats, summed over its tokens.
        is_greedy: the model itself would have written it, token by token.
        num_tokens: its tokens.
    """

    log_likelihood: float
    is_greedy: bool
    num_tokens: int


def weigh(
    model, tokenizer, continuations: Sequence[Continuation], dtype: torch.dtype, batch_tokens: int = BATCH_TOKENS
) -> list[Weighed]:
    """The log-likelihood of each continuation after its prompt, in order.

    Args:
        model: MiniMindForCausalLM on its device, in evaluation mode.
        tokenizer: its tokenizer.
        continuations: a prompt is text, or ids where a chat template made it.
        dtype: computes under autocast (none for float32).
        batch_tokens: slots computed together; rows are sorted by length, the padding behind them is not looked at.
    """
    window = model.config.max_position_embeddings
    encoded = [encode_continuation(tokenizer, continuation, window) for continuation in continuations]
    order = sorted(range(len(encoded)), key=lambda index: len(encoded[index][0]), reverse=True)
    results: list[Weighed | None] = [None] * len(encoded)
    while order:
        size = max(1, batch_tokens // len(encoded[order[0]][0]))
        batch, order = order[:size], order[size:]
        for index, weighed in zip(batch, _weigh_batch(model, [encoded[i] for i in batch], dtype), strict=True):
            results[index] = weighed
    return results


def encode_continuation(tokenizer, continuation: Continuation, window: int) -> tuple[list[int], int]:
    """(ids of prompt and text, how many of them are the text's), at most window + 1 ids.

    Without a prompt the text follows the token that begins or, where there is none, ends a document.
    """
    prompt, text = continuation
    if isinstance(prompt, str):
        bare = prompt.rstrip()
        prompt, text = bare, prompt[len(bare) :] + text  # a space before a word belongs to the word's token
        first = tokenizer(prompt, add_special_tokens=False)["input_ids"] if prompt else []
        behind = tokenizer(prompt + text, add_special_tokens=False)["input_ids"][len(first) :]
        count, ids = len(behind), [*first, *behind]  # the prompt is cut by itself, also where a token would span both
    else:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        count, ids = len(ids), [*prompt, *ids]
    if not count:
        raise ValueError(
            f"the choice {continuation.text!r} has no token of its own: with the end of its prompt it is one token; "
            'put a "delimiter" between them'
        )
    if count == len(ids):
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        ids = [start, *ids]
    return ids[-(window + 1) :], min(count, window)


@torch.no_grad()
def _weigh_batch(model, rows: list[tuple[list[int], int]], dtype: torch.dtype) -> list[Weighed]:
    device = next(model.parameters()).device
    longest = max(len(ids) for ids, _ in rows) - 1  # the last token is only a label
    inputs = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full((len(rows), longest), IGNORED_LABEL)
    for row, (ids, count) in enumerate(rows):
        inputs[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        labels[row, len(ids) - 1 - count : len(ids) - 1] = torch.tensor(ids[-count:])
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        hidden = model.model(input_ids=inputs.to(device)).last_hidden_state
        asked = (labels != IGNORED_LABEL).to(device)
        logits = model.lm_head(hidden[asked]).float()
    wanted = labels.to(device)[asked]
    of_tokens = logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0].double().cpu()
    greedy = (logits.argmax(-1) == wanted).cpu()
    counts = [count for _, count in rows]
    return [
        Weighed(nats.sum().item(), bool(hits.all()), count)
        for nats, hits, count in zip(of_tokens.split(counts), greedy.split(counts), counts, strict=True)
    ]


@dataclass(frozen=True)
class Picks:
    """Which choice is the likeliest: as it is, a character, and a byte."""

    raw: int
    by_characters: int
    by_bytes: int


def pick(choices: Sequence[str], log_likelihoods: Sequence[float]) -> Picks:
    """The likeliest choice by each rule; of equal ones the first."""

    def best(lengths: Sequence[int]) -> int:
        scores = [value / length for value, length in zip(log_likelihoods, lengths, strict=True)]
        return scores.index(max(scores))

    return Picks(
        best([1] * len(choices)),
        best([max(1, len(choice)) for choice in choices]),
        best([max(1, len(choice.encode())) for choice in choices]),
    )
