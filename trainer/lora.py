"""LoRA (Hu et al., arXiv:2106.09685): small matrices beside frozen ones, by PEFT and in PEFT's own format.

In training each expert is a linear layer of its own, with an adapter of its own. In a saved adapter all experts of a
layer are one parameter, as transformers 5 holds them, so that PEFT finds them there; `experts_for_peft` says how.
"""

import copy
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.lora import LoraLayer, ParamWrapper
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, Qwen3Config, Qwen3MoeConfig

from model.convert import split_experts
from model.model_minimind import MiniMindForCausalLM, load_model
from trainer.lora_flags import LoraArguments

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
FUSED_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def add_adapter(model: MiniMindForCausalLM, arguments: LoraArguments) -> list[str]:
    """Freeze the model and put an adapter beside its matrices, in place; it starts as no change.

    Returns:
        Notes for the user.

    Raises:
        ValueError: nothing that the model has is among the targets.
    """
    use_moe = model.config.use_moe
    groups = [name for name in arguments.lora_targets if name != ("mlp" if use_moe else "experts")]
    names = [*(ATTENTION if "attention" in groups else ()), *(FEED_FORWARD if {"mlp", "experts"} & set(groups) else ())]
    if not names:
        has = "attention, experts" if use_moe else "attention, mlp"
        raise ValueError(f"--lora_targets {' '.join(arguments.lora_targets)}: the model has {has}")
    config = LoraConfig(
        r=arguments.lora_rank,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules=names,
    )
    inject_adapter_in_model(config, model)  # which also freezes everything else
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    scale = arguments.lora_alpha / arguments.lora_rank
    return [
        f"adapter: rank {arguments.lora_rank}, scale {scale:g}, on {', '.join(groups)}: {trained:,} parameters trained"
    ]


def merged(model: MiniMindForCausalLM) -> MiniMindForCausalLM:
    """A plain model that computes the same: base + scale * B A, in the base's float32. The given one stays."""
    result = copy.deepcopy(model)
    for name, module in [*result.named_modules()]:
        if isinstance(module, LoraLayer):
            module.merge(safe_merge=True)
            parent, _, child = name.rpartition(".")
            setattr(result.get_submodule(parent), child, module.get_base_layer())
    return result.requires_grad_(True)


def save_adapter(
    model: MiniMindForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path, base: Path, arguments: LoraArguments
) -> None:
    """Write adapter_config.json and adapter_model.safetensors for PEFT, and the tokenizer; the folder may be new.

    Args:
        base: folder of the model that the adapter belongs to.
    """
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=arguments.lora_rank,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules=sorted({name.rpartition(".")[2] for name in _adapted(model)}),
        base_model_name_or_path=str(base.resolve()),
        inference_mode=True,
    )
    state = _plain_state(model)
    if any(".mlp.experts." in name for name in state):
        state = _experts_in_peft_form(model, state, config)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    state = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in state.items()}
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(str(folder))


