"""Take a model to other programs: GGUF for llama.cpp and Ollama, a plain Qwen3 folder, or MiniMind's own form.

Examples:
    python scripts/convert_model.py --to gguf --quantize q8_0
    python scripts/convert_model.py --from_weight minimind_512.pth --to qwen3 --output out/minimind_512
    python scripts/convert_model.py --from_weight full_sft --to minimind --output full_sft_256.pth
"""

import gc, pathlib, sys  # noqa: E401

sys.path[0] = sys.path[0] if __package__ else str(pathlib.Path(__file__).resolve().parents[1])
__package__ or gc.disable()  # a fifth of the time of the imports; `user_errors` turns it on again

import dataclasses
import json
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from model.convert import config_to_minimind, state_to_minimind
from model.model_minimind import MiniMindForCausalLM
from trainer.checkpoint import replacing
from trainer.config import ROOT, ModelArguments, flag, parse_arguments, user_errors
from trainer.results import save_gguf, save_model
from trainer.weights import init_model, resolve_from_weight


@dataclasses.dataclass
class ConvertArguments:
    """What becomes of which model."""

    _argument_group_name = "convert"

    to: Literal["gguf", "qwen3", "minimind"] = flag(
        "gguf", "gguf: llama.cpp, Ollama; qwen3: a Hugging Face folder; minimind: a .pth state dict or a native folder"
    )
    from_weight: str = flag("full_sft", "a finished stage's name, a model folder, or a .pth state dict")
    output: str | None = flag(
        None,
        "file or folder to write; by default a GGUF beside the weights. For --to minimind, NAME.pth gives a state "
        "dict, any other name a native folder",
    )
    quantize: Literal["f32", "f16", "bf16", "q8_0"] = flag("q8_0", "what weight matrices are stored as in a GGUF")
    save_dtype: Literal["auto", "float32", "bfloat16", "float16"] = flag(
        "auto", "precision for qwen3 and minimind; auto: float32 for qwen3, float16 for minimind, as it saves itself"
    )
    save_dir: str = flag(str(ROOT / "out"), "folder of finished models")
    hidden_size: int | None = flag(None, "only a stage's model of this width; by default the newest")
    use_moe: Literal[0, 1] | None = flag(None, "1: only mixture of experts, 0: only dense; by default the newest")
    tokenizer_path: str | None = flag(None, "tokenizer folder; by default the weights' own, else model/tokenizer")
    num_experts_per_tok: int | None = flag(None, "for a .pth file with experts, which does not say: experts a token")


def open_source(arguments: ConvertArguments) -> tuple[MiniMindForCausalLM, PreTrainedTokenizerBase, Path]:
    """The model in float32, its tokenizer, and where they came from.

    Raises:
        ValueError: there is no such model, or it does not fit the tokenizer.
    """
    names = ("from_weight", "hidden_size", "use_moe", "tokenizer_path", "num_experts_per_tok")
    model_arguments = ModelArguments(**{name: getattr(arguments, name) for name in names})
    if arguments.from_weight in ("none", "auto"):
        raise ValueError(f"--from_weight {arguments.from_weight}: name a stage, a model folder or a .pth file")
    source = resolve_from_weight(model_arguments, arguments.save_dir, ())
    model, tokenizer, _ = init_model(model_arguments, source, torch.device("cpu"), 1)
    return model, tokenizer, source


def convert(arguments: ConvertArguments) -> Path:
    """Write what is asked for and return its path."""
    model, tokenizer, source = open_source(arguments)
    name = source.stem if source.is_file() else source.resolve().name
    if arguments.to == "gguf":
        folder = source if source.is_dir() else Path(arguments.save_dir) / name
        output = Path(arguments.output or folder / f"{name}-{arguments.quantize}.gguf")
        save_gguf(model, tokenizer, output, arguments.quantize, name)
        return output
    default = f"{name}_qwen3" if arguments.to == "qwen3" else f"{name}_minimind.pth"
    output = Path(arguments.output or Path(arguments.save_dir) / default)
    if output.exists():
        raise ValueError(f"--output {output}: exists already; choose another name or move it away")
    if arguments.to == "qwen3":
        to_qwen3(model, tokenizer, output, arguments.save_dtype)
    else:
        to_minimind(model, tokenizer, output, arguments.save_dtype)
    return output


def to_qwen3(model: MiniMindForCausalLM, tokenizer: PreTrainedTokenizerBase, output: Path, save_dtype: str) -> None:
    """A folder that every Hugging Face tool opens."""
    with replacing(output) as temporary:
        save_model(model, tokenizer, temporary, "float32" if save_dtype == "auto" else save_dtype)


def to_minimind(model: MiniMindForCausalLM, tokenizer: PreTrainedTokenizerBase, output: Path, save_dtype: str) -> None:
    """MiniMind's state dict, or its native folder: config.json of type minimind, weights, tokenizer.

    Raises:
        ValueError: a weight does not fit float16, or the config does not fit MiniMind.
    """
    dtype = torch.float16 if save_dtype == "auto" else getattr(torch, save_dtype)
    state = state_to_minimind(model.state_dict(), dtype)
    for parameter, tensor in state.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{parameter} does not fit {dtype}; use --save_dtype float32")
    config = config_to_minimind(model.config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")})
    with replacing(output) as temporary:
        if output.suffix == ".pth":
            with open(temporary, "wb") as file:
                torch.save(state, file)
            return
        temporary.mkdir()
        if model.config.tie_word_embeddings:
            del state["lm_head.weight"]
        save_file(state, temporary / "model.safetensors", metadata={"format": "pt"})
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tokenizer.save_pretrained(str(temporary))


def next_steps(arguments: ConvertArguments, output: Path) -> str:
    """What to do with the result."""
    if arguments.to == "gguf":
        return (
            f"  python scripts/chat.py --model_path {output}\n"
            f"  llama-server -m {output} --jinja\n"
            f"  ollama create NAME -f {output.with_name('Modelfile')}"
        )
    if arguments.to == "qwen3":
        return f"  python scripts/chat.py --model_path {output}"
    return f"  python trainer/train_full_sft.py --from_weight {output}"


def main() -> None:
    """Entry point."""
    (arguments,) = parse_arguments(ConvertArguments, description=__doc__.split("\n")[0])
    output = convert(arguments)
    size = sum(path.stat().st_size for path in ([output] if output.is_file() else output.iterdir()))
    print(f"{output} ({size / 2**20:,.1f} MiB)\n{next_steps(arguments, output)}")


if __name__ == "__main__":
    with user_errors():
        main()
