"""Which rows each stage trains and validates on, from its flags; without any, its part of the embedded corpus."""

from transformers import PreTrainedTokenizerBase

from dataset.builtin.store import ensure_builtin_corpus
from dataset.lm_dataset import MixtureDataset, PackedDataset, PretrainDataset, SFTDataset
from trainer.config import ROOT, DataArguments

BUILTIN_FOLDER = ROOT / "data" / "builtin"

Data = tuple[PackedDataset, dict[str, PackedDataset]]


def build_pretrain_data(arguments: DataArguments, tokenizer: PreTrainedTokenizerBase, seed: int) -> Data:
    """Documents to train on; validation source "text"."""
    train, validation = _paths(arguments, "pretrain.train", {"text": "pretrain.val"})
    return _build(PretrainDataset, arguments, tokenizer, seed, train, validation, {"text": PretrainDataset})


def build_mid_train_data(arguments: DataArguments, tokenizer: PreTrainedTokenizerBase, seed: int) -> Data:
    """Documents and conversations to train on; validation sources "text" and "chat"."""
    train, validation = _paths(arguments, "midtrain.train", {"text": "pretrain.val", "chat": "sft.val"})
    return _build(
        MixtureDataset, arguments, tokenizer, seed, train, validation, {"text": MixtureDataset, "chat": MixtureDataset}
    )


def build_sft_data(arguments: DataArguments, tokenizer: PreTrainedTokenizerBase, seed: int) -> Data:
    """Conversations to train on; validation source "chat"."""
    train, validation = _paths(arguments, "sft.train", {"chat": "sft.val"})
    return _build(SFTDataset, arguments, tokenizer, seed, train, validation, {"chat": SFTDataset})


def _paths(
    arguments: DataArguments, builtin_train: str, builtin_validation: dict[str, str]
) -> tuple[list[str], dict[str, list[str]] | None]:
    """Training files, and validation files by source name; None: hold rows of the training files out."""
    if arguments.data_path is None:
        corpus = ensure_builtin_corpus(BUILTIN_FOLDER)
        train = [str(corpus[builtin_train])]
        validation = {source: [str(corpus[name])] for source, name in builtin_validation.items()}
    else:
        train, validation = arguments.data_path, None
    if arguments.val_path is not None:
        validation = {source: arguments.val_path for source in builtin_validation}
    return train, validation


def _build(
    kind: type[PackedDataset],
    arguments: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    train_paths: list[str],
    validation_paths: dict[str, list[str]] | None,
    validation_kinds: dict[str, type[PackedDataset]],
) -> Data:
    options = {
        "max_length": arguments.max_seq_len,
        "train_on": arguments.train_on,
        "reasoning": arguments.reasoning,
        "strict": bool(arguments.strict),
        "text_as": arguments.text_as,
        "cache_dir": arguments.cache_dir,
        "seed": seed,
    }
    held_out = validation_paths is None
    train = kind(
        train_paths,
        tokenizer,
        **options,
        packing=bool(arguments.packing),
        loss_on=arguments.loss_on,
        dedup=bool(arguments.dedup),
        part="train" if held_out else "all",
    )
    # Validation is always packed, always on what the assistant says, and never needs a second list of bad rows.
    options["say"] = None
    validation = {}
    for source, validation_kind in validation_kinds.items():
        paths = train_paths if held_out else validation_paths[source]
        if validation_kind is MixtureDataset:
            options["only"] = "document" if source == "text" else "conversation"
        rows = validation_kind(paths, tokenizer, **options, part="validation" if held_out else "all")
        if len(rows):
            validation[source] = rows
    return train, validation
