"""Tokenizers beside one another on the same text: compression and fertility by domain and language, waste, speed.

Examples:
    python eval/eval_tokenizer.py --tokenizer_path out/tokenizer model/tokenizer
    python eval/eval_tokenizer.py --tokenizer_path out/tokenizer ~/models/Qwen3-0.6B --data_path books.jsonl code.txt
"""

import gc, pathlib, sys  # noqa: E401

sys.path[0] = sys.path[0] if __package__ else str(pathlib.Path(__file__).resolve().parents[1])
__package__ or gc.disable()  # a fifth of the time of the imports; `user_errors` turns it on again

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from transformers import PreTrainedTokenizerBase

from dataset.builtin.store import ensure_builtin_corpus
from eval.texts import text_of_any_row, texts_of
from eval.tokenization import encoding_rates, open_tokenizer, tokenizer_report
from trainer.config import flag, output_problems, parse_arguments, raise_problems, user_errors
from trainer.data import BUILTIN_FOLDER
from trainer.weights import DEFAULT_TOKENIZER

SHOWN_TOKENS = 10


@dataclasses.dataclass
class TokenizerEvaluation:
    """What is measured."""

    _argument_group_name = "tokenizers"

    tokenizer_path: list[str] = dataclasses.field(
        default_factory=lambda: [str(DEFAULT_TOKENIZER)],
        metadata={"help": "tokenizer folders; token counts are given as multiples of the first one's"},
    )
    data_path: list[str] | None = dataclasses.field(
        default=None, metadata={"help": "text or chats, a domain for each path; default: the embedded validation rows"}
    )
    max_characters: int = flag(10_000_000, "characters taken of each domain; 0: all")
    output: str | None = flag(None, "JSON file of all figures, unreachable tokens in full")

    def problems(self) -> list[str]:
        """What is missing or out of range, by flag."""
        found = []
        if len(set(self.tokenizer_path)) < len(self.tokenizer_path):
            found.append("--tokenizer_path: a folder is named twice")
        found += output_problems(self.output, self.data_path or [])
        if self.max_characters < 0:
            found.append(f"--max_characters {self.max_characters} must not be negative")
        return found


def read_domains(paths: Sequence[str] | None, max_characters: int) -> dict[str, list[str]]:
    """The texts of each domain: a path of `--data_path`, or a part of the embedded corpus."""
    if paths is None:
        files = ensure_builtin_corpus(BUILTIN_FOLDER)
        named = {name.removesuffix(".val"): str(path) for name, path in files.items() if name.endswith(".val")}
    else:
        named = {path: path for path in paths}
    domains = {}
    for name, path in named.items():
        domains[name], characters = [], 0
        for _, text in texts_of([path], text_of_any_row, name):
            domains[name].append(text)
            characters += len(text)
            if max_characters and characters >= max_characters:
                print(f"{name}: its first {len(domains[name]):,} rows, {characters:,} characters")
                break
    return domains


def report_of(name: str, tokenizer: PreTrainedTokenizerBase, domains: dict[str, list[str]]) -> dict[str, Any]:
    """`tokenizer_report`, with a tokenizer that cannot encode the text named."""
    try:
        return tokenizer_report(tokenizer, domains)
    except Exception as error:  # the library raises its own type, Exception, such as for a missing unknown token
        raise ValueError(f"--tokenizer_path {name}: it cannot be measured on this text: {error!r}") from error


def print_reports(reports: dict[str, dict[str, Any]], console: Console) -> None:
    """Two tables: what each tokenizer is, and how it does by domain and language."""
    about = _table(["tokenizer"], ["vocabulary", "unreachable", "unused here", "texts come back", "MB/s"])
    for name, report in reports.items():
        unreachable = report["unreachable"]
        back = report["texts"] - report["failed_round_trips"]
        about.add_row(
            escape(name), f"{report['vocabulary']:,}", "-" if unreachable is None else f"{len(unreachable):,}",
            f"{report['unused']:,}", f"{back:,} of {report['texts']:,}", f"{report['megabytes_per_second']:.1f}",
        )  # fmt: skip
    console.print(about)
    figures = ["documents", "tokens", "of the first's", "bytes/token", "characters/token", "tokens/word"]
    table = _table(["domain", "language", "tokenizer"], figures)
    first = next(iter(reports.values()))
    for domain, languages in first["domains"].items():
        for language, base in languages.items():
            if language == "all" and len(languages) == 2:  # the same as that of the only language
                continue
            for name, report in reports.items():
                row = report["domains"][domain][language]
                table.add_row(
                    escape(domain), language, escape(name), f"{row['documents']:,}", f"{row['tokens']:,}",
                    f"{row['tokens'] / max(base['tokens'], 1):.3f}", f"{row['bytes_per_token']:.3f}",
                    f"{row['characters_per_token']:.3f}", f"{row['tokens_per_word']:.3f}",
                )  # fmt: skip
    console.print(table)
    for name, report in reports.items():
        if report["unreachable"]:
            shown = ", ".join(map(repr, report["unreachable"][:SHOWN_TOKENS]))
            more = ", …" if len(report["unreachable"]) > SHOWN_TOKENS else ""
            print(f"{name}: no text is ever encoded to {shown}{more}")


def _table(words: Sequence[str], figures: Sequence[str]) -> Table:
    columns = [Column(word) for word in words] + [Column(figure, justify="right") for figure in figures]
    return Table(*columns)


def main() -> None:
    """Entry point."""
    (arguments,) = parse_arguments(TokenizerEvaluation, description=__doc__.split("\n", 1)[0])
    raise_problems(arguments.problems())
    tokenizers = {path: open_tokenizer(path, "--tokenizer_path") for path in arguments.tokenizer_path}
    domains = read_domains(arguments.data_path, arguments.max_characters)
    reports = {name: report_of(name, tokenizer, domains) for name, tokenizer in tokenizers.items()}
    texts = [text for its_texts in domains.values() for text in its_texts]
    rates = encoding_rates([tokenizer.backend_tokenizer for tokenizer in tokenizers.values()], texts)
    for report, rate in zip(reports.values(), rates, strict=True):
        report["megabytes_per_second"] = rate
    print_reports(reports, Console(width=None if sys.stdout.isatty() else 160))
    if arguments.output:
        try:
            Path(arguments.output).write_text(json.dumps(reports, indent=1, ensure_ascii=False) + "\n", "utf-8")
        except OSError as error:
            raise ValueError(f"--output {arguments.output}: could not be written: {error}") from error
        print(f"saved {arguments.output}")


if __name__ == "__main__":
    with user_errors():
        main()
