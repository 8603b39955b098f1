"""Loss, perplexity and bits per byte as sums, so that any number of batches, rows or ranks add up to one exact figure.

Bits per byte (Gao et al. 2020, "The Pile", section 3.1) divides the total information of a text by its length in bytes
instead of in tokens, so models with different tokenizers can be compared: bpb = nats / (ln 2 * bytes).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from itertools import islice

import torch

from dataset.lm_dataset import IGNORED_LABEL
from dataset.text_statistics import byte_weights
from dataset.token_bytes import token_contents


@dataclass
class LossSums:
    """Sums over supervised tokens. Add those of several batches, sources or ranks, then read the properties.

    `nats` and `tokens` cover every supervised token; `text_nats` and `bytes` only those that stand for text, because a
    control token has no bytes and would make a chat look worse than the same words as plain text.
    """

    nats: float = 0.0
    tokens: int = 0
    text_nats: float = 0.0
    bytes: int = 0

    def __add__(self, other: "LossSums") -> "LossSums":
        return LossSums(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def to_tensor(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """The four sums in field order, (4,) float64: what a caller with several ranks all-reduces."""
        # Apple's GPUs have no float64; there is one rank there, and nothing to reduce.
        dtype = torch.float32 if torch.device(device).type == "mps" else torch.float64
        return torch.tensor(astuple(self), dtype=dtype, device=device)

    @classmethod
    def from_tensor(cls, sums: torch.Tensor) -> "LossSums":
        """The inverse of `to_tensor`."""
        nats, tokens, text_nats, num_bytes = sums.tolist()
        return cls(nats, round(tokens), text_nats, round(num_bytes))

    @property
    def loss(self) -> float:
        """Mean nats per supervised token; nan when there was none."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite rather than an error when the loss is too large for a float."""
        return math.exp(self.loss) if not self.loss > 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the supervised text; nan when it had no bytes."""
        return self.text_nats / (math.log(2) * self.bytes) if self.bytes else math.nan

    def to_dict(self) -> dict[str, float]:
        """The sums and what follows from them, ready for JSON."""
        return {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens,
            "bytes": self.bytes,
        }


def sum_losses(token_losses: torch.Tensor, labels: torch.Tensor, token_bytes: torch.Tensor) -> LossSums:
    """Sums of one batch.

    token_losses, labels: (B, T); entry t of `token_losses` is the loss of predicting `labels[t]` from what stands
    before it. Position 0 has nothing before it and never counts. token_bytes: (V,) on the same device.
    """
    supervised = labels[:, 1:] != IGNORED_LABEL
    losses = token_losses[:, 1:][supervised].to("cpu", torch.float64)
    num_bytes = token_bytes[labels[:, 1:][supervised]].cpu()
    return LossSums(
        nats=losses.sum().item(),
        tokens=losses.numel(),
        text_nats=losses[num_bytes > 0].sum().item(),
        bytes=int(num_bytes.sum()),
    )


def evaluate_bpb(model, loader: Iterable[dict], steps: int | None, token_bytes: torch.Tensor) -> LossSums:
    """Sums of the losses of `model` over the first `steps` batches of `loader` (all of them when None).

    A batch holds `input_ids`, `labels` and, for packed rows, `document_ids`, each (B, T). Nothing is reduced over ranks
    and nothing is said about precision: the caller sums over ranks and opens the autocast context that it trains with.
    The model's training mode is restored, also after an error.
    """
    return sum(evaluate_bpb_by(None, model, loader, steps, token_bytes).values(), LossSums())


@torch.no_grad()
def evaluate_bpb_by(
    group_of: Callable[[dict[str, torch.Tensor]], torch.Tensor] | None,
    model,
    loader: Iterable[dict],
    steps: int | None,
    token_bytes: torch.Tensor,
) -> dict[int, LossSums]:
    """`evaluate_bpb` apart for each group of tokens; `group_of` gives the group of each token of a batch, (B, T)."""
    device = next(model.parameters()).device
    token_bytes = token_bytes.to(device)
    was_training = model.training
    model.eval()
    totals: dict[int, LossSums] = {}
    try:
        for batch in islice(loader, steps):
            inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            losses, labels = model(**inputs, return_token_losses=True).token_losses, inputs["labels"]
            groups = torch.zeros_like(labels) if group_of is None else group_of(batch).to(device)
            for group in groups.unique().tolist():
                of_group = labels.where(groups == group, IGNORED_LABEL)
                sums = sum_losses(losses, of_group, token_bytes)
                totals[group] = totals.get(group, LossSums()) + sums
    finally:
        model.train(was_training)
    return totals


def languages_of_documents(tokenizer) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    """A function that gives each token of a batch the language that most of its document is in.

    It is a number in `dataset.text_statistics.LANGUAGES`; a document is what shares a row and a `document_ids`.
    """
    contents = token_contents(tokenizer)
    weights = torch.tensor([byte_weights(content)[1:].tolist() for content in contents], dtype=torch.float64)

    def group_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        ids = batch["input_ids"]
        documents = batch.get("document_ids", torch.ones_like(ids))
        most = int(documents.max()) + 1
        keys = (documents + most * torch.arange(len(ids))[:, None]).flatten()
        # ids of padding beyond the vocabulary do not occur: a batch is padded with 0
        sums = torch.zeros(most * len(ids), weights.shape[1], dtype=torch.float64)
        sums.index_add_(0, keys, weights[ids.flatten()])
        return sums.argmax(1)[keys].view_as(ids)

    return group_of
