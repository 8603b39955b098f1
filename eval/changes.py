"""What each stage changed on the same questions, and what the last one still gets wrong, as markdown."""

from collections.abc import Sequence

from eval.comparison import compare, replies_of
from eval.markdown import cell, table
from eval.records import RunRecord

SHOWN_MISTAKES = 8
SURE = 0.01
"""Below this p a family counts as lost; of 52 families and languages half a one would be by chance."""


def changes(records: Sequence[RunRecord]) -> str:
    """Each run beside the one that it went on from, on the same questions: beyond chance or not, and what fell."""
    rows, fell = [], []
    for after in records:
        scored = [before for before in after.earlier if before in records]
        if not scored:
            continue
        before = scored[-1]
        try:
            first, second = (replies_of(record.folder) for record in (before, after))
        except ValueError:  # an evaluation that left no replies
            continue
        found = compare(*({reply["id"]: reply["right"] for reply in replies} for replies in (first, second)))
        low, high = found.interval.low, found.interval.high
        name = f"{before.name} → {after.name}"
        rows.append([
            name,
            f"{found.shared:,}",
            f"{found.only_second:,}",
            f"{found.only_first:,}",
            f"{100 * found.difference:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})",
            f"{found.p_value:.2g}" if found.p_value > 1e-12 else "< 1e-12",
        ])  # fmt: skip
        if lost := lost_families(first, second):
            fell.append(f"Fell from {name}: {', '.join(lost)}.")
    if not rows:
        return ""
    header = ["", "questions", "newly right", "newly wrong", "difference in percentage points", "p"]
    text = (
        "## What each stage changed\n\nThe same questions before and after, with the 95 % interval of the difference "
        "and McNemar's exact test: *p* is how often models that do not differ would differ so much by chance.\n\n"
    )
    return "\n\n".join([text + table(header, rows), *fell])


def lost_families(first: Sequence[dict], second: Sequence[dict]) -> list[str]:
    """Families and languages that the second model gets right less often, beyond chance, with both shares."""
    groups: dict[tuple[str, str], tuple[dict[str, bool], dict[str, bool]]] = {}
    for side, replies in enumerate((first, second)):
        for reply in replies:
            groups.setdefault((reply["family"], reply["language"]), ({}, {}))[side][reply["id"]] = reply["right"]
    lost = []
    for (family, language), sides in sorted(groups.items()):
        found = compare(*sides)
        if found.difference < 0 and found.p_value < SURE:
            before, after = (sum(side.values()) / len(side) for side in sides)
            lost.append(f"{cell(family)} ({language}) {100 * before:.0f} → {100 * after:.0f} %")
    return lost


def mistakes(record: RunRecord) -> str:
    """Some wrong replies of a run, from as many families as can be."""
    try:
        wrong = [reply for reply in replies_of(record.folder) if not reply["right"]]
    except ValueError:
        return ""
    of_family: dict[str, list[dict]] = {}
    for reply in wrong:
        of_family.setdefault(reply["family"], []).append(reply)
    chosen = [replies[len(replies) // 2] for replies in of_family.values()][:SHOWN_MISTAKES]
    if not chosen:
        return ""
    rows = [
        [cell(reply["family"]), cell(reply["prompt"]), cell(reply["expected"]), cell(reply["reply"], 100)]
        for reply in chosen
    ]
    header = ["family", "question", "expected", record.name]
    return f"## What {record.name} gets wrong\n\n" + table(header, rows, left=len(header))
