"""Weights in: what `--from_weight`, `--weight` and `--model_path` mean, and the model that a run starts from."""

import itertools
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from model.config import PRESETS, MiniMindConfig
from model.convert import config_from_state, state_from_minimind
from model.induction import start_with_induction
from model.model_minimind import MiniMindForCausalLM, load_model
from trainer.checkpoint import load_verified
from trainer.config import ROOT, FolderChoice, ModelArguments, raise_problems

DEFAULT_TOKENIZER = ROOT / "model" / "tokenizer"

COMMAND_FOR = {
    "pretrain": "python trainer/train_pretrain.py",
    "mid_train": "python scripts/mid_train.py",
    "full_sft": "python trainer/train_full_sft.py",
    "distillation": "python trainer/train_distillation.py",
    "dpo": "python trainer/train_dpo.py",
}
"""Which command makes the weights of each stage's default name."""

ADAPTER_CONFIG = "adapter_config.json"
"""The file that tells an adapter's folder from a model's."""

SHAPE_FLAGS = ("hidden_size", "num_hidden_layers", "use_moe", "num_experts", "num_experts_per_tok", "norm_topk_prob")


def find_weight(
    name: str, save_dir: str | Path, hidden_size: int | None = None, use_moe: int | None = None
) -> Path | None:
    """The newest finished model of a stage in `save_dir` that has the wanted width and kind, or None.

    Args:
        name: a stage's name, such as "pretrain".
        hidden_size: only this width, if given.
        use_moe: only MoE (1) or dense (0) models, if given.
    """
    found = []
    configs = (Path(save_dir).glob(f"{name}_*/{file}") for file in ("config.json", ADAPTER_CONFIG))
    for config_path in itertools.chain(*configs):
        width, _, kind = config_path.parent.name.removeprefix(f"{name}_").partition("_")
        if not width.isdigit() or kind not in ("", "moe"):
            continue
        if hidden_size not in (None, int(width)) or use_moe not in (None, int(kind == "moe")):
            continue
        found.append(config_path)
    return max(found, key=lambda path: path.stat().st_mtime).parent if found else None


def find_folder(choice: FolderChoice) -> Path:
    """The model folder that the flags name.

    Raises:
        ValueError: there is none; the message has the command that makes it.
    """
    if choice.model_path is not None:
        folder = Path(choice.model_path)
        if (folder / ADAPTER_CONFIG).is_file():
            return folder
        if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            raise ValueError(f"--model_path {folder}: no model there (it needs config.json and *.safetensors)")
        return folder
    found = find_weight(choice.weight, choice.save_dir, choice.hidden_size, choice.use_moe)
    if found is None:
        command = COMMAND_FOR.get(choice.weight)
        way_out = f"make it with: {command}" if command else f"finished stages are {', '.join(COMMAND_FOR)}"
        raise ValueError(f"--weight {choice.weight}: no such finished model in {choice.save_dir}; {way_out}")
    return found


def find_model(choice: FolderChoice) -> Path:
    """The model folder that the flags name, or the GGUF file.

    Raises:
        ValueError: there is none.
    """
    if choice.model_path is None or not choice.model_path.endswith(".gguf"):
        return find_folder(choice)
    if not Path(choice.model_path).is_file():
        raise ValueError(f"--model_path {choice.model_path}: no such file")
    return Path(choice.model_path)


def resolve_from_weight(arguments: ModelArguments, save_dir: str, candidates: tuple[str, ...]) -> Path | None:
    """The folder or `.pth` file that `--from_weight` names, or None to start from random weights.

    Args:
        arguments: the model flags.
        save_dir: where stages leave their results.
        candidates: what "auto" looks for, the best first.

    Raises:
        ValueError: nothing by that name; the message has the command that makes it.
    """
    name = arguments.from_weight
    if name == "none":
        return None
    if "/" in name or name.endswith(".pth") or Path(name).is_dir():
        path = Path(name)
        if not path.exists():
            raise ValueError(f"--from_weight {name}: no such file or folder")
        return path
    names = candidates if name == "auto" else (name,)
    for candidate in names:
        found = find_weight(candidate, save_dir, arguments.hidden_size, arguments.use_moe)
        if found is not None:
            return found
    wanted = "".join(
        f", {flag} {value}" for flag in ("hidden_size", "use_moe") if (value := getattr(arguments, flag)) is not None
    )
    commands = " or ".join(COMMAND_FOR[candidate] for candidate in names if candidate in COMMAND_FOR)
    raise ValueError(
        f"--from_weight {name}: no finished model named {' or '.join(names)}{wanted} in {save_dir}"
        + (f"; make it with: {commands}" if commands else "; give a folder, a .pth file, or a stage's name")
    )


