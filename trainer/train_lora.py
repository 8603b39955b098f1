"""Fine-tune an adapter (LoRA) on conversations; the base model stays as it is."""

import gc, pathlib, sys  # noqa: E401

sys.path[0] = sys.path[0] if __package__ else str(pathlib.Path(__file__).resolve().parents[1])
__package__ or gc.disable()  # a fifth of the time of the imports; `user_errors` turns it on again

from trainer.config import user_errors
from trainer.data import build_sft_data
from trainer.lora_flags import LoraArguments, adapted
from trainer.losses import language_model_loss
from trainer.stage import Stage, run_stage

STAGE = Stage(
    name="lora",
    description="Fine-tune an adapter on conversations; --from_weight auto takes the newest finished model to adapt.",
    build_data=build_sft_data,
    loss=language_model_loss,
    defaults={
        "from_weight": "auto",
        "max_seq_len": 256,
        "batch_size": 16,
        "optimizer": "adamw",
        "learning_rate": 1e-3,
        "weight_decay": 0.0,
        "min_lr_ratio": 0.0,
    },
    start_from=("full_sft", "mid_train", "pretrain"),
    sample_prompts=([{"role": "user", "content": "Who are you?"}], [{"role": "user", "content": "你是谁？"}]),
    flags=LoraArguments,
    variant=adapted,
)


def main() -> None:
    """Entry point."""
    run_stage(STAGE)


if __name__ == "__main__":
    with user_errors():
        main()
