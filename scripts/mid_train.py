"""Stage 2: mid-training. Better documents and conversations, mixed by weight, before supervised fine-tuning.

The learning rate is constant and then falls to zero; bits per byte are measured on text and on chats, before and after.
"""

import gc, pathlib, sys  # noqa: E401

sys.path[0] = sys.path[0] if __package__ else str(pathlib.Path(__file__).resolve().parents[1])
__package__ or gc.disable()  # a fifth of the time of the imports; `user_errors` turns it on again

from trainer.config import user_errors
from trainer.data import build_mid_train_data
from trainer.losses import language_model_loss
from trainer.stage import Stage, run_stage

STAGE = Stage(
    name="mid_train",
    description="Go on training a base model on documents and chats, mixed by weight (--data_path a:0.7 b:0.3).",
    build_data=build_mid_train_data,
    loss=language_model_loss,
    defaults={
        "from_weight": "pretrain",
        "max_seq_len": 256,
        "batch_size": 16,
        "loss_on": "all",
        "learning_rate": 3e-3,
        "schedule": "wsd",
        "decay_ratio": 0.5,
        "warmup_ratio": 0.0,
        "min_lr_ratio": 0.0,
    },  # fmt: skip
    start_from=("pretrain",),
    sample_prompts=(
        [{"role": "user", "content": "Where does Mira live?"}],
        [{"role": "user", "content": "米拉住在哪里？"}],
    ),
)


def main() -> None:
    """Entry point."""
    run_stage(STAGE)


if __name__ == "__main__":
    with user_errors():
        main()
