"""Distillation: fine-tune a model on conversations beside a teacher's distribution over every token."""

import gc, pathlib, sys  # noqa: E401

sys.path[0] = sys.path[0] if __package__ else str(pathlib.Path(__file__).resolve().parents[1])
__package__ or gc.disable()  # a fifth of the time of the imports; `user_errors` turns it on again

from trainer.config import user_errors
from trainer.data import build_sft_data
from trainer.distillation import DistillationArguments, prepare_distillation
from trainer.losses import language_model_loss
from trainer.lora_flags import adapted, or_adapter
from trainer.stage import Stage, run_stage

STAGE = Stage(
    name="distillation",
    description="Learn from a teacher's probabilities; --from_weight auto takes the mid-trained weights, else others.",
    build_data=build_sft_data,
    loss=language_model_loss,  # until the teacher is open
    defaults={"from_weight": "auto", "max_seq_len": 256, "batch_size": 16, "learning_rate": 4e-3, "min_lr_ratio": 0.0},
    start_from=("mid_train", "pretrain"),
    sample_prompts=([{"role": "user", "content": "Who are you?"}], [{"role": "user", "content": "你是谁？"}]),
    flags=or_adapter(DistillationArguments),
    variant=adapted,
    prepare=prepare_distillation,
)


def main() -> None:
    """Entry point."""
    run_stage(STAGE)


if __name__ == "__main__":
    with user_errors():
        main()
