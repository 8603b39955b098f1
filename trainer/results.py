"""What a finished run leaves behind: a model folder that other tools open, its model card, its GGUF file."""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from model.config import MiniMindConfig
from model.model_minimind import MiniMindForCausalLM
from trainer.checkpoint import replacing
from trainer.config import raise_problems
from trainer.weights import SHAPE_FLAGS


def result_folder(save_dir: str | Path, name: str, config: MiniMindConfig) -> Path:
    """Where a run leaves its model: SAVE_DIR/NAME_HIDDEN[_moe]."""
    return Path(save_dir) / f"{name}_{config.hidden_size}{'_moe' if config.use_moe else ''}"


def check_result_folder(folder: Path, config: MiniMindConfig, marker: str = "config.json") -> None:
    """Refuse, before any work, to put a result where another kind of one lies, or a model of another shape.

    Args:
        marker: a file that every result of this kind has.

    Raises:
        ValueError: the folder holds a model of another shape, or something else.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / marker).is_file():
        raise ValueError(f"{folder}: exists and holds no {marker}; choose another --save_weight or --save_dir")
    if marker != "config.json":
        return
    there = MiniMindConfig.from_pretrained(str(folder))
    raise_problems(
        [
            f"{folder}: holds a model whose {flag} is {getattr(there, flag)}, this run's is {getattr(config, flag)}; "
            "choose another --save_weight, or move the folder away"
            for flag in (*SHAPE_FLAGS, "vocab_size")
            if getattr(there, flag) != getattr(config, flag)
        ]
    )


@contextlib.contextmanager
def writing_result(folder: Path, record: dict[str, Any], card: str, metrics_path: Path) -> Iterator[Path]:
    """Where a stage writes its result: a folder that takes the place of `folder` when all is there.

    Args:
        record: what goes into run.json (settings, data, timings).
        card: the model card, as markdown.
        metrics_path: the run's metrics.jsonl, copied beside the weights.

    Raises:
        ValueError: it could not be written; whatever was there is untouched.
    """
    with replacing(folder) as temporary:
        temporary.mkdir()
        yield temporary
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


def model_card(record: dict[str, Any], opening: str | None = None) -> str:
    """The README.md of a result's folder, from its run.json; `opening` says what it is and how it is opened."""
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
    opening = opening or f"A {kind} model; it opens with `AutoModelForCausalLM.from_pretrained`."
    lines += [opening, "Trained with minimind-pipeline.", ""]
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