def open_model(folder: Path) -> MiniMindForCausalLM:
    """The float32 model of a folder; of an adapter's folder, its base with the adapter merged in.

    Raises:
        ValueError: the weights do not fit their config, or the adapter its base.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        try:
            return load_model(str(folder))
        except SafetensorError as error:
            raise ValueError(f"{folder}: the weights cannot be read, the file is damaged: {error}") from error
    try:
        from trainer.lora import open_merged  # PEFT takes seconds to import
    except ModuleNotFoundError as error:
        raise ValueError(f"{folder} is an adapter, which needs the package {error.name}") from error
    return open_merged(folder)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder.

    Raises:
        ValueError: the folder is missing or holds no tokenizer.
    """
    if not (Path(path) / "tokenizer.json").is_file():
        raise ValueError(f"{path}: no tokenizer.json there; make one with: python scripts/train_tokenizer.py")
    try:
        return AutoTokenizer.from_pretrained(str(path))
    except Exception as error:  # the Rust tokenizer raises bare Exception for a broken file
        raise ValueError(f"{path}: the tokenizer cannot be read: {error}") from error


def init_model(
    arguments: ModelArguments, source: Path | None, device: torch.device, max_seq_len: int
) -> tuple[MiniMindForCausalLM, PreTrainedTokenizerBase, list[str]]:
    """The tokenizer and the float32 model that a run starts from, and notes on what was picked and why.

    `source` is what `resolve_from_weight` found.

    Raises:
        ValueError: weights that do not fit the flags or the tokenizer.
    """
    transformers.utils.logging.disable_progress_bar()  # small models load and save in a moment
    own_tokenizer = source is not None and source.is_dir() and (source / "tokenizer.json").is_file()
    tokenizer_path = arguments.tokenizer_path or (source if own_tokenizer else DEFAULT_TOKENIZER)
    tokenizer = load_tokenizer(tokenizer_path)
    notes = [f"tokenizer: {tokenizer_path} ({len(tokenizer):,} tokens)"]
    if source is None:
        model, preset_note = _random_model(arguments, tokenizer, device, max_seq_len)
        notes.append(preset_note)
        if arguments.init == "induction":
            small = "random; --init induction needs 2 layers, 2 heads and a hidden size of 3 heads"
            copying = "attention that copies from the context (--init induction)"
            notes.append(f"start: {copying if start_with_induction(model) else small}")
    else:
        model = open_model(source) if source.is_dir() else _model_from_pth(source, arguments, tokenizer)
        _check_shape_flags(arguments, model.config, source)
        if arguments.dropout is not None:
            _set_dropout(model, arguments.dropout)
        if arguments.router_aux_loss_coef is not None:
            model.config.router_aux_loss_coef = arguments.router_aux_loss_coef
        why = " (picked by auto)" if arguments.from_weight == "auto" else ""
        notes.append(f"weights: {source}{why}")
        if model.config.router_frozen:
            notes.append("router: frozen, since one expert per token with normalised weights gives it no gradient")
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer in {tokenizer_path} has {len(tokenizer):,} tokens, more than the "
            f"{model.config.vocab_size:,} of the weights in {source}; use the tokenizer that they were trained with "
            "(--tokenizer_path)"
        )
    # `from_pretrained` leaves a model in evaluation mode: without dropout and activation checkpointing.
    return model.to(device=device, dtype=torch.float32).train(), tokenizer, notes


