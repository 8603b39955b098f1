"""Tokenise a stage's data ahead of time, and say what it is: a data card.

Examples:
    python scripts/prepare_data.py --stage full_sft --data_path chats.jsonl
    python scripts/prepare_data.py --stage mid_train --data_path text.jsonl:0.7 chats.jsonl:0.3 --max_seq_len 512

The stage then starts at once, given the same files, tokenizer and data flags.
"""

import gc, pathlib, sys  # noqa: E401

sys.path[0] = sys.path[0] if __package__ else str(pathlib.Path(__file__).resolve().parents[1])
__package__ or gc.disable()  # a fifth of the time of the imports; `user_errors` turns it on again

import dataclasses
import json
import time
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from dataset.card import Sample, describe_data, draw_lengths, samples, samples_page
from dataset.lm_dataset import MixtureDataset
from trainer.config import ROOT, DataArguments, flag, parse_arguments, user_errors
from trainer.data import build_mid_train_data, build_pretrain_data, build_sft_data
from trainer.weights import DEFAULT_TOKENIZER, load_tokenizer

STAGES = {"pretrain": build_pretrain_data, "mid_train": build_mid_train_data, "full_sft": build_sft_data}
WINDOW_OF_STAGES = 256


@dataclasses.dataclass
class CardArguments:
    """For which stage, and where the card goes."""

    _argument_group_name = "card"

    stage: Literal["pretrain", "mid_train", "full_sft"] = flag("pretrain", "the stage that will train on it")
    tokenizer_path: str = flag(str(DEFAULT_TOKENIZER), "tokenizer folder")
    seed: int = flag(42, "seed of the stage: which part of a weighted source is used; and of the samples")
    num_samples: int = flag(10, "samples that are shown")
    save_dir: str = flag(str(ROOT / "out" / "data_card"), "folder of card.json, lengths.png and samples.html")


def print_card(card: dict[str, Any], seconds: float) -> None:
    """The card for people."""
    summary = card["summary"]
    print(f"{'source':48}{'rows':>12}{'unusable':>10}{'tokens':>16}{'passes':>8}")
    for source in card["sources"]:
        name = source["path"] if len(source["path"]) <= 46 else "…" + source["path"][-45:]
        print(
            f"{name:48}{source['rows']:12,}{source['unusable_rows']:10,}{source['tokens']:16,}{source['passes']:8.2f}"
        )
    print(f"\n{'language':12}{'units':>12}{'tokens':>16}{'characters':>16}{'bytes/token':>13}{'characters/token':>18}")
    for name, row in card["languages"].items():
        line = f"{name:12}{row['units']:12,}{row['tokens']:16,}{row['characters']:16,}"
        print(line + f"{row['bytes_per_token']:13.3f}{row['characters_per_token']:18.3f}")
    for name, lengths in card["lengths"].items():
        spread = ", ".join(f"{share} {length:,}" for share, length in lengths.items())
        print(f"\ntokens of {name}, by share that is at most as long: {spread}", end="")
    window = card["window"]
    print(f"\nlonger than the window of {window}: {card['longer_than_window']:,}, shortened: {summary['shortened']:,}")
    for reason, count in summary["skipped"].items():
        print(f"left out: {count:,} {reason}")
    print(
        f"packed: {summary['rows']:,} rows of {window}, {summary['fill_rate']:.2%} filled (padded rows: "
        f"{card['padded_fill_rate']:.0%}); {summary['supervised_tokens']:,} of {summary['tokens']:,} tokens have a loss"
    )
    dropped = f", {summary['duplicates']:,} of them dropped" if summary["duplicates"] else "; --dedup 1 drops them"
    print(f"exact duplicates: {card['exact_duplicates']:,}" + (dropped if card["exact_duplicates"] else ""))
    print(f"ready after {seconds:.1f} s")


def print_samples(found: list[Sample], console: Console) -> None:
    """Samples, what is trained in green; in brackets where there is no colour."""
    opening, closing = ("", "") if console.color_system else ("⟦", "⟧")
    for number, sample in enumerate(found, start=1):
        text = Text(f"\n--- sample {number} ---\n", style="bold")
        for words, trained in sample:
            marked = f"{opening}{words}{closing}" if trained else words
            text.append(marked, style="not bold green" if trained else "not bold dim")
        console.print(text, soft_wrap=True)


def save_card(card: dict[str, Any], data: MixtureDataset, found: list[Sample], folder: Path) -> None:
    """card.json, lengths.png and samples.html.

    Raises:
        ValueError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "card.json").write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        (folder / "samples.html").write_text(samples_page(found), encoding="utf-8")
        draw_lengths(data, folder / "lengths.png")
    except OSError as error:
        raise ValueError(f"--save_dir {folder}: cannot be written ({error})") from error


def main() -> None:
    defaults = {"max_seq_len": WINDOW_OF_STAGES}
    data_arguments, options = parse_arguments(DataArguments, CardArguments, description=__doc__, defaults=defaults)
    if data_arguments.streaming:
        raise ValueError("--streaming 1 tokenises while training; there is nothing to prepare")
    if options.num_samples < 0:
        raise ValueError(f"--num_samples {options.num_samples} must not be negative")
    started = time.perf_counter()
    tokenizer = load_tokenizer(options.tokenizer_path)
    data, validation = STAGES[options.stage](data_arguments, tokenizer, options.seed)
    seconds = time.perf_counter() - started
    card = describe_data(data, tokenizer) | {
        "stage": options.stage,
        "validation": {name: rows.summary.to_dict() for name, rows in validation.items()},
    }
    found = samples(data, tokenizer, options.num_samples, options.seed)
    save_card(card, data, found, Path(options.save_dir))
    print_samples(found, Console())
    print()
    print_card(card, seconds)
    print(f"saved {options.save_dir}: card.json, lengths.png, samples.html")


if __name__ == "__main__":
    with user_errors():
        main()
