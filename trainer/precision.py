"""Which number format a run computes in, decided by one pure function."""

from dataclasses import dataclass

import torch

from trainer.hardware import has_working_amx


@dataclass(frozen=True)
class Precision:
    """Compute format of a run. Masters and optimizer moments are float32 whatever this says."""

    dtype: torch.dtype
    use_autocast: bool
    use_scaler: bool
    reason: str


def has_native_bfloat16(device: torch.device) -> bool:
    """True if the device multiplies bfloat16 matrices in hardware, so that it pays."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        # Intel's AMX machines, kept from AMX, multiply bfloat16 at 0.57 of the speed of float32 (160 to 280 GFLOP/s).
        announces_amx = torch.cpu._is_amx_tile_supported()
        return has_working_amx() if announces_amx else torch.cpu._is_avx512_bf16_supported()
    return False


def note_overflow(scaler: torch.amp.GradScaler) -> None:
    """Make the scaler lower its scale in its next update, as it does where it saw the overflow itself.

    Ranks must agree on their loss scale, so what one of them saw, all of them note.
    """
    if scaler.is_enabled():
        for state in scaler._per_optimizer_states.values():
            for found in state["found_inf_per_device"].values():
                found.fill_(1.0)


def choose_precision(device_type: str, native_bfloat16: bool, requested: str = "auto") -> Precision:
    """The precision for a device. Pure: (device type, has native bfloat16, --dtype) -> Precision.

    bfloat16 needs no loss scaling; float16 does, since its smallest normal number is 6e-5 (Micikevicius et al. 2018).
    """
    if requested == "float32":
        return Precision(torch.float32, False, False, "asked for by --dtype")
    if requested == "bfloat16":
        why = "asked for by --dtype" + ("" if native_bfloat16 else "; this device emulates it, slowly")
        return Precision(torch.bfloat16, True, False, why)
    if requested == "float16":
        return Precision(torch.float16, True, True, "asked for by --dtype, with loss scaling")
    if native_bfloat16:
        return Precision(torch.bfloat16, True, False, f"this {device_type} computes bfloat16 natively")
    if device_type == "cuda":
        return Precision(torch.float16, True, True, "this GPU is older than bfloat16; float16 with loss scaling")
    return Precision(torch.float32, False, False, f"this {device_type} has no fast bfloat16")
