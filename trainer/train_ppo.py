"""Reinforcement learning from rewards that a program gives, with a critic: PPO."""

import gc, pathlib, sys  # noqa: E401

sys.path[0] = sys.path[0] if __package__ else str(pathlib.Path(__file__).resolve().parents[1])
__package__ or gc.disable()  # a fifth of the time of the imports; `user_errors` turns it on again

import dataclasses

from trainer.config import user_errors
from trainer.ppo import PPOArguments, PPOLoss, add_critic, prepare_ppo, remove_critic
from trainer.lora_flags import adapted, or_adapter
from trainer.stage import Stage, run_stage
from trainer.train_grpo import STAGE as GRPO

STAGE: Stage = dataclasses.replace(
    GRPO,
    name="ppo",
    description="Learn from rewards for replies, with a critic; --from_weight auto takes the best there is.",
    loss=PPOLoss(PPOArguments()),
    flags=or_adapter(PPOArguments),
    variant=adapted,
    adapt=add_critic,
    prepare=prepare_ppo,
    detach=remove_critic,
)


def main() -> None:
    """Entry point."""
    run_stage(STAGE)


if __name__ == "__main__":
    with user_errors():
        main()
