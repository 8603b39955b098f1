"""Preference training (DPO, IPO) on pairs of answers, one better than the other."""

import gc, pathlib, sys  # noqa: E401

sys.path[0] = sys.path[0] if __package__ else str(pathlib.Path(__file__).resolve().parents[1])
__package__ or gc.disable()  # a fifth of the time of the imports; `user_errors` turns it on again

from trainer.config import user_errors
from trainer.data import build_preference_data
from trainer.evaluation import log_objective
from trainer.preference import PreferenceArguments, PreferenceLoss, count_pairs, prepare_preference
from trainer.lora_flags import adapted, or_adapter
from trainer.stage import Stage, run_stage

STAGE = Stage(
    name="dpo",
    description="Learn from pairs of answers which is better; --from_weight auto takes the fine-tuned weights.",
    build_data=build_preference_data,
    loss=PreferenceLoss(PreferenceArguments()),
    defaults={
        "from_weight": "auto",
        "max_seq_len": 512,
        "train_on": "last",
        "batch_size": 8,
        "optimizer": "adamw",
        # 2 epochs at 6e-5 lost 0.2 % of other questions (0.1 to 0.4), these nothing beyond chance (one seed each).
        "epochs": 4,
        "learning_rate": 2.5e-5,
        "weight_decay": 0.0,
        "min_lr_ratio": 0.0,
        # Without it, by the time most pairs are preferred rightly, tool calls no longer end (5 % of others lost):
        # what a rejected call shares with the chosen one is unlearned too.
        "sft_weight": 0.5,
    },
    start_from=("full_sft",),
    sample_prompts=([{"role": "user", "content": "Who are you?"}], [{"role": "user", "content": "你是谁？"}]),
    flags=or_adapter(PreferenceArguments),
    variant=adapted,
    count=count_pairs,
    documents_a_row=2,
    prepare=prepare_preference,
    evaluate=log_objective,
)


def main() -> None:
    """Entry point."""
    run_stage(STAGE)


if __name__ == "__main__":
    with user_errors():
        main()
