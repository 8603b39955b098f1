"""Pictures of finished runs: how the losses fell over all stages, and what each stage scores."""

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from eval.questions import wilson_interval
from eval.records import RunRecord

# Okabe and Ito's palette: told apart by colour-blind readers too.
STAGE_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#000000", "#999999")
SOURCE_COLOURS = {"text": "#1f3b57", "chat": "#C8452B"}
OTHER_COLOURS = ("#56B4E9", "#CC79A7", "#999999")
CHAIN_STYLES = ("-", "--", ":", "-.")
GREY = "#666666"
DOTS_PER_INCH = 150
FEW_POINTS = 15  # a curve of fewer points is drawn as it is; smoothing would only lag behind it
NARROW = 0.1  # share of the axis below which a stage's name has no room above it; the legend has it too


CHINESE_FONTS = (
    *("Noto Sans CJK SC", "Source Han Sans SC", "WenQuanYi Zen Hei", "PingFang SC", "Microsoft YaHei", "SimHei"),
    *("Noto Sans CJK JP", "Droid Sans Fallback"),
)


def stage_colours(records: Sequence[RunRecord]) -> dict[str, str]:
    """A colour for each stage, by its name, in the order in which the stages come."""
    stages = list(dict.fromkeys(record.stage for record in records))
    return {stage: STAGE_COLOURS[index % len(STAGE_COLOURS)] for index, stage in enumerate(stages)}


def draw_curves(records: Sequence[RunRecord], path: Path) -> None:
    """Validation bits per byte and training loss of all runs on one axis of tokens, as a PNG."""
    figure = Figure(figsize=(9.6, 5.8), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    _draw_validation(above, records)
    _draw_training(below, records)
    for axes in (above, below):
        _style(axes)
        _mark_stages(axes, records, with_names=axes is above)
    below.set_xlabel("tokens trained on, all stages together")
    below.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_tokens(value)))
    last = _road(records)[-1]
    end = last.first_token + last.tokens
    below.set_xlim(-0.01 * end, 1.01 * end)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def format_tokens(count: float) -> str:
    """A number of tokens as people write it: 0, 250k, 1.5M, 2B."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.0f}"


def _road(records: Sequence[RunRecord]) -> list[RunRecord]:
    """The longest way through these runs that has curves, its first stage ahead."""
    drawn = [record for record in records if record.has_curves] or records
    last = max(drawn, key=lambda record: record.first_token + record.tokens)
    return [*last.earlier, last]


def _chains(records: Sequence[RunRecord]) -> dict[str, str]:
    """A line style for each chain of stages."""
    chains = list(dict.fromkeys(record.chain for record in records))
    return {chain: CHAIN_STYLES[index % len(CHAIN_STYLES)] for index, chain in enumerate(chains)}


def _draw_validation(axes: Axes, records: Sequence[RunRecord]) -> None:
    styles, road = _chains(records), _road(records)
    sources = list(dict.fromkeys(source for record in records for source in record.validation_sources))
    others = iter(OTHER_COLOURS * len(sources))
    for source in sorted(sources, reverse=True):
        colour = SOURCE_COLOURS.get(source) or next(others)
        labelled = set()
        for record in records:
            points = record.validation_points(source)
            if not points:
                continue
            beside = record not in road and record.chain == road[-1].chain
            label = source if len(styles) == 1 else f"{source}, {record.chain}"
            label += f", {record.stage}" * beside
            marker = "o" if len(points) < 40 else None
            axes.plot(
                *zip(*points, strict=True), ":" if beside else styles[record.chain], color=colour, marker=marker,
                markersize=3.5, linewidth=1.8, label=None if label in labelled else f"validation {label}",
            )  # fmt: skip
            labelled.add(label)
            offset = (7, -12) if beside else (-2, -15 if source == "chat" else 7)  # clear of the curve that falls there
            _note_last(axes, points, colour, offset)
    axes.set_ylabel("bits per byte")
    _scale(axes, [value for record in records for source in sources for _, value in record.validation_points(source)])
    if sources:
        axes.legend(frameon=False, loc="upper right", fontsize=10)


def _note_last(axes: Axes, points: list[tuple[int, float]], colour: str, offset: tuple[int, int]) -> None:
    """Write the last value at a distance from its point, in points of 1/72 inch, away from it."""
    style = {"textcoords": "offset points", "ha": "left" if offset[0] > 0 else "right", "fontsize": 10}
    axes.annotate(f"{points[-1][1]:.2g}", points[-1], xytext=offset, color=colour, **style)


def _scale(axes: Axes, values: list[float]) -> None:
    """Logarithmic where the values span much: else the first stage's fall hides what the later stages gain."""
    positive = [value for value in values if value > 0]
    if not positive or max(positive) < 5 * min(positive):
        axes.set_ylim(bottom=0)
        return
    axes.set_yscale("log")
    axes.set_ylim(min(positive) * 0.4, max(positive) * 1.3)  # room for the last value below its point
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_training(axes: Axes, records: Sequence[RunRecord]) -> None:
    styles, colours = _chains(records), stage_colours(records)
    labelled = set()
    for record in records:
        points = record.training_points
        if not points:
            continue
        tokens, losses = zip(*points, strict=True)
        label = record.stage if len(styles) == 1 else record.name
        colour = colours[record.stage]
        if len(losses) >= FEW_POINTS:
            axes.plot(tokens, losses, styles[record.chain], color=colour, linewidth=0.8, alpha=0.3)
        shown = smooth(losses) if len(losses) >= FEW_POINTS else losses
        new_label = None if label in labelled else label
        axes.plot(tokens, shown, styles[record.chain], color=colour, linewidth=1.8, label=new_label)
        labelled.add(label)
    axes.set_ylabel("training loss, nats per token")
    _scale(axes, [loss for record in records for _, loss in record.training_points])
    if labelled:
        axes.legend(frameon=False, loc="upper right", fontsize=10)


