"""Flags of LoRA, apart from what needs PEFT, whose import takes longer than a small model's first step."""

import dataclasses
from typing import Literal

from trainer.config import Settings, changed_flags, flag
from trainer.stage import Stage

TARGETS = ("attention", "mlp", "experts")


@dataclasses.dataclass
class LoraArguments:
    """The adapter. All but --merge is bound to a run: it may not change when the run is resumed."""

    _argument_group_name = "lora"
    _may_change = ("merge",)

    lora_rank: int = flag(8, "rank of the adapter's matrices")
    lora_alpha: float = flag(16.0, "the adapter counts alpha / rank times")
    lora_dropout: float = flag(0.0, "dropout on what goes into the adapter")
    lora_targets: list[str] = dataclasses.field(
        default_factory=lambda: list(TARGETS),
        metadata={"help": f"what gets adapters, as far as the model has it: {', '.join(TARGETS)}"},
    )
    merge: Literal[0, 1] = flag(0, "1: leave the base model with the adapter merged in, too: NAME_merged_HIDDEN")

    def problems(self) -> list[str]:
        """What is out of range, by flag."""
        problems = [] if self.lora_rank >= 1 else [f"--lora_rank {self.lora_rank} must be at least 1"]
        if not self.lora_alpha > 0:
            problems.append(f"--lora_alpha {self.lora_alpha:g} must be above 0")
        if not 0 <= self.lora_dropout < 1:
            problems.append(f"--lora_dropout {self.lora_dropout:g} must lie in [0, 1)")
        if not self.lora_targets or not set(self.lora_targets) <= set(TARGETS):
            problems.append(f"--lora_targets {' '.join(self.lora_targets)}: take some of {', '.join(TARGETS)}")
        return problems


def or_adapter(own: type) -> type:
    """A stage's own flags and those of an adapter, which `--lora_rank` asks for; for `Stage.flags`."""

    @dataclasses.dataclass
    class Flags(LoraArguments, own):
        _argument_group_name = own._argument_group_name
        _may_change = (*own._may_change, *LoraArguments._may_change)

        lora_rank: int = flag(0, "train an adapter of this rank (LoRA) in place of the weights; 0: the weights")

        def problems(self) -> list[str]:
            if self.lora_rank > 0:
                return [*own.problems(self), *LoraArguments.problems(self)]
            if self.lora_rank < 0:
                return [*own.problems(self), f"--lora_rank {self.lora_rank} must not be negative"]
            idle = changed_flags(self, ("lora_alpha", "lora_dropout", "lora_targets", "merge"))
            return [
                *own.problems(self),
                *(f"--{name} {idle[name]} is of an adapter: give --lora_rank" for name in idle),
            ]

    Flags.__doc__, Flags.__name__ = own.__doc__, own.__name__
    return Flags


def adapted(stage: Stage, settings: Settings) -> Stage:
    """The stage as one that trains an adapter if `--lora_rank` asks for one; for `Stage.variant`."""
    if not settings.stage.lora_rank:
        return stage
    from trainer.adapter import adapting  # which imports PEFT

    return adapting(stage)
