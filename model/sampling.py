"""How the next token is drawn: the only sampler. Its noise is a function of a seed and of the row that it is for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

TOP_P_CANDIDATES = 256  # top_p looks at so many best tokens before it sorts the whole vocabulary


@dataclass
class Sampling:
    """How the next token is chosen. Temperature 0 is greedy; top_k 0 and top_p 1 filter nothing.

    Raises ValueError for values out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}: it must be 0 (greedy) or above")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}: it must be 0 (off) or above")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: it must lie in (0, 1]")

    def uniforms(self, row: int | str, count: int) -> Tensor:
        """(count,) numbers in [0, 1) that belong to this seed and row: one for each new token."""
        digest = hashlib.blake2b(f"{self.seed}:{row}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        return torch.rand(count, generator=generator, dtype=torch.float64)

    def choose(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """logits (B, V), uniforms (B,) -> token ids (B,)."""
        if self.temperature == 0:
            return logits.float().argmax(dim=-1)  # four times as fast as in bfloat16 on a CPU
        scores = logits.float() / self.temperature
        if not self.top_k and self.top_p == 1:
            return _pick(scores.double().softmax(dim=-1), uniforms)
        return self._choose_among_best(scores, uniforms, min(self.top_k or TOP_P_CANDIDATES, scores.shape[-1]))

    def log_probs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """logits (B, V), tokens (B,) -> (B,) fp32 log-probabilities at the temperature, before any filter."""
        scores = logits.float() / (self.temperature or 1.0)
        return scores.gather(1, tokens[:, None])[:, 0] - scores.logsumexp(dim=-1)

    def _choose_among_best(self, scores: Tensor, uniforms: Tensor, count: int) -> Tensor:
        """Draw from the `count` best tokens; rows whose best do not reach top_p draw from all (a full sort is slow)."""
        best, tokens = scores.topk(count, dim=-1)
        total = (best if self.top_k else scores).logsumexp(dim=-1, keepdim=True)
        probabilities = (best - total).double().exp()
        spent = probabilities.cumsum(dim=-1)
        # Keep the smallest set that reaches top_p: every token before which less than top_p was spent.
        kept = probabilities.masked_fill(spent - probabilities >= self.top_p, 0.0)
        chosen = tokens.gather(1, _pick(kept, uniforms)[:, None])[:, 0]
        if not self.top_k and count < scores.shape[-1]:
            short = (spent[:, -1] < self.top_p).nonzero()[:, 0]
            if len(short):
                chosen[short] = self._choose_among_best(scores[short], uniforms[short.cpu()], scores.shape[-1])
        return chosen


def _pick(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """probabilities (B, V), in any scale, uniforms (B,) -> the place at which the cumulative probability passes u."""
    cumulative = probabilities.cumsum(dim=-1)
    target = uniforms[:, None].to(cumulative.device) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).clamp_max_(cumulative.shape[-1] - 1)[:, 0]
