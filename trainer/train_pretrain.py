"""Stage 1: pretraining. Plain text in, next-token prediction on every token, a base model out."""

import gc, pathlib, sys  # noqa: E401

sys.path[0] = sys.path[0] if __package__ else str(pathlib.Path(__file__).resolve().parents[1])
__package__ or gc.disable()  # a fifth of the time of the imports; `user_errors` turns it on again

from trainer.config import user_errors
from trainer.data import build_pretrain_data
from trainer.losses import language_model_loss
from trainer.stage import Stage, run_stage

STAGE = Stage(
    name="pretrain",
    description="Pretrain a language model from random weights on documents ({'text': ...} rows or txt files).",
    build_data=build_pretrain_data,
    loss=language_model_loss,
    defaults={"max_seq_len": 256, "batch_size": 16, "schedule": "wsd"},
    start_from=("pretrain",),
    sample_prompts=("Mira lives in", "米拉住在"),
)


def main() -> None:
    """Entry point."""
    run_stage(STAGE)


if __name__ == "__main__":
    with user_errors():
        main()