def smooth(values: Sequence[float], keep: float = 0.6) -> list[float]:
    """Exponential moving average without the pull of its start (Kingma and Ba 2015, section 3)."""
    average, weight, result = 0.0, 0.0, []
    for value in values:
        average, weight = keep * average + (1 - keep) * value, keep * weight + 1 - keep
        result.append(average / weight)
    return result


def _mark_stages(axes: Axes, records: Sequence[RunRecord], with_names: bool) -> None:
    """Shade every second stage of the longest way and write the names above."""
    road = _road(records)
    whole = road[-1].first_token + road[-1].tokens
    for index, record in enumerate(road):
        start, end = record.first_token, record.first_token + record.tokens
        if index % 2 == 0:
            axes.axvspan(start, end, color="#000000", alpha=0.045, linewidth=0)
        if with_names and end - start > NARROW * whole:
            axes.text(
                (start + end) / 2, 1.02, record.stage, transform=axes.get_xaxis_transform(), ha="center", va="bottom",
                fontsize=11, fontweight="bold", color=GREY,
            )  # fmt: skip


def _style(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=GREY, labelsize=10)
    axes.yaxis.label.set_size(10.5)
    axes.xaxis.label.set_size(10.5)
    axes.grid(axis="y", color="#000000", alpha=0.08, linewidth=0.8)
    axes.set_axisbelow(True)


def merge_languages(record: RunRecord) -> dict[str, dict[str, Any]]:
    """Right and total of each family over its languages, and what the best constant replies would get."""
    merged: dict[str, dict[str, Any]] = {}
    for (family, _), score in record.family_scores.items():
        into = merged.setdefault(family, {"right": 0, "total": 0, "constant_right": 0, "free_arithmetic": False})
        for name in ("right", "total", "constant_right"):
            into[name] += score[name]
        into["free_arithmetic"] |= score["free_arithmetic"]
    return merged


def draw_scores(records: Sequence[RunRecord], path: Path) -> None:
    """Accuracy by question family as a PNG: a dot for each run with its 95 % interval, the last run's best on top.

    All records must have been scored on the same questions.
    """
    last = merge_languages(records[-1])
    families = sorted(last, key=lambda family: (last[family]["right"] / last[family]["total"], family))
    figure = Figure(figsize=(9.6, 1.3 + 0.27 * len(families)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    constants = [last[family]["constant_right"] / last[family]["total"] for family in families]
    places = range(len(families))
    axes.plot(constants, places, "|", color="#333333", markersize=9, markeredgewidth=1.6, label="best constant reply")
    one_of_each_stage = len({record.stage for record in records}) == len(records)
    for index, record in enumerate(records):
        # The last run lies a little above its line and the first below, so that equal scores do not hide each other.
        shift = 0.3 * (index - (len(records) - 1) / 2) / max(1, len(records) - 1)
        colour = STAGE_COLOURS[index % len(STAGE_COLOURS)]
        label = record.stage if one_of_each_stage else record.name
        _draw_dots(axes, merge_languages(record), families, shift, colour, label)
    _finish_scores(axes, families, last)
    with warnings.catch_warnings():  # without any such font a name shows as boxes; the table below has it
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(path, dpi=DOTS_PER_INCH)


def _draw_dots(
    axes: Axes, scores: dict[str, dict[str, Any]], families: list[str], shift: float, colour: str, label: str
) -> None:
    places = [place for place, family in enumerate(families) if family in scores]
    counts = [(scores[families[place]]["right"], scores[families[place]]["total"]) for place in places]
    shares = [right / total for right, total in counts]
    intervals = [wilson_interval(right, total) for right, total in counts]
    errors = [
        [max(0.0, share - interval.low) for share, interval in zip(shares, intervals, strict=True)],
        [max(0.0, interval.high - share) for share, interval in zip(shares, intervals, strict=True)],
    ]
    heights = [place + shift for place in places]
    axes.errorbar(
        shares, heights, xerr=errors, fmt="o", color=colour, markersize=6, elinewidth=2, alpha=0.9, label=label
    )


def _finish_scores(axes: Axes, families: list[str], last: dict[str, dict[str, Any]]) -> None:
    _style(axes)
    labels = [family.replace("$", r"\$") + (" *" if last[family]["free_arithmetic"] else "") for family in families]
    installed = {font.name for font in fontManager.ttflist} if not "".join(labels).isascii() else set()
    fonts = ["DejaVu Sans", *(name for name in CHINESE_FONTS if name in installed)]
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # that a font has one weight only is no news
    axes.set_yticks(range(len(families)), labels, fontfamily=fonts)
    axes.set_ylim(-0.7, len(families) - 0.3)
    axes.set_xlim(-0.02, 1.02)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.grid(axis="x", color="#000000", alpha=0.08, linewidth=0.8)
    starred = any(score["free_arithmetic"] for score in last.values())
    note = "    * needs arithmetic without a tool" if starred else ""
    axes.set_xlabel(f"held-out questions answered right, with 95 % intervals{note}")
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, fontsize=10)
