"""Train a byte-level BPE tokenizer on a stream of documents, and say how well it compresses.

python scripts/train_tokenizer.py --data_path corpus.jsonl --vocab_size 6400 --save_dir out/tokenizer
"""

import gc, pathlib, sys  # noqa: E401

sys.path[0] = sys.path[0] if __package__ else str(pathlib.Path(__file__).resolve().parents[1])
__package__ or gc.disable()  # a fifth of the time of the imports; `user_errors` turns it on again

import dataclasses
import itertools
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from dataset.builtin.store import ensure_builtin_corpus
from dataset.chat import ChatTemplate
from dataset.formats import messages_from_row, row_kind, text_from_row
from dataset.sources import Part, RowReader, split_held_out
from eval.tokenization import count_texts, failed_round_trips, open_tokenizer
from trainer.config import ROOT, flag, parse_arguments, user_errors

TEMPLATE_PATH = ROOT / "model" / "tokenizer" / "chat_template.jinja"
BUILTIN_PARTS = ("pretrain", "midtrain", "sft")

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Added but not "special": they survive decode(skip_special_tokens=True), for whoever parses a reply.
MARKUP_TOKENS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
SPARE_TOKENS = [f"<|buffer{number}|>" for number in range(1, 28)]
RESERVED_TOKENS = [*SPECIAL_TOKENS, *MARKUP_TOKENS, *SPARE_TOKENS]

# The split pattern of Qwen2's tokenizer. transformers puts it into any tokenizer of a qwen3 folder and llama.cpp knows
# it as "qwen2": with it from the start, all of them cut text alike. Digits stand alone, which arithmetic needs.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Chinese is written without spaces, so this pattern takes a whole clause as one word, with the punctuation before it,
# and a corpus that repeats itself turns clauses into tokens: unlimited, the embedded corpus gives "the day after
# Tuesday is Thursday" as one token, and a model cannot learn from facts that it never sees in parts. So tokens are
# learned from text that is cut further: Chinese is parted from punctuation, its five most common particles stand
# alone, and no token has as many as 12 bytes (three Chinese characters, or eleven letters). Encoding needs none of
# this: what was never merged in training is not merged there.
LEARNING_PATTERNS = ("[\u3400-\u9fff]+", "[的是在了和]")
TOKEN_BYTES_LIMIT = 12
MODEL_MAX_LENGTH = 32768
MIN_VOCABULARY = len(RESERVED_TOKENS) + 256
MAX_REPORT_CHARACTERS = 4_000_000
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tokenizer_report.json")

HARD_STRINGS = [
    "", " ", "\n\n \n", "  two  spaces ", "naïve café e\u0301 \u212b ﬁ", "你好，世界！\u3000全角",
    "😀👩\u200d👩\u200d👧 \U0001f1e8\U0001f1f3", "don't WE'LL 12345 3.14159", "\t\ttabs\r\n",
    "<|im_end|> <think> </tool_call>", "\x00\x7f\u0378 \ue000", 'if x == "}":\n    return {"a": [1, 2]}\n',
    "한국어 العربية עברית ไทย",
]  # fmt: skip


@dataclasses.dataclass
class DataArguments:
    """What it is trained on."""

    _argument_group_name = "data"

    data_path: list[str] | None = dataclasses.field(
        default=None,
        metadata={"help": "jsonl, json, csv, parquet, txt, folders or hub:OWNER/NAME; default: the embedded corpus"},
    )
    val_path: list[str] | None = dataclasses.field(
        default=None, metadata={"help": "text that compression is measured on; default: held-out rows of the data"}
    )
    max_documents: int = flag(0, "train on this many documents at most; 0: all")


@dataclasses.dataclass
class TokenizerArguments:
    """What comes out."""

    _argument_group_name = "tokenizer"

    vocab_size: int = flag(6400, "number of tokens, the 36 reserved ones and 256 bytes included")
    save_dir: str = flag(str(ROOT / "out" / "tokenizer"), "folder that is written")
    compare_with: str | None = flag(None, "folder of another tokenizer, measured beside the new one")


