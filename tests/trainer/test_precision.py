"""The precision table: (device, native bfloat16, --dtype) -> (dtype, autocast, scaler)."""

import pytest
import torch

from trainer.precision import choose_precision

TABLE = [
    ("cuda", True, "auto", torch.bfloat16, True, False),
    ("cuda", False, "auto", torch.float16, True, True),
    ("cpu", True, "auto", torch.bfloat16, True, False),
    ("cpu", False, "auto", torch.float32, False, False),
    ("mps", False, "auto", torch.float32, False, False),
    ("cpu", True, "float32", torch.float32, False, False),
    ("cpu", False, "bfloat16", torch.bfloat16, True, False),
    ("cpu", True, "float16", torch.float16, True, True),
    ("mps", False, "float16", torch.float16, True, True),
    ("cuda", True, "float16", torch.float16, True, True),
]


@pytest.mark.parametrize(("device", "native", "requested", "dtype", "autocast", "scaler"), TABLE)
def test_precision_table(device, native, requested, dtype, autocast, scaler):
    chosen = choose_precision(device, native, requested)
    assert (chosen.dtype, chosen.use_autocast, chosen.use_scaler) == (dtype, autocast, scaler)
    assert chosen.reason
