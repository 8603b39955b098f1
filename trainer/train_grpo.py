"""Reinforcement learning from rewards that a program gives: GRPO, Dr. GRPO, DAPO and CISPO."""

import gc, pathlib, sys  # noqa: E401

sys.path[0] = sys.path[0] if __package__ else str(pathlib.Path(__file__).resolve().parents[1])
__package__ or gc.disable()  # a fifth of the time of the imports; `user_errors` turns it on again

from trainer.config import user_errors
from trainer.data import build_prompt_data
from trainer.lora_flags import adapted, or_adapter
from trainer.policy import PolicyArguments, PolicyLoss, prepare_policy
from trainer.rollout import DEFAULTS, SAMPLE_PROMPTS
from trainer.rollout_data import log_rewards
from trainer.stage import Stage, run_stage

STAGE = Stage(
    name="grpo",
    description="Learn from rewards for replies that the model draws; --from_weight auto takes the best there is.",
    build_data=build_prompt_data,
    loss=PolicyLoss(PolicyArguments()),
    defaults=DEFAULTS,
    start_from=("dpo", "full_sft"),
    sample_prompts=SAMPLE_PROMPTS,
    flags=or_adapter(PolicyArguments),
    variant=adapted,
    prepare=prepare_policy,
    evaluate=log_rewards,
)


def main() -> None:
    """Entry point."""
    run_stage(STAGE)


if __name__ == "__main__":
    with user_errors():
        main()
