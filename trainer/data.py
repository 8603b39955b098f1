"""Which rows each stage trains and validates on, from its flags; without any, its part of the embedded corpus."""

from transformers import PreTrainedTokenizerBase

from dataset.builtin.store import ensure_builtin_corpus
from dataset.lm_dataset import (
    DPODataset,
    MixtureDataset,
    PackedDataset,
    PretrainDataset,
    PromptDataset,
    SFTDataset,
)
from dataset.stream import StreamDataset
from dataset.tokenise import Say
from dataset.units import UnitOptions, mix_problem
from trainer.config import ROOT, DataArguments, changed_flags, raise_problems
from trainer.rollout_data import RolloutData

BUILTIN_FOLDER = ROOT / "data" / "builtin"
# Not for users' own data: of a few conversations that are repeated, each would be seen in one and the same mode alone.
EMBEDDED_MIX = (0.8, 0.1, 0.1)
OF_GIVEN_ANSWERS = ("streaming", "packing", "dedup", "loss_on", "train_on", "reasoning", "thinking_mix", "text_as")
"""Flags without meaning where the model gives the answers itself."""

Data = tuple[PackedDataset | StreamDataset, dict[str, PackedDataset]]
Prompts = tuple[RolloutData, dict[str, PromptDataset]]


def build_pretrain_data(
    arguments: DataArguments, tokenizer: PreTrainedTokenizerBase, seed: int, say: Say | None = print
) -> Data:
    """Documents to train on; validation source "text"."""
    train, validation = _paths(arguments, "pretrain.train", {"text": "pretrain.val"})
    return _build(PretrainDataset, arguments, tokenizer, seed, say, train, validation, {"text": PretrainDataset})


def build_mid_train_data(
    arguments: DataArguments, tokenizer: PreTrainedTokenizerBase, seed: int, say: Say | None = print
) -> Data:
    """Documents and conversations to train on; validation sources "text" and "chat"."""
    train, validation = _paths(arguments, "midtrain.train", {"text": "pretrain.val", "chat": "sft.val"})
    return _build(
        MixtureDataset,
        arguments,
        tokenizer,
        seed,
        say,
        train,
        validation,
        {"text": MixtureDataset, "chat": MixtureDataset},
    )


def build_sft_data(
    arguments: DataArguments, tokenizer: PreTrainedTokenizerBase, seed: int, say: Say | None = print
) -> Data:
    """Conversations to train on; validation source "chat"."""
    train, validation = _paths(arguments, "sft.train", {"chat": "sft.val"})
    return _build(SFTDataset, arguments, tokenizer, seed, say, train, validation, {"chat": SFTDataset})


def build_preference_data(
    arguments: DataArguments, tokenizer: PreTrainedTokenizerBase, seed: int, say: Say | None = print
) -> Data:
    """Pairs of a chosen and a rejected conversation to train on; validation source "pairs"."""
    problems = []
    if arguments.streaming:
        problems.append("--streaming 1: the reference's log-probabilities of all pairs are computed first; use 0")
    if not arguments.packing:
        problems.append("--packing 0: both sides of a pair share a row; use 1")
    raise_problems(problems)
    train, validation = _paths(arguments, "dpo.train", {"pairs": "dpo.val"})
    return _build(DPODataset, arguments, tokenizer, seed, say, train, validation, {"pairs": DPODataset})


def build_prompt_data(
    arguments: DataArguments, tokenizer: PreTrainedTokenizerBase, seed: int, say: Say | None = print
) -> Prompts:
    """Prompts to learn on by rollouts, of the embedded ones those without tools; validation source "prompts"."""
    return _build_rollouts(arguments, tokenizer, say, with_tools=False)


def build_tool_data(
    arguments: DataArguments, tokenizer: PreTrainedTokenizerBase, seed: int, say: Say | None = print
) -> Prompts:
    """Prompts with tools to learn on by rollouts; validation source "prompts"."""
    return _build_rollouts(arguments, tokenizer, say, with_tools=True)


def _build_rollouts(
    arguments: DataArguments, tokenizer: PreTrainedTokenizerBase, say: Say | None, with_tools: bool
) -> Prompts:
    unfit = changed_flags(arguments, OF_GIVEN_ANSWERS)
    if unfit.get("thinking_mix") == [1, 0, 0]:
        del unfit["thinking_mix"]
    raise_problems([f"--{name} {value} does not go with rollouts" for name, value in unfit.items()])
    train, validation = _paths(arguments, "rl.train", {"prompts": "rl.val"})
    common = {"max_length": arguments.max_seq_len, "strict": bool(arguments.strict)}
    part = "train" if validation is None else "all"
    prompts = PromptDataset(train, tokenizer, part=part, say=say, **common)
    if validation is None:
        held_out = PromptDataset(train, tokenizer, part="validation", say=None, **common)
    else:
        held_out = PromptDataset(validation["prompts"], tokenizer, say=None, **common)
    if with_tools or arguments.data_path is None:
        others = f"with{'out' * with_tools} tools"
        prompts.keep(lambda item: bool(item["tools"]) == with_tools, others)
        held_out.items = [item for item in held_out.items if bool(item["tools"]) == with_tools]
    return RolloutData(prompts), {"prompts": held_out} if len(held_out) else {}


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
    kind: type[MixtureDataset],
    arguments: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    say: Say | None,
    train_paths: list[str],
    validation_paths: dict[str, list[str]] | None,
    validation_kinds: dict[str, type[MixtureDataset]],
) -> Data:
    held_out = validation_paths is None
    of_embedded = EMBEDDED_MIX if kind is SFTDataset and arguments.data_path is None else (1.0, 0.0, 0.0)
    mix = tuple(arguments.thinking_mix or of_embedded)
    if problem := mix_problem(mix):
        raise ValueError(f"--thinking_mix {' '.join(f'{share:g}' for share in mix)} {problem}")
    rules = {"train_on": arguments.train_on, "reasoning": arguments.reasoning, "thinking_mix": mix}
    common = {"text_as": arguments.text_as, "strict": bool(arguments.strict), "seed": seed}
    stored = {"max_length": arguments.max_seq_len, "cache_dir": arguments.cache_dir} | rules | common
    if arguments.streaming:
        options = UnitOptions(kind.kinds, arguments.max_seq_len, **rules)
        train = StreamDataset(kind, train_paths, tokenizer, options, arguments.loss_on, held_out, say=say, **common)
    else:
        train = kind(
            train_paths,
            tokenizer,
            packing=bool(arguments.packing),
            loss_on=arguments.loss_on,
            dedup=bool(arguments.dedup),
            part="train" if held_out else "all",
            say=say,
            **stored,
        )
    # Validation is always packed, always on what the assistant says, and never needs a second list of bad rows.
    validation = {}
    for source, validation_kind in validation_kinds.items():
        only = None
        if validation_kind is MixtureDataset:
            only = "document" if source == "text" else "conversation"
        if held_out and arguments.streaming:
            rows = train.validation(validation_kind, only)
        else:
            paths, part = (train_paths, "validation") if held_out else (validation_paths[source], "all")
            rows = validation_kind(paths, tokenizer, only=only, part=part, say=None, **stored)
        if len(rows):
            validation[source] = rows
    return train, validation
