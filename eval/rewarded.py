"""Pictures of stages whose loss says little: what their rollouts are rewarded with, and which pairs they tell apart."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eval.curves import DOTS_PER_INCH, FEW_POINTS, GREY, SOURCE_COLOURS, smooth
from eval.records import RunRecord

COLUMNS = 2
CURVES = {
    "reward": ("rollout_reward", "what it draws", "validation_reward", "held out, greedy"),
    "share of pairs told apart": ("preferred", "trained on", "validation_preferred", "held out"),
}
"""By what is measured: the metric of training and its name, that of validation and its name."""


def draw_rewards(records: Sequence[RunRecord], path: Path) -> bool:
    """Of each run that has them, as a PNG: mean reward, or share of pairs told apart, by step.

    Returns whether there was any.
    """
    found = [(record, measured) for record in records for measured in CURVES if points_of(record, measured)[0]]
    if not found:
        return False
    rows = -(-len(found) // COLUMNS)
    figure = Figure(figsize=(9.6, 0.4 + 2.8 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(rows, COLUMNS, squeeze=False).flat
    for (record, measured), axes in zip(found, places, strict=False):
        training, validation = points_of(record, measured)
        steps, values = zip(*training, strict=True)
        _, of_training, _, of_validation = CURVES[measured]
        axes.plot(steps, values, color=SOURCE_COLOURS["text"], linewidth=0.8, alpha=0.3)
        shown = smooth(values) if len(values) >= FEW_POINTS else values
        axes.plot(steps, shown, color=SOURCE_COLOURS["text"], linewidth=1.8, label=of_training)
        if validation:
            axes.plot(*zip(*validation, strict=True), "o-", color=SOURCE_COLOURS["chat"], label=of_validation)
        axes.set(title=record.name, xlabel="step", ylabel=measured)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(GREY)
        axes.grid(axis="y", color="#000000", alpha=0.08, linewidth=0.8)
        axes.legend(frameon=False, loc="lower right", fontsize=9)
    for axes in list(figure.axes)[len(found) :]:
        axes.set_axis_off()
    figure.savefig(path, dpi=DOTS_PER_INCH)
    return True


def points_of(record: RunRecord, measured: str) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """(step, value) of what was trained on, and of what was held out."""
    training, _, validation, _ = CURVES[measured]
    return record.values(training), record.values(validation)