def _random_model(
    arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase, device: torch.device, max_seq_len: int
) -> tuple[MiniMindForCausalLM, str]:
    preset, why = arguments.preset, "asked for by --preset"
    if preset == "auto":
        dense = "base" if device.type == "cuda" else "nano"
        preset = f"{dense}-moe" if arguments.use_moe else dense
        why = f"picked for this {device.type}"
    if preset not in PRESETS:
        raise ValueError(f"--preset {preset}: unknown; use one of auto, {', '.join(PRESETS)}")
    overrides: dict[str, Any] = {
        flag: getattr(arguments, flag)
        for flag in (*SHAPE_FLAGS, "dropout", "router_aux_loss_coef")
        if getattr(arguments, flag) is not None
    }
    overrides |= {flag: bool(overrides[flag]) for flag in ("use_moe", "norm_topk_prob") if flag in overrides}
    # A vocabulary of whole multiples of 64 keeps the head's matrix product on fast tile sizes.
    overrides["vocab_size"] = -(-len(tokenizer) // 64) * 64
    overrides |= {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = MiniMindConfig.from_preset(preset, overrides)
    if max_seq_len > config.max_position_embeddings:
        raise ValueError(f"--max_seq_len {max_seq_len} exceeds the model's {config.max_position_embeddings} positions")
    return MiniMindForCausalLM(config), f"preset: {preset} ({why})"


def _check_shape_flags(arguments: ModelArguments, config: MiniMindConfig, source: Path) -> None:
    wanted = {flag: getattr(arguments, flag) for flag in SHAPE_FLAGS}
    if arguments.preset != "auto":
        if arguments.preset not in PRESETS:
            raise ValueError(f"--preset {arguments.preset}: unknown; use one of auto, {', '.join(PRESETS)}")
        preset = MiniMindConfig.from_preset(arguments.preset)
        shape = SHAPE_FLAGS if preset.use_moe else SHAPE_FLAGS[:3]
        wanted = {flag: getattr(preset, flag) for flag in shape} | {f: v for f, v in wanted.items() if v is not None}
    raise_problems(
        [
            f"--{flag} {value} contradicts {source}, whose {flag} is {getattr(config, flag)}; leave the flag out"
            for flag, value in wanted.items()
            if value is not None and value != getattr(config, flag)
        ]
    )


def _set_dropout(model: MiniMindForCausalLM, dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise ValueError(f"--dropout {dropout} must lie in [0, 1)")
    model.config.dropout = dropout
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
        elif hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = dropout


def _model_from_pth(path: Path, arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> MiniMindForCausalLM:
    """A plain state dict with MiniMind's parameter names (RoPE tables dropped), or a checkpoint of ours.

    Raises:
        ValueError: the file is damaged, or its tensors are not those of one model.
    """
    content = load_verified(path)
    own_checkpoint = isinstance(content, dict) and isinstance(content.get("model"), dict)
    state = content["model"] if own_checkpoint else content
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError(f"--from_weight {path}: not a state dict; expected parameter names and tensors")
    try:
        state = state_from_minimind(state)
        fields = content["config"] if own_checkpoint else config_from_state(state)
    except ValueError as error:
        raise ValueError(f"--from_weight {path}: {error}") from error
    if not own_checkpoint:
        special = ("bos_token_id", "eos_token_id", "pad_token_id")
        fields |= {name: getattr(tokenizer, name) for name in special}
        chosen = arguments.num_experts_per_tok
        if fields.get("use_moe") and chosen is not None:
            fields |= {"num_experts_per_tok": chosen, "router_frozen": chosen == 1}
    model = MiniMindForCausalLM(MiniMindConfig(**fields))
    state = {name: tensor for name, tensor in state.items() if not (own_checkpoint and name.startswith("critic."))}
    expected = model.state_dict()
    problems = [f"{name} is missing" for name in expected if name not in state]
    problems += [f"{name} is not a parameter of this model" for name in state if name not in expected]
    problems += [
        f"{name} has shape {tuple(state[name].shape)} and should have {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in state and state[name].shape != tensor.shape
    ]
    if problems:
        shown = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
        raise ValueError(f"--from_weight {path}: {shown}")
    model.load_state_dict(state)
    return model


def trained_window(folder: Path) -> int | None:
    """Tokens that the model saw at once in training, from its run.json; None for one of another trainer's."""
    try:
        return int(json.loads((folder / "run.json").read_text(encoding="utf-8"))["settings"]["data"]["max_seq_len"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