def _adapted(model: nn.Module) -> dict[str, LoraLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _plain_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """PEFT's names of the adapter's tensors in a model without experts."""
    state = get_peft_model_state_dict(model, adapter_name="default")
    return {f"base_model.model.{name}": tensor for name, tensor in state.items()}


def _experts_in_peft_form(
    model: MiniMindForCausalLM, state: dict[str, torch.Tensor], config: LoraConfig
) -> dict[str, torch.Tensor]:
    """The state with each layer's experts as adapters of fused parameters, and `config` made to say so.

    PEFT's own model, without weights, tells names and places.
    """
    # gate and up are one parameter there: their two adapters become one of twice the rank, as do all others, filled up
    # with zeros. The scale is alpha / rank, so alpha doubles too. PEFT has no dropout there; it is for training only.
    config.target_modules = sorted(set(config.target_modules) & set(ATTENTION))
    config.target_parameters = list(FUSED_EXPERTS)
    config.r, config.lora_alpha, config.lora_dropout = 2 * config.r, 2 * config.lora_alpha, 0.0
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**model.config.to_hugging_face_dict()))
    layout = copy.deepcopy(config)
    layout.base_model_name_or_path = None
    theirs = get_peft_model(theirs, layout, low_cpu_mem_usage=True)
    result = {
        name: _filled_up(tensor, config.r, dim=0 if "lora_A" in name else 1)
        for name, tensor in state.items()
        if ".mlp.experts." not in name
    }
    for name, wrapper in theirs.named_modules():
        if not isinstance(wrapper, ParamWrapper):
            continue
        layer = int(name.split(".layers.")[1].split(".")[0])
        lora_a, lora_b = experts_for_peft(
            [
                [getattr(expert, part) for part in _parts_of(wrapper.parameter_name)]
                for expert in model.model.layers[layer].mlp.experts
            ],
            config.r,
        )
        assert lora_a.shape == wrapper.lora_A["default"].weight.shape, "PEFT's layout changed"
        assert lora_b.shape == wrapper.lora_B["default"].weight.shape, "PEFT's layout changed"
        result |= {f"{name}.lora_A.weight": lora_a, f"{name}.lora_B.weight": lora_b}
    return result


def _parts_of(parameter_name: str) -> Sequence[str]:
    return ("gate_proj", "up_proj") if parameter_name == "gate_up_proj" else ("down_proj",)


@torch.no_grad()
def experts_for_peft(experts: Sequence[Sequence[LoraLayer]], rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Adapters of each expert's matrices, which lie under one another in the fused parameter, as PEFT lays them out.

    Of one expert with matrices g and u: A = [A_g; A_u] (rank, H), B = [[B_g, 0], [0, B_u]] (2 I, rank), filled up with
    zeros to `rank`. PEFT wants A (E * rank, H) with an expert's rows together, and B (2 I, rank * E) with an expert's
    columns E apart.
    """
    all_a, all_b = [], []
    for parts in experts:
        a = torch.cat([part.lora_A["default"].weight for part in parts])
        b = torch.block_diag(*(part.lora_B["default"].weight for part in parts))
        all_a.append(_filled_up(a, rank, dim=0))
        all_b.append(_filled_up(b, rank, dim=1))
    return torch.cat(all_a), torch.stack(all_b, dim=-1).flatten(1)


def _filled_up(matrix: torch.Tensor, rank: int, dim: int) -> torch.Tensor:
    """The matrix with zeros behind it, `rank` rows (dim 0) or columns (dim 1) in all."""
    missing = rank - matrix.shape[dim]
    return nn.functional.pad(matrix, (0, missing) if dim else (0, 0, 0, missing))


def base_of_adapter(folder: Path) -> Path:
    """The model folder that an adapter belongs to: the one that its config names, or one of that name beside it.

    Raises:
        ValueError: neither is there.
    """
    try:
        named = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder}/adapter_config.json: cannot be read: {error!r}") from error
    for path in (Path(named), folder.parent / Path(named).name):
        if (path / "config.json").is_file():
            return path
    raise ValueError(f"{folder}: its base model {named} is neither there nor beside it; put it there")


def open_merged(folder: Path) -> MiniMindForCausalLM:
    """An adapter's folder, ours or another trainer's, as a plain model: its base with the adapter merged in, in fp32.

    Raises:
        ValueError: the base is missing, or the adapter does not fit it.
    """
    base = base_of_adapter(folder)
    ours = load_model(str(base))
    kind = Qwen3MoeConfig if ours.config.use_moe else Qwen3Config
    config = kind(**ours.config.to_hugging_face_dict())
    theirs = AutoModelForCausalLM.from_pretrained(str(base), config=config, dtype=torch.float32)
    try:
        theirs = PeftModel.from_pretrained(theirs, str(folder)).merge_and_unload(safe_merge=True)
    except (ValueError, RuntimeError, KeyError) as error:
        raise ValueError(f"{folder}: the adapter does not fit its base {base}: {error}") from error
    ours.load_state_dict(split_experts(theirs.state_dict()))
    return ours
