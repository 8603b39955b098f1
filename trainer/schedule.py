"""The learning rate as a pure function of the optimizer step."""

import math


def get_lr(
    step: int,
    total_steps: int,
    peak: float,
    warmup_ratio: float = 0.03,
    schedule: str = "cosine",
    decay_ratio: float = 0.4,
    min_ratio: float = 0.1,
) -> float:
    """Learning rate of one optimizer step.

    Args:
        step: optimizer steps done before this one, so the first step is 0; clamped to [0, total_steps - 1].
        total_steps: optimizer steps of the whole run.
        peak: largest learning rate.
        warmup_ratio: share of the run that rises linearly; its first step is already above 0.
        schedule: "cosine" (Loshchilov & Hutter 2016), "wsd" (constant, then linear; Hu et al. 2024) or "constant".
        decay_ratio: share of the run that decays, for "wsd"; 1 decays from the end of warm-up on.
        min_ratio: the end of the schedule as a share of the peak.

    Returns:
        A value in (0, peak], and at least `min_ratio * peak` once warm-up is over.
    """
    step = max(0, min(step, total_steps - 1))
    warmup_steps = min(math.ceil(warmup_ratio * total_steps), total_steps - 1)
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return peak
    decay_steps = total_steps - warmup_steps
    if schedule == "wsd":
        decay_steps = max(1, min(decay_steps, round(decay_ratio * total_steps)))
    # The step is counted in full before it is taken: the last step still moves, with 1/decay_steps of the way to go.
    remaining = min(1.0, (total_steps - step) / decay_steps)
    shape = 0.5 * (1 - math.cos(math.pi * remaining)) if schedule == "cosine" else remaining
    return peak * (min_ratio + (1 - min_ratio) * shape)
