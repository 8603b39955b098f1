"""What the machine can do and how busy it is: matrix product peak, memory, load, temperature; and glibc's memory."""

import contextlib
import ctypes
import faulthandler
import functools
import importlib.util
import os
import resource
import sys
import time

import psutil
import torch

from model.model_minimind import MiniMindForCausalLM, count_parameters

# Dense bf16/fp16 tensor-core peaks in TFLOP/s and memory in GB, from the makers' data sheets; the first name that
# occurs counts, and where a GPU is sold with more memory too the smaller one stands here.
KNOWN_GPUS = {
    "H200": (989.0, 141),
    "H100 PCIe": (756.0, 80),
    "H100": (989.0, 80),
    "A100": (312.0, 40),
    "L40S": (362.0, 48),
    "RTX 4090": (165.0, 24),
    "RTX 3090": (71.0, 24),
    "V100": (125.0, 16),
    "T4": (65.0, 16),
}
PEAK_SIZE = {"cpu": 2048, "cuda": 8192, "mps": 4096}
PEAK_TRIALS = 5
ENOUGH_SECONDS = 0.005


@functools.cache
def has_working_amx() -> bool:
    """Whether a CPU can multiply bfloat16 by AMX; to be asked before the first matrix product.

    Some virtual machines announce AMX but hide the sizes of its tiles (CPUID leaf 0x1D reads zero). oneDNN's bfloat16
    product is an illegal instruction there, and the process ends without a message. So a child tries one, in 20 ms, and
    where it dies oneDNN is told to do without.
    """
    if not torch.cpu._is_amx_tile_supported():
        return False
    if limit := os.environ.get("ONEDNN_MAX_CPU_ISA"):
        return "AMX" in limit.upper() or limit.upper() in ("ALL", "DEFAULT")
    if not hasattr(os, "fork"):  # Windows
        return True
    child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()
            torch.set_num_threads(1)  # the parent's threads do not live here
            matrix = torch.ones(64, 64, dtype=torch.bfloat16)
            matrix @ matrix
            os._exit(0)
        finally:
            os._exit(1)  # an exception must not carry the child into the parent's work
    works = os.waitpid(child, 0)[1] == 0
    if not works:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"
        print("this CPU announces AMX but cannot run it (a virtual machine's fault): going on without", file=sys.stderr)
    return works


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory instead of handing it back: for training on a CPU, once at the start.

    By default every tensor above some MB is new memory whose pages the kernel clears one by one as they are touched,
    in every step again: 20 to 30 % of a step of a 5M model. See mallopt(3): M_MMAP_MAX 0, M_TRIM_THRESHOLD -1.
    Returns whether that worked; elsewhere than on glibc it does nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(-4, 0) and mallopt(-1, -1))


def hand_back_freed_memory(step: int) -> None:
    """Give the pages back that are free after this step, if it is the 1st, 2nd, 4th, 8th and so on.

    Kept memory falls into pieces while the heap takes shape: `base` in steps of eleven micro-batches held 3.1 GiB after
    the first of them and 4.5 after two steps; handed back so, at most 4.3 in eight. To touch the pages anew takes 1 to
    3 s for `mini` with experts, so it is not done at every step.
    """
    if step & (step - 1) == 0:
        with contextlib.suppress(OSError, AttributeError, TypeError):
            ctypes.CDLL(None).malloc_trim(0)


@functools.cache
def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of large matrix products: from the data sheet where the device is known, else measured once."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        name = torch.cuda.get_device_name(device)
        for known, (peak, _) in KNOWN_GPUS.items():
            if known in name:
                return peak * 1e12
    size, best = 128, 0.0
    while best < ENOUGH_SECONDS and size < PEAK_SIZE[device.type]:  # float16 on a CPU runs at a hundredth of bfloat16
        size *= 2
        # Not random: a generator of the training must not be touched.
        factor = torch.linspace(-1, 1, size * size).view(size, size).to(device=device, dtype=dtype)
        best = min(_seconds_of_a_product(factor) for _ in range(PEAK_TRIALS))
    return 2 * size**3 / best


def _seconds_of_a_product(factor: torch.Tensor) -> float:
    _wait_for(factor.device)
    started = time.perf_counter()
    factor @ factor
    _wait_for(factor.device)
    return time.perf_counter() - started


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def flops_per_token(model: MiniMindForCausalLM, document_tokens: float = 0.0) -> float:
    """Floating-point operations of forward and backward for one token.

    Six for each weight that the token meets: two forward, four backward (Kaplan et al. 2020). An embedding is looked
    up, not multiplied; a tied one is, as the head. Attention adds, for each layer, head and size of a head, six for
    each token of the same document: scores and their sum of values take twelve (Chowdhery et al. 2022, appendix B),
    of which causality needs half.

    Args:
        model: dense or MoE.
        document_tokens: length of the document that a token stands in, in the mean over tokens. With 0 attention is
            left out, and the utilization that follows is a lower bound.
    """
    config = model.config
    _, active = count_parameters(model)
    looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim * document_tokens
    return 6.0 * (active - looked_up + attention)


def peak_memory_gib(device: torch.device) -> float:
    """Most memory that this process has had: on the GPU if it trains there, else in RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def hardware_metrics(device: torch.device) -> dict[str, float]:
    """How busy the machine is now: CPU in per cent since the last call, RAM, and for CUDA load, memory, temperature.

    Load and temperature of a GPU need the package nvidia-ml-py; without it they are left out.
    """
    metrics = {
        "cpu_percent": psutil.cpu_percent(),
        "ram_gib": psutil.Process().memory_info().rss / 2**30,
        "ram_used_percent": psutil.virtual_memory().percent,
    }
    if device.type == "cuda":
        metrics["gpu_memory_gib"] = torch.cuda.memory_allocated(device) / 2**30
        if importlib.util.find_spec("pynvml"):
            metrics["gpu_percent"] = torch.cuda.utilization(device)
            metrics["gpu_temperature"] = torch.cuda.temperature(device)
    return metrics
