"""What a run will take: operations, hours, memory, micro-batch and parallel form, by formulas that stand here."""

import dataclasses
import itertools

import torch

from model.config import MiniMindConfig
from model.model_minimind import MiniMindForCausalLM, count_parameters
from model.packed_rows import QUERY_BLOCK
from trainer.hardware import flops_per_token
from trainer.memory import MOMENTS
from trainer.optim import is_hidden_matrix

# Share of the peak that training reaches, if nobody says otherwise: ours on two CPU cores (EXPERIMENTS.md), and on a
# GPU what public trainers of this size report (30 to 50 %).
CPU_UTILIZATION, GPU_UTILIZATION = 0.65, 0.35
USABLE_SHARE_OF_MEMORY = 0.85
# With fewer a step's fixed costs weigh: Muon's products take 0.6 s at `mini`, so many tokens 9 s (EXPERIMENTS.md).
LEAST_TOKENS_IN_A_STEP = 16_384
BYTES_FLOAT32, BYTES_HALF = 4, 2
TOKENS_PER_PARAMETER = 20  # compute-optimal (Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models")


@dataclasses.dataclass(frozen=True)
class Device:
    """One processor: matrix products a second in the training's precision, and memory."""

    name: str
    flops: float
    memory_bytes: float
    is_gpu: bool = True


@dataclasses.dataclass(frozen=True)
class Plan:
    """Answers. Memory is for each device; `problems` says what cannot work."""

    parameters: int
    active_parameters: int
    tokens: int
    flops: float
    hours: float
    tokens_per_second: float
    parallel: str
    state_bytes: float
    activation_bytes: float
    rows: int
    accumulation: int
    activation_checkpointing: bool
    problems: tuple[str, ...] = ()

    @property
    def memory_bytes(self) -> float:
        """What a device needs at the most."""
        return self.state_bytes + self.activation_bytes


def state_bytes_per_device(model: MiniMindForCausalLM, optimizer: str, devices: int, parallel: str) -> float:
    """Weights, gradients and optimizer moments in float32, and the half-precision copy that a step computes with.

    4 + 4 bytes a parameter, 8 for AdamW's two moments or 4 for Muon's one, 2 for the copy (mixed precision as in
    Rajbhandari et al. 2020, "ZeRO", section 3.1, but float32 gradients). FSDP divides all but the copy by the devices.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    matrices = sum(tensor.numel() for name, tensor in model.named_parameters() if is_hidden_matrix(name, tensor))
    moments = parameters * MOMENTS["AdamW"]
    if optimizer == "muon":
        moments = matrices * MOMENTS["Muon"] + (parameters - matrices) * MOMENTS["AdamW"]
    kept = BYTES_FLOAT32 * (2 * parameters + moments)
    return kept / (devices if parallel == "fsdp" else 1) + BYTES_HALF * parameters


def activation_bytes_per_token(
    config: MiniMindConfig, document_tokens: float, checkpointing: bool, is_gpu: bool = False
) -> float:
    """What the backward pass needs of each token: kept tensors of all layers, and the logits.

    Each layer keeps its two inputs in float32 (H each) and in half precision: both normed inputs (2 H), queries, keys
    and values before and after norm and positions (2 (N + 2 K) D), attention's output (N D), gate, up and their product
    (3 I for each expert of the token; experts also keep their inputs and outputs). The list is Korthikanti et al. 2022
    (section 4.1) for this architecture. On a CPU the product of gate and up is computed again, and attention keeps its
    probabilities, N for each key that a query's block meets. With checkpointing a layer keeps its float32 input, and
    one layer at a time is computed again.
    """
    hidden, heads, keys, size = (
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    kept_widths = 3 if is_gpu else 2
    if config.use_moe:
        experts, width = config.num_experts_per_tok, config.moe_intermediate_size
        feed = BYTES_HALF * experts * (kept_widths * width + 2 * hidden)
    else:
        feed = BYTES_HALF * kept_widths * config.intermediate_size
    met = 0 if is_gpu else (document_tokens + min(document_tokens, QUERY_BLOCK)) / 2
    attention = BYTES_HALF * (2 * (heads + 2 * keys) * size + heads * size + heads * met)
    layer = 2 * (BYTES_FLOAT32 + BYTES_HALF) * hidden + attention + feed
    kept = config.num_hidden_layers * layer
    if checkpointing:
        kept = config.num_hidden_layers * BYTES_FLOAT32 * hidden + layer
    return kept + BYTES_HALF * config.vocab_size + 2 * BYTES_FLOAT32 * hidden


def plan_run(
    config: MiniMindConfig,
    device: Device,
    devices: int,
    tokens: int | None,
    window: int,
    optimizer: str = "muon",
    utilization: float | None = None,
    document_tokens: float | None = None,
) -> Plan:
    """The plan of a run over `tokens` tokens (None: 20 for each parameter) in rows of `window`.

    Hours are operations / (devices x peak x utilization); operations a token as in `hardware.flops_per_token`.
    The micro-batch is the largest power of two of rows that fits, up to 64; accumulation fills a step.
    """
    with torch.device("meta"):
        model = MiniMindForCausalLM(config)
    parameters, active = count_parameters(model)
    tokens = tokens or TOKENS_PER_PARAMETER * active
    document_tokens = document_tokens or window
    operations = flops_per_token(model, document_tokens)
    utilization = utilization or (GPU_UTILIZATION if device.is_gpu else CPU_UTILIZATION)
    rate = devices * device.flops * utilization / operations
    room = device.memory_bytes * USABLE_SHARE_OF_MEMORY
    forms = ("ddp", "fsdp") if devices > 1 else ("ddp",)
    for checkpointing, parallel in itertools.product((False, True), forms):
        state = state_bytes_per_device(model, optimizer, devices, parallel)
        row = window * activation_bytes_per_token(config, document_tokens, checkpointing, device.is_gpu)
        fitting = int((room - state) // row)
        if fitting >= 1:
            break
    problems = ()
    if fitting < 1:
        problems = (
            f"one row of {window} tokens needs {(state + row) / 2**30:.1f} GiB on each {device.name}, which has "
            f"{device.memory_bytes / 2**30:.0f}: take a smaller model, a shorter window or more devices",
        )
    rows = min(1 << max(fitting, 1).bit_length() - 1, max(LEAST_TOKENS_IN_A_STEP // window, 1), 64)
    accumulation = -(-LEAST_TOKENS_IN_A_STEP // (rows * window * devices))
    return Plan(
        parameters=parameters,
        active_parameters=active,
        tokens=tokens,
        flops=tokens * operations,
        hours=tokens / rate / 3600,
        tokens_per_second=rate,
        parallel=parallel,
        state_bytes=state,
        activation_bytes=rows * row,
        rows=rows,
        accumulation=accumulation,
        activation_checkpointing=checkpointing,
        problems=problems,
    )