def documents(paths: list[str], part: Part, quiet: bool = False) -> Iterator[list[str]]:
    """The rows, one at a time, each as the stretches of text that will be encoded whole: one for a document; for a
    conversation what its template writes, the names of roles included, cut at control tokens."""
    template = ChatTemplate(TEMPLATE_PATH.read_text(encoding="utf-8"), RESERVED_TOKENS)
    reader = RowReader(paths, say=None if quiet else print)
    for row in split_held_out(reader, part):
        try:
            if row_kind(row.value) == "text":
                yield [text_from_row(row.value)]
            else:
                pieces = template.pieces(*messages_from_row(row.value))
                yield [piece.text for piece in pieces if not piece.is_control]
        except ValueError as error:
            reader.reject(row, str(error))
    reader.check()


def splitter(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Cut text by each pattern in turn, keeping everything, then write bytes in the byte-level alphabet."""
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def train(texts: Iterator[list[str]], vocab_size: int) -> Tokenizer:
    """Byte-level BPE over a stream of documents. The same documents give the same tokenizer.

    Raises:
        ValueError: the vocabulary has no room for the reserved tokens and the 256 bytes.
    """
    if vocab_size < MIN_VOCABULARY:
        raise ValueError(f"--vocab_size {vocab_size} must be at least {MIN_VOCABULARY}: 36 reserved tokens, 256 bytes")
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.NFC()
    learner.pre_tokenizer = splitter(SPLIT_PATTERN, *LEARNING_PATTERNS)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=RESERVED_TOKENS, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), max_token_length=TOKEN_BYTES_LIMIT,
    )  # fmt: skip
    learner.train_from_iterator(texts, trainer)
    # The trainer would mark all of its reserved tokens as special: only its vocabulary and merges are taken over.
    learned = json.loads(learner.to_str())["model"]
    merges = [tuple(pair) for pair in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=learned["vocab"], merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitter(SPLIT_PATTERN)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [AddedToken(token, special=token not in MARKUP_TOKENS, normalized=False) for token in RESERVED_TOKENS]
    )
    assert [tokenizer.token_to_id(token) for token in RESERVED_TOKENS] == list(range(len(RESERVED_TOKENS)))
    return tokenizer


def tokenizer_config() -> dict:
    """tokenizer_config.json. The class is the one that a qwen3 folder gets; transformers 4 reads the decoder."""
    decoder = {
        str(index): {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": token not in MARKUP_TOKENS,
        }
        for index, token in enumerate(RESERVED_TOKENS)
    }  # fmt: skip
    return {
        "add_prefix_space": False, "added_tokens_decoder": decoder, "bos_token": "<|im_start|>",
        "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "model_max_length": MODEL_MAX_LENGTH,
        "pad_token": "<|endoftext|>", "split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": "<|endoftext|>",
    }  # fmt: skip


def measure(tokenizer: Tokenizer, texts: list[list[str]]) -> dict[str, dict[str, float]]:
    """Compression by language and in all; see `eval.tokenization`."""
    return {name: counts.to_dict() for name, counts in count_texts(tokenizer, texts).items()}


def describe(tokenizer: Tokenizer, held_out: list[list[str]], compare_with: str | None) -> dict:
    """The report: sizes, round trip, compression by language on held-out text, the same of another tokenizer."""
    round_trips = [*itertools.chain.from_iterable(held_out), *HARD_STRINGS]
    report = {
        "vocabulary": tokenizer.get_vocab_size(),
        "reserved_tokens": len(RESERVED_TOKENS),
        "longest_token_bytes": max(len(token) for token in tokenizer.get_vocab() if token not in RESERVED_TOKENS),
        "round_trip": {
            "texts": len(round_trips),
            "failed": len(failed_round_trips(tokenizer, round_trips)),
        },
        "compression": measure(tokenizer, held_out),
    }
    if compare_with:
        other = open_tokenizer(compare_with, "--compare_with")
        report["compared_with"] = {"name": Path(compare_with).name, "vocabulary": len(other)}
        report["compared_with"]["compression"] = measure(other.backend_tokenizer, held_out)
    return report


def print_report(report: dict) -> None:
    """The report for people."""
    trip = report["round_trip"]
    print(f"vocabulary {report['vocabulary']:,}, longest token {report['longest_token_bytes']} bytes")
    print(f"round trip: {trip['texts'] - trip['failed']:,} of {trip['texts']:,} texts come back exactly (NFC)")
    old = report.get("compared_with", {}).get("compression")
    header = f"{'held-out text':16}{'documents':>10}{'tokens':>11}{'bytes/token':>13}{'characters/token':>18}"
    print(header + (f"{'old bytes/token':>17}{'new/old tokens':>16}" if old else ""))
    for name, row in report["compression"].items():
        line = f"  {name:14}{row['documents']:10,}{row['tokens']:11,}"
        line += f"{row['bytes_per_token']:13.3f}{row['characters_per_token']:18.3f}"
        if old:
            line += f"{old[name]['bytes_per_token']:17.3f}{row['tokens'] / max(old[name]['tokens'], 1):16.3f}"
        print(line)


def check_save_dir(folder: Path) -> None:
    """Raise ValueError where writing a tokenizer would destroy something else."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--save_dir {folder} is a file; give a folder")
    foreign = sorted(entry.name for entry in folder.iterdir() if entry.name not in FILES) if folder.exists() else []
    if foreign:
        raise ValueError(f"--save_dir {folder} holds other things ({', '.join(foreign[:3])}); give a new folder")


