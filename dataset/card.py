"""A data card: what a data set holds, in numbers, a histogram of lengths, and samples with what is trained marked."""

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from transformers import PreTrainedTokenizerBase

from dataset.lm_dataset import MixtureDataset
from dataset.selection import Units
from dataset.text_statistics import LANGUAGES
from dataset.token_bytes import token_statistics

QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
SAMPLE_TOKENS = 400
COLOURS = {"documents": "#0072B2", "conversations": "#E69F00"}
DOTS_PER_INCH = 150

Sample = list[tuple[str, bool]]
"""Stretches of a unit's text, and whether they are trained."""


def describe_data(data: MixtureDataset, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The numbers of a card, as plain values.

    Units that a mixture repeats count as often as they occur in the rows.
    """
    units, chosen, summary = data.units, data.chosen, data.summary
    lengths = units.lengths[chosen]
    is_document = units.column("is_document")[chosen]
    statistics = [token_statistics(tokenizer, source.tokens, source.table["start"]) for source in units.sources]
    characters = np.concatenate([one.characters for one in statistics])[chosen]
    language = np.concatenate([one.language for one in statistics])[chosen]
    languages = {}
    for number, name in enumerate(LANGUAGES):
        of_language = language == number
        tokens, size = int(lengths[of_language].sum()), int(units.column("bytes")[chosen][of_language].sum())
        if tokens:
            languages[name] = {
                "units": int(of_language.sum()),
                "tokens": tokens,
                "characters": int(characters[of_language].sum()),
                "bytes": size,
                "bytes_per_token": round(size / tokens, 3),
                "characters_per_token": round(int(characters[of_language].sum()) / tokens, 3),
            }
    # A mixture's repetitions are not the data's: each unit that is taken counts once here.
    hashes = units.column("row_hash")[np.unique(chosen)]
    return {
        "sources": [
            {
                "path": source.path,
                "rows": source.bad_rows.rows_read,
                "unusable_rows": source.bad_rows.count,
                "first_unusable_rows": [str(bad) for bad in source.bad_rows.first[:5]],
                "tokens": len(source.tokens),
                "passes": summary.passes[source.path],
            }
            for source in units.sources
        ],
        "summary": summary.to_dict(),
        "window": data.max_length,
        "lengths": {
            name: {
                f"{share:.0%}": int(value) for share, value in zip(QUANTILES, np.quantile(part, QUANTILES), strict=True)
            }
            for name, part in (("documents", lengths[is_document]), ("conversations", lengths[~is_document]))
            if len(part)
        },
        "longer_than_window": int((lengths > data.max_length).sum()),
        "padded_fill_rate": round(padded_fill_rate(lengths, data.max_length), 4),
        "languages": languages,
        "exact_duplicates": len(hashes) - len(np.unique(hashes)) + summary.duplicates,
    }


def padded_fill_rate(lengths: np.ndarray, window: int) -> float:
    """The share of slots that would hold a token if each unit had rows of its own, padded to the window."""
    rows = -(-(lengths - 1) // (window - 1))
    return float(lengths.sum() / max(int(rows.sum()) * window, 1))


def samples(data: MixtureDataset, tokenizer: PreTrainedTokenizerBase, count: int = 10, seed: int = 0) -> list[Sample]:
    """Some units, drawn at random, as text with marks; long ones are cut."""
    generator = np.random.default_rng(seed)
    picked = generator.choice(len(data.chosen), min(count, len(data.chosen)), replace=False)
    return [sample_of(data.units, int(data.chosen[index]), tokenizer) for index in np.sort(picked)]


def sample_of(units: Units, unit: int, tokenizer: PreTrainedTokenizerBase) -> Sample:
    """One unit's text in stretches that are trained, and that are not. A unit's first token never is."""
    start, length = int(units.starts[unit]), min(int(units.lengths[unit]), SAMPLE_TOKENS)
    tokens = units.tokens[start : start + length].astype(np.int64)
    trained = units.trained[start : start + length].copy()
    trained[0] = False
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), length]
    stretches = [
        (tokenizer.decode(tokens[first:last].tolist()), bool(trained[first]))
        for first, last in zip(edges, edges[1:], strict=False)
    ]
    if length < units.lengths[unit]:
        stretches.append((" …", False))
    return stretches


def draw_lengths(data: MixtureDataset, path: Path) -> None:
    """How many units of which length there are, as a PNG, with the window marked."""
    lengths = data.units.lengths[data.chosen]
    is_document = data.units.column("is_document")[data.chosen]
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    edges = np.unique(np.geomspace(2, max(lengths.max(), data.max_length) + 1, 60).astype(int))
    for name, part in (("documents", lengths[is_document]), ("conversations", lengths[~is_document])):
        if len(part):
            axes.hist(part, bins=edges, color=COLOURS[name], alpha=0.75, label=f"{len(part):,} {name}")
    axes.axvline(data.max_length, color="#D55E00", linestyle="--", label=f"window of {data.max_length}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("tokens")
    axes.set_ylabel("how many")
    axes.set_title("Lengths")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def samples_page(found: Sequence[Sample]) -> str:
    """Samples as a page by itself: what is trained stands on green."""
    blocks = []
    for number, sample in enumerate(found, start=1):
        text = "".join(
            f"<mark>{html.escape(words)}</mark>" if trained else html.escape(words) for words, trained in sample
        )
        blocks.append(f"<h2>{number}</h2>\n<pre>{text}</pre>")
    style = (
        "body{font-family:sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "pre{white-space:pre-wrap;background:#f6f6f6;padding:1rem;border-radius:.5rem}mark{background:#b7e4c7}"
    )
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>Samples</title><style>{style}</style>\n'
        f"<h1>Samples: what is trained stands on green</h1>\n{chr(10).join(blocks)}\n</html>\n"
    )
