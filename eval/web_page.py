"""The report as one HTML file that needs nothing beside it: pictures are part of it, and no network is asked."""

import base64
import html
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
body { color: #1f2933; background: #fff; }
h1 { font-size: 1.9rem; } h2 { margin-top: 2.6rem; border-bottom: 1px solid #d9e2ec; padding-bottom: .3rem; }
img { max-width: 100%; background: #fff; border-radius: 4px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; margin: 1rem 0; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #e4e7eb; vertical-align: top; text-align: left; }
th { background: #f5f7fa; position: sticky; top: 0; }
td[style*=right] { font-variant-numeric: tabular-nums; white-space: nowrap; }
.right { color: #16794c; } .wrong { color: #b3261e; }
pre { background: #f5f7fa; padding: 1rem; overflow-x: auto; } code { font-size: .85rem; }
nav { font-size: .9rem; } nav a { margin-right: 1rem; white-space: nowrap; }
@media (prefers-color-scheme: dark) {
  body { color: #e4e7eb; background: #15191e; } th, pre { background: #1f262e; }
  th, td, h2 { border-color: #323f4b; } a { color: #7cc4fa; } .right { color: #5fd39b; } .wrong { color: #ff8a80; }
}
"""


def to_html(markdown: str, folder: Path) -> str:
    """A page of markdown as a whole HTML document.

    Args:
        markdown: with tables and pictures; raw HTML in it is shown as text.
        folder: where its pictures lie; they become part of the page.
    """
    converter = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = converter.parse(markdown)
    headings, title = [], "Report"
    for index, token in enumerate(tokens):
        if token.type == "heading_open":
            text = tokens[index + 1].content
            title = text if token.tag == "h1" else title
            if token.tag == "h2":
                token.attrSet("id", f"part-{len(headings)}")
                headings.append(text)
        for child in token.children or []:
            if child.type == "image":
                child.attrSet("src", _inlined(child, folder))
    body = converter.renderer.render(tokens, converter.options, {})
    body = body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    for mark, name in (("✓", "right"), ("✗", "wrong")):
        body = body.replace(f"<td>{mark} ", f'<td><b class="{name}">{mark}</b> ')
    links = " ".join(f'<a href="#part-{number}">{html.escape(text)}</a>' for number, text in enumerate(headings))
    body = body.replace("</h1>", f"</h1>\n<nav>{links}</nav>", 1)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{STYLE}</style>\n</head>\n'
        f"<body>\n{body}</body>\n</html>\n"
    )


def _inlined(image: Token, folder: Path) -> str:
    """A picture as a data URL."""
    content = (folder / str(image.attrGet("src"))).read_bytes()
    return f"data:image/png;base64,{base64.b64encode(content).decode('ascii')}"
