"""The embedded corpus: a small invented world, written by a deterministic generator (`store.ensure_builtin_corpus`)."""
