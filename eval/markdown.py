"""Pieces of markdown."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A markdown table; the first `left` columns are text, the others figures on the right."""
    marks = ["---"] * left + ["---:"] * (len(header) - left)
    lines = [header, marks, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cell(text: str, longest: int = 160) -> str:
    """Any text inside one table cell: no line breaks, no column marks, nothing that markdown would format."""
    text = " ⏎ ".join(part.strip() for part in text.splitlines() if part.strip())
    text = text if len(text) <= longest else text[: longest - 1] + "…"
    for character in "\\|*_`<>[]":
        text = text.replace(character, "\\" + character)
    return text


def duration(seconds: float) -> str:
    """45 s, 3 min 20 s, 2 h 05 min."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds // 60 % 60:02d} min"
