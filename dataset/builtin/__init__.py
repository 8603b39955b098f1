"""The embedded corpus: a small invented bilingual world told for every stage of training."""

from dataset.builtin.store import ensure_builtin_corpus

__all__ = ["ensure_builtin_corpus"]
