"""Weights in and out: what `--from_weight` means, the model a run starts from, and the folder that it leaves behind."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from model.config import PRESETS, MiniMindConfig
from model.convert import config_from_state, state_from_minimind
from model.induction import start_with_induction
from model.model_minimind import MiniMindForCausalLM, load_model
from trainer.checkpoint import load_verified, replacing
from trainer.config import ROOT, FolderChoice, ModelArguments, raise_problems

DEFAULT_TOKENIZER = ROOT / "model" / "tokenizer"

COMMAND_FOR = {
    "pretrain": "python trainer/train_pretrain.py",
    "mid_train": "python scripts/mid_train.py",
    "full_sft": "python trainer/train_full_sft.py",
}
"""Which command makes the weights of each stage's default name."""

SHAPE_FLAGS = ("hidden_size", "num_hidden_layers", "use_moe", "num_experts", "num_experts_per_tok", "norm_topk_prob")


def result_folder(save_dir: str | Path, name: str, config: MiniMindConfig) -> Path:
    """Where a run leaves its model: SAVE_DIR/NAME_HIDDEN[_moe]."""
    return Path(save_dir) / f"{name}_{config.hidden_size}{'_moe' if config.use_moe else ''}"


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
    for config_path in Path(save_dir).glob(f"{name}_*/config.json"):
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
    arguments: ModelArguments, save_dir: str, candidates: tuple[str, ...], device: torch.device, max_seq_len: int
) -> tuple[MiniMindForCausalLM, PreTrainedTokenizerBase, list[str]]:
    """The tokenizer and the float32 model that a run starts from, and notes on what was picked and why.

    Raises:
        ValueError: weights that do not exist or do not fit the flags or the tokenizer.
    """
    transformers.utils.logging.disable_progress_bar()  # small models load and save in a moment
    source = resolve_from_weight(arguments, save_dir, candidates)
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
        model = load_model(source) if source.is_dir() else _model_from_pth(source, arguments, tokenizer)
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
    return model.to(device=device, dtype=torch.float32), tokenizer, notes


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


def check_result_folder(folder: Path, config: MiniMindConfig) -> None:
    """Refuse, before any work, to put a model where one of another shape lies.

    Raises:
        ValueError: the folder holds a model of another shape, or something else.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: exists and holds no model; choose another --save_weight or --save_dir")
    there = MiniMindConfig.from_pretrained(str(folder))
    raise_problems(
        [
            f"{folder}: holds a model whose {flag} is {getattr(there, flag)}, this run's is {getattr(config, flag)}; "
            "choose another --save_weight, or move the folder away"
            for flag in (*SHAPE_FLAGS, "vocab_size")
            if getattr(there, flag) != getattr(config, flag)
        ]
    )


def save_result(
    model: MiniMindForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    record: dict[str, Any],
    metrics_path: Path,
    card: str,
    save_dtype: str = "float32",
) -> None:
    """Leave a finished model behind as a Qwen3 / Qwen3-MoE folder, which is either the old one or the whole new one.

    Args:
        record: what goes into run.json (settings, data, timings).
        metrics_path: the run's metrics.jsonl, copied beside the weights.
        card: the model card, as markdown.
        save_dtype: "float32" or "bfloat16".
    """
    with replacing(folder) as temporary:
        save_model(model, tokenizer, temporary, save_dtype)
        (temporary / "run.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        (temporary / "README.md").write_text(card, encoding="utf-8")
        if metrics_path.exists():
            shutil.copyfile(metrics_path, temporary / "metrics.jsonl")


def save_model(
    model: MiniMindForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path, save_dtype: str = "float32"
) -> None:
    """Write config, weights, generation settings and tokenizer in Qwen3 / Qwen3-MoE form; the folder may be new."""
    dtype = getattr(torch, save_dtype)
    state = {name: tensor.detach().to("cpu", dtype) for name, tensor in model.state_dict().items()}
    saved_dtype, model.config.dtype = model.config.dtype, dtype
    model.save_pretrained(str(folder), state_dict=state)
    model.config.dtype = saved_dtype
    tokenizer.save_pretrained(str(folder))


def save_gguf(
    model: MiniMindForCausalLM, tokenizer: PreTrainedTokenizerBase, path: Path, quantize: str, name: str
) -> None:
    """Write one GGUF file, and beside it the Modelfile that Ollama makes a model of.

    Raises:
        ValueError: llama.cpp would compute something else, the gguf package is missing, or the disk is full.
    """
    try:
        from model.gguf_file import modelfile, write_gguf
    except ModuleNotFoundError as error:
        raise ValueError(f"GGUF needs the package {error.name}: pip install -r requirements-serve.txt") from error
    with replacing(path) as temporary:
        write_gguf(temporary, model.config, model.state_dict(), tokenizer, quantize, name)
    with replacing(path.with_name("Modelfile")) as temporary:
        sampling = {"temperature": 0.5, "top_p": 0.9, "num_ctx": min(4096, model.config.max_position_embeddings)}
        temporary.write_text(modelfile(path.name, sampling), encoding="utf-8")


def trained_window(folder: Path) -> int | None:
    """Tokens that the model saw at once in training, from its run.json; None for one of another trainer's."""
    try:
        return int(json.loads((folder / "run.json").read_text(encoding="utf-8"))["settings"]["data"]["max_seq_len"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def model_card(record: dict[str, Any]) -> str:
    """The README.md of a result's folder, from its run.json."""
    model, metrics, progress = record["model"], record["metrics"], record["progress"]
    kind = "Qwen3-MoE" if model["use_moe"] else "Qwen3"
    rows = [
        ("stage", record["stage"]),
        ("parameters", f"{record['parameters']['total']:,} ({record['parameters']['active']:,} active)"),
        ("shape", ", ".join(f"{name} {value}" for name, value in model.items())),
        ("steps", f"{progress['step']:,}"),
        ("tokens", f"{progress['tokens']:,} ({progress['supervised_tokens']:,} with a loss)"),
        (
            "time",
            f"{progress['seconds']:.0f} s, {record['tokens_per_second']:,.0f} tokens/s on "
            f"{record['environment']['device']}",
        ),
    ]
    rows += [(name.replace("_", " "), f"{value:.4f}") for name, value in metrics.items() if isinstance(value, float)]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    sources = "\n".join(f"- {path}" for path in record["data"]["train"].get("sources", []))
    lines = ["---", "license: apache-2.0", "pipeline_tag: text-generation", "---", f"# {record['stage']}", ""]
    lines += [
        f"A {kind} model trained with minimind-pipeline.",
        "It opens with `AutoModelForCausalLM.from_pretrained`.",
        "",
    ]
    lines += ["| what | value |", "|---|---|", table, "", "Training data:", "", sources or "- not recorded", ""]
    return "\n".join([*lines, f"Command: `{record['command']}`", ""])


def describe_config(config: MiniMindConfig) -> dict[str, Any]:
    """The fields that give a model its shape, for run.json and the model card."""
    names = [
        *SHAPE_FLAGS[:3],
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
    ]
    if config.use_moe:
        names += ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"]
    return {name: getattr(config, name) for name in names}


def to_plain(record: Any) -> Any:
    """Dataclasses and paths as plain JSON values, recursively."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return to_plain(dataclasses.asdict(record))
    if isinstance(record, dict):
        return {str(key): to_plain(value) for key, value in record.items()}
    if isinstance(record, list | tuple):
        return [to_plain(value) for value in record]
    return str(record) if isinstance(record, Path) else record