def save(tokenizer: Tokenizer, report: dict, folder: Path) -> None:
    """Write the folder whole or not at all: under another name first, then renamed."""
    template = TEMPLATE_PATH.read_text(encoding="utf-8")
    fresh = folder.with_name(f".{folder.name}.new")
    stale = folder.with_name(f".{folder.name}.old")
    for leftover in (fresh, stale):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir(parents=True)
    contents = {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(tokenizer_config(), indent=2),
        "chat_template.jinja": template.removesuffix("\n"),
        "tokenizer_report.json": json.dumps(report, indent=2),
    }
    for name, text in contents.items():
        (fresh / name).write_text(text + "\n", encoding="utf-8")
    if folder.exists():
        folder.rename(stale)
    fresh.rename(folder)
    shutil.rmtree(stale, ignore_errors=True)


def main() -> None:
    data, options = parse_arguments(DataArguments, TokenizerArguments, description=__doc__)
    if data.max_documents < 0:
        raise ValueError(f"--max_documents {data.max_documents} must not be negative")
    folder = Path(options.save_dir)
    check_save_dir(folder)
    if options.compare_with:
        open_tokenizer(options.compare_with, "--compare_with")  # before the long part
    train_paths, val_paths = data.data_path, data.val_path
    if train_paths is None:
        files = ensure_builtin_corpus(ROOT / "data" / "builtin")
        train_paths = [str(files[f"{part}.train"]) for part in BUILTIN_PARTS]
        val_paths = val_paths or [str(files[f"{part}.val"]) for part in BUILTIN_PARTS]
    started = time.perf_counter()
    texts = documents(train_paths, "all" if val_paths else "train")
    tokenizer = train(itertools.islice(texts, data.max_documents or None), options.vocab_size)
    held_out, characters = [], 0
    for stretches in documents(val_paths or train_paths, "all" if val_paths else "validation", quiet=True):
        held_out.append(stretches)
        characters += sum(map(len, stretches))
        if characters > MAX_REPORT_CHARACTERS:
            break
    report = describe(tokenizer, held_out, options.compare_with)
    save(tokenizer, report, folder)
    print_report(report)
    if report["vocabulary"] < options.vocab_size:
        print(f"no pair of tokens is left that occurs twice: {report['vocabulary']:,} of {options.vocab_size:,} tokens")
    print(f"saved {folder} after {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    with user_errors():
        main()
