"""Pictures of how evenly the experts of an MoE model are used, from its metrics."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from eval.curves import DOTS_PER_INCH, format_tokens
from eval.records import RunRecord

MOST = 2.0  # even shares at which the colours end


def loads_of(record: RunRecord) -> tuple[list[int], np.ndarray] | None:
    """(tokens, shares (times, layers, experts) in even shares) of a run's progress lines; None for a dense model."""
    lines = [line for line in record.metrics if line.get("expert_load") and "tokens" in line]
    if not lines:
        return None
    shares = np.array([line["expert_load"] for line in lines])
    return [line["tokens"] for line in lines], shares * shares.shape[-1]


def draw_experts(records: Sequence[RunRecord], path: Path) -> bool:
    """Of each MoE run, as a PNG: the load of every expert at its end, and each layer's busiest expert over time.

    Returns whether there was any MoE run.
    """
    found = [(record, loads) for record in records if (loads := loads_of(record)) is not None]
    if not found:
        return False
    figure = Figure(figsize=(9.6, 0.6 + 2.6 * len(found)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(found), 2, squeeze=False)
    for (record, (tokens, shares)), (left, right) in zip(found, rows, strict=True):
        image = left.imshow(shares[-1], cmap="RdBu_r", vmin=0, vmax=MOST, aspect="auto")
        for (layer, expert), share in np.ndenumerate(shares[-1]):
            if shares[-1].size <= 128:
                left.text(expert, layer, f"{share:.1f}", ha="center", va="center", fontsize=7)
        left.set(xlabel="expert", ylabel="layer", title=f"{record.name}: load at the end (1 = even)")
        left.xaxis.set_major_locator(MaxNLocator(integer=True))
        left.yaxis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(image, ax=left, extend="max")
        for layer in range(shares.shape[1]):
            right.plot(tokens, shares[:, layer].max(axis=-1), linewidth=1.2, label=f"layer {layer}")
        right.axhline(1, color="#666666", linewidth=0.8, linestyle=":")
        right.set(xlabel="tokens of this stage", title="the busiest expert of each layer, in even shares")
        right.set_ylim(bottom=0.9)
        right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_tokens(value)))
        if shares.shape[1] <= 8:
            right.legend(frameon=False, fontsize=8, ncols=2)
        for side in ("top", "right"):
            right.spines[side].set_visible(False)
    figure.savefig(path, dpi=DOTS_PER_INCH)
    return True
