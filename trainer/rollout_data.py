"""What reinforcement learning trains on: rollouts of the weights as they are, cut into packed rows and steps.

A round takes the next prompts of the epoch, draws replies to them, has them judged, and makes `RolloutArguments.steps`
optimizer steps of them. All ranks know all rollouts of a round, so their rows are cut the same way on any number of
ranks; and a checkpoint holds them, so that a run goes on in the middle of a round.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dataset.chat import OPEN_THINKING, render_prompt
from dataset.lm_dataset import PackedDataset, PromptDataset, collate_rows
from dataset.order import EMPTY_ROW, epoch_order
from dataset.packing import pack_conversations
from dataset.selection import DataSummary
from trainer.config import raise_problems
from trainer.distributed import all_reduce_sum, gather_objects, is_sharded, whole_model
from trainer.losses import Batch, StepContext
from trainer.reward_model import RewardModel
from trainer.rewards import WeightedReward, check_answers, parse_rewards, reward_fingerprint
from trainer.rollout import Rollout, Sampler, blocks_of, describe, judge, play, sampler_of
from trainer.run import Progress, Run

SHOWN_ROLLOUTS = 2
SHOWN_CHARACTERS = 240


@dataclasses.dataclass
class Round:
    """Rollouts that are being learned from, flat.

    Attributes:
        ids: (tokens,) of all rollouts, one behind the other.
        drawn: (tokens,) whether a token is learned from.
        values: (tokens,) each: what the loss wants to know of each token besides, `behaviour` among them.
        lengths: (rollouts,) tokens of each.
        groups: (rollouts,) place of its prompt among the round's.
        rows: prompts of the epoch that the round consumed.
        step: how many of its steps have been handed out.
        terms: (rollouts,) how many terms of the loss each is; None: none is left out.
        teaches: (rollouts,) whether its gradient is anything but 0; the others are left out of the rows.
    """

    ids: np.ndarray
    drawn: np.ndarray
    values: dict[str, np.ndarray]
    lengths: np.ndarray
    groups: np.ndarray
    rows: int
    step: int = 0
    terms: np.ndarray | None = None
    teaches: np.ndarray | None = None

    @property
    def starts(self) -> np.ndarray:
        """(rollouts,) where each begins in the flat arrays."""
        return np.cumsum(self.lengths) - self.lengths

    def parts(self, num_mini_batches: int) -> int:
        """Mini-batches that it is gone through in: a round of few prompts has fewer."""
        return min(num_mini_batches, int(self.groups[-1]) + 1)

    def part(self, count: int, window: int) -> "RolloutRows":
        """Rows of what the next step learns from, one of that many mini-batches.

        Rollouts that teach nothing are left out, and the advantages of the others made smaller by as much as the terms
        became fewer, by whose number the loss is divided: the same gradient from fewer rows, with tools from 6 to 25 %.
        """
        groups = np.array_split(np.arange(self.groups[-1] + 1), count)[self.step % count]
        chosen, values = np.flatnonzero(np.isin(self.groups, groups)), self.values
        if self.teaches is not None and 0 < len(taught := chosen[self.teaches[chosen]]) < len(chosen):
            share = self.terms[taught].sum() / self.terms[chosen].sum()
            chosen, values = taught, values | {"advantages": values["advantages"] * np.float32(share)}
        return RolloutRows(self, chosen, values, window)

    @classmethod
    def of(cls, groups: Sequence[Sequence[Rollout]], rows: int, masks_overlong: bool) -> "Round":
        """Of the rollouts of each prompt."""
        rollouts = [rollout for group in groups for rollout in group]
        return cls(
            ids=np.concatenate([np.array(one.ids, dtype=np.int64) for one in rollouts]),
            drawn=np.concatenate([np.array(one.drawn) & (one.reply.ended or not masks_overlong) for one in rollouts]),
            values={"behaviour": np.concatenate([np.array(one.log_probs, dtype=np.float32) for one in rollouts])},
            lengths=np.array([len(one.ids) for one in rollouts]),
            groups=np.array([place for place, group in enumerate(groups) for _ in group]),
            rows=rows,
        )

    def state(self) -> dict[str, Any]:
        """As tensors and numbers, for a checkpoint."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain["values"] = {name: torch.from_numpy(values) for name, values in self.values.items()}
        return {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in plain.items()
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Round":
        """Undo `state`; the arrays are copies."""

        def array(value: Any) -> Any:
            return np.array(value) if isinstance(value, torch.Tensor) else value

        values = {name: array(value) for name, value in state["values"].items()}
        return cls(**{name: array(value) for name, value in state.items() if name != "values"}, values=values)


class RolloutRows(PackedDataset):
    """Some rollouts of a round, packed. An item holds each of the values of its tokens too, (window,)."""

    def __init__(self, whole: Round, chosen: np.ndarray, values: dict[str, np.ndarray], window: int):
        plan = pack_conversations(whole.lengths[chosen], window, whole.starts[chosen])
        super().__init__(whole.ids, whole.drawn, plan, 0, DataSummary())
        self.values = values

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Row `index`, or a fully masked one for `EMPTY_ROW` (-1)."""
        item, places = super().__getitem__(index), self.places(index)
        for name, values in self.values.items():
            item[name] = torch.from_numpy(np.where(places >= 0, values[places], np.float32(0)))
        return item

    def places(self, index: int) -> np.ndarray:
        """(window,) where each token of a row stands in the round's flat arrays; -1 for padding."""
        first, last = (0, 0) if index == EMPTY_ROW else self.plan.row_pieces[index : index + 2].tolist()
        starts, lengths = self.plan.piece_starts[first:last], self.plan.piece_lengths[first:last]
        found = np.concatenate([np.arange(0), *map(np.arange, starts, starts + lengths)]).astype(np.int64)
        return np.pad(found, (0, self.max_length - len(found)), constant_values=-1)

    def batches(self, size: int, rank: int, ranks: int) -> Iterator[tuple[Batch, Tensor]]:
        """A rank's micro-batches of `size` rows with the `places` of their tokens; each rank has equally many."""
        for first in range(0, len(self), size * ranks):
            mine = range(first, min(first + size * ranks, len(self)))[rank::ranks] or [EMPTY_ROW]
            places = torch.from_numpy(np.stack([self.places(row) for row in mine]))
            yield collate_rows([self[row] for row in mine]), places


class RolloutData:
    """Prompts to learn on by rollouts; it takes the place of a data set of rows.

    Attributes:
        prompts: a `PromptDataset`.
        summary: of the prompts.
        tokenizer, rewards: see `prepare_rollouts`.
        annotate: (run, the rollouts of each prompt, round): adds values to the round; a stage sets it.
        needs_contrast: whether nothing is learned where all replies to a prompt get the same reward; a stage sets it.
    """

    def __init__(self, prompts: PromptDataset):
        self.prompts, self.summary = prompts, prompts.summary
        self.rewards: Sequence[WeightedReward] = ()
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.annotate: Callable[[Run, list[list[Rollout]], Round], None] = lambda run, groups, round: None
        self.needs_contrast = False
        self.round: Round | None = None
        self.unfinished: tuple[Progress, int, Round, int] | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    def describe(self) -> str:
        """What a run says of its data before it starts."""
        longest = max(len(item["input_ids"]) for item in self.prompts.items)
        with_tools = sum(item["tools"] is not None for item in self.prompts.items)
        return f"{len(self):,} prompts of at most {longest:,} tokens, {with_tools:,} of them with tools"

    @property
    def preview(self) -> PromptDataset:
        """Tokens to try things on."""
        return self.prompts

    def state(self) -> dict[str, Any] | None:
        """The round that is under way, the same on every rank; None between two rounds."""
        if self.unfinished is not None:
            progress, before, current, step = self.unfinished
            if progress.step == before:
                return current.state() | {"step": step}
        return None if self.round is None else self.round.state()

    def restore(self, state: dict[str, Any] | None) -> None:
        """Undo `state`."""
        self.round = None if state is None else Round.from_state(state)

    def steps(self, run: Run) -> Iterator[tuple[list[Batch], int]]:
        """The optimizer steps left in this epoch: this rank's micro-batches, and the prompts that all ranks consume.

        A round's prompts count as consumed with its last step.

        Raises:
            ValueError: no reply in a whole epoch teaches anything.
        """
        arguments = run.settings.stage
        while self.round is not None or (run.progress.row < len(self) and self.new_round(run)):
            current = self.round
            steps = current.parts(arguments.num_mini_batches) * arguments.num_iterations
            batches, last = self.micro_batches(run, current), current.step + 1 == steps
            if current.step and self.has_drifted(run, batches):
                self.round = None
                run.progress.row += current.rows
                continue
            # A checkpoint that is saved behind this step goes on from here; one that a failure in it saves, before it.
            self.unfinished = (run.progress, run.progress.step, current, current.step)
            current.step += 1
            self.round = None if last else current
            yield batches, current.rows if last else 0

    def micro_batches(self, run: Run, current: Round) -> list[Batch]:
        """This rank's micro-batches of the round's next step; each rank has equally many."""
        optimization, world = run.settings.optimization, run.world
        count = current.parts(run.settings.stage.num_mini_batches)
        rows = current.part(count, run.settings.data.max_seq_len)
        return [batch for batch, _ in rows.batches(optimization.batch_size, world.rank, world.size)]

    @torch.no_grad()
    def has_drifted(self, run: Run, batches: Sequence[Batch]) -> bool:
        """Whether the weights are too far from those that drew the rollouts for another step; looked at before it."""
        limit = run.settings.stage.target_kl
        if not limit:
            return False
        terms, drift = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        was_training = run.model.training
        run.model.eval()
        for batch in batches:
            counts = run.count(batch)
            batch = batch | {"input_ids": batch["input_ids"].to(run.world.device)}
            with run.autocast():
                _, _, logs = run.loss(run.model, batch, StepContext(counts[0], counts[2], run.expert_loads))
            terms, drift = terms + counts[0], drift + logs["drift_sum"].double().cpu()
        run.model.train(was_training)
        terms, drift = all_reduce_sum(torch.stack([terms, drift]).to(run.world.device)).tolist()
        return drift > limit * terms

    def new_round(self, run: Run) -> bool:
        """Draw and judge the next rollouts; False if the epoch has no prompt left that teaches anything."""
        arguments, progress = run.settings.stage, run.progress
        order = epoch_order(len(self), run.settings.optimization.seed, progress.epoch)[progress.row :].tolist()
        started, wanted, groups, drawn, seen = time.perf_counter(), arguments.rollout_prompts, [], [], 0
        while seen < len(order) and len(groups) < wanted:
            numbers = order[seen : seen + wanted]
            fresh = draw(run, self.prompts, numbers, arguments.num_generations, arguments.temperature)
            drawn += fresh
            if not arguments.dynamic_sampling:
                teaches = not self.needs_contrast or any(map(has_contrast, fresh))
                groups = fresh if teaches and any(self.is_trained(run, one) for group in fresh for one in group) else []
                seen += len(fresh)
                continue
            for group in fresh:
                seen += 1
                groups += [group] if has_contrast(group) and any(self.is_trained(run, one) for one in group) else []
                if len(groups) == wanted:
                    break  # what was drawn beyond is drawn again, by newer weights
        rollouts = [rollout for group in drawn for rollout in group]
        if not groups:
            if progress.row == 0 and progress.step:
                run.tracker.say(
                    "all replies to all prompts get the same reward: nothing is left to learn, it ends here"
                )
                run.total_steps = progress.step
            if progress.row == 0 and not progress.step:
                raise ValueError(
                    f"no reply to any of the {len(self):,} prompts got another reward than its neighbours (mean "
                    f"{describe(rollouts)['reward']:.3f}, {describe(rollouts)['ended']:.0%} ended): nothing can be "
                    "learned; take easier prompts, another --rewards, more --num_generations or --max_new_tokens"
                )
            return False
        self.round = Round.of(groups, seen, arguments.overlong == "mask")
        self.annotate(run, groups, self.round)
        self.log(run, rollouts, sum(map(has_contrast, drawn)) / len(drawn), time.perf_counter() - started)
        return True

    def is_trained(self, run: Run, rollout: Rollout) -> bool:
        """Whether anything is learned from a rollout's tokens."""
        return rollout.reply.ended or run.settings.stage.overlong != "mask"

    def log(self, run: Run, rollouts: list[Rollout], useful: float, seconds: float) -> None:
        """Metrics of the round's rollouts, and some of them, with the step that learns from them first."""
        step, means = run.progress.step + 1, describe(rollouts)
        tokens = sum(rollout.length for rollout in rollouts)
        metrics = {f"rollout_{name}": value for name, value in means.items()}
        metrics |= {"rollout_useful": useful, "rollout_tokens_per_second": tokens / seconds}
        run.tracker.log(step, {"tokens": run.progress.tokens} | metrics)
        interval = run.settings.run.log_interval * run.settings.stage.steps
        if run.progress.step % interval < run.settings.stage.steps:
            shown = ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in means.items())
            rate = f"prompts that teach {useful:.0%} | {tokens / seconds:,.0f} tokens/s"
            run.tracker.say(f"rollouts for step {step} | {shown} | {rate}")
            chosen = rollouts[:: len(rollouts) // SHOWN_ROLLOUTS or 1][:SHOWN_ROLLOUTS]
            samples = [self.sample_of(rollout) for rollout in chosen]
            run.tracker.log(step, {"tokens": run.progress.tokens, "rollouts": samples})
            for sample in samples:
                shown = (
                    sample["reply"]
                    if len(sample["reply"]) <= SHOWN_CHARACTERS
                    else sample["reply"][:SHOWN_CHARACTERS] + "…"
                )
                run.tracker.say(f"  {sample['reward']:.2f} | {sample['prompt']} -> {shown!r}")

    def sample_of(self, rollout: Rollout) -> dict[str, Any]:
        """A rollout to look at."""
        question = self.prompts[rollout.prompt]["messages"][-1]["content"]
        length = len(self.prompts[rollout.prompt]["input_ids"])
        reply = self.tokenizer.decode(rollout.ids[length:])
        return {"prompt": question, "reply": reply, "reward": rollout.reward, "rewards": rollout.rewards}


def has_contrast(group: Sequence[Rollout]) -> bool:
    """Whether the replies to a prompt got different rewards."""
    return len({rollout.reward for rollout in group}) > 1


def draw(
    run: Run, prompts: PromptDataset, numbers: Sequence[int], num_generations: int, temperature: float
) -> list[list[Rollout]]:
    """The judged rollouts of each of these prompts, in order, drawn by all ranks together; temperature 0 is greedy."""
    arguments, data, window = run.settings.stage, run.train_data, run.settings.data.max_seq_len
    blocks = blocks_of(numbers, num_generations)
    sample, ranks = run_sampler(run, temperature)
    played, problem = {}, None
    try:
        for block in range(run.world.rank, len(blocks), ranks) if sample else ():
            noise = f"{run.progress.step}"
            rollouts = play(sample, blocks[block], prompts.items, data.tokenizer, arguments, window, noise)
            judge(rollouts, prompts.items, data.rewards, arguments)
            played[block] = rollouts
    except ValueError as error:  # such as a user's reward that fails: every rank says so, and none waits for another
        problem = str(error)
    parts, problems = zip(*gather_objects((played, problem)), strict=True)
    raise_problems([one for one in problems if one][:1])
    merged = {block: rollouts for part in parts for block, rollouts in part.items()}
    flat = [rollout for block in range(len(blocks)) for rollout in merged[block]]
    return [flat[first : first + num_generations] for first in range(0, len(flat), num_generations)]


def run_sampler(run: Run, temperature: float) -> tuple[Sampler | None, int]:
    """The run's weights as an engine, and how many ranks have it; None on a rank that has not.

    Under FSDP the first rank alone gets whole weights to draw with.
    """
    model = whole_model(run.model, run.world) if is_sharded(run.model) else run.bare_model
    ranks = 1 if is_sharded(run.model) else run.world.size
    if model is None:
        return None, ranks
    tokenizer, dtype = run.train_data.tokenizer, run.precision.dtype if run.precision.use_autocast else None
    stop_ids, seed = [tokenizer.eos_token_id, tokenizer.pad_token_id], run.settings.optimization.seed
    return sampler_of(model, stop_ids, run.settings.stage.max_new_tokens, temperature, seed, dtype), ranks


def log_rewards(run: Run, iterations: int | None = None) -> dict[str, Any]:
    """Answer held-out prompts greedily, print, and append to metrics.jsonl: validation_reward and what goes with it.

    `validation_loss`, by which the best checkpoint is chosen, is the reward below zero.
    """
    metrics: dict[str, Any] = {"tokens": run.progress.tokens}
    said = []
    for name, prompts in run.validation_data.items():
        count = (iterations or run.settings.run.eval_iters) * run.settings.optimization.batch_size
        numbers = epoch_order(len(prompts), run.settings.optimization.seed + 1, 0)[:count].tolist()
        groups = draw(run, prompts, numbers, 1, 0.0)
        means = describe([rollout for group in groups for rollout in group])
        metrics |= {f"validation_{key}": value for key, value in means.items()}
        metrics["validation_loss"] = -means["reward"]
        shown = ", ".join(f"{key.replace('_', ' ')} {value:.3g}" for key, value in means.items())
        said.append(f"{len(groups):,} {name}, greedy: {shown}")
    run.tracker.log(run.progress.step, metrics)
    run.tracker.say(f"step {run.progress.step}/{run.total_steps} | validation {'; '.join(said) or 'none'}")
    return metrics


def prepare_rollouts(run: Run, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Give the data what rollouts need.

    Raises:
        ValueError: settings that do not go together, a reward that cannot be had, or a prompt without its answer.
    """
    arguments, optimization, data = run.settings.stage, run.settings.optimization, run.train_data
    problems = []
    if optimization.accumulation_steps != 1:
        problems.append(
            f"--accumulation_steps {optimization.accumulation_steps}: a step takes the micro-batches that its rollouts "
            "fill; see --rollout_prompts, --num_generations and --num_mini_batches"
        )
    every = [item for prompts in (data.prompts, *run.validation_data.values()) for item in prompts.items]
    if arguments.thinking != "auto":
        for item in every:
            opened = render_prompt(item["messages"], tokenizer, item["tools"], OPEN_THINKING[arguments.thinking])
            item["input_ids"] = torch.tensor(opened)
    longest, window = max(len(item["input_ids"]) for item in every), run.settings.data.max_seq_len
    if longest + arguments.max_new_tokens > window:
        problems.append(
            f"--max_seq_len {window}: the longest prompt has {longest} tokens and a reply up to "
            f"{arguments.max_new_tokens} (--max_new_tokens); make it at least {longest + arguments.max_new_tokens}"
        )
    raise_problems(problems)
    data.tokenizer, data.rewards = tokenizer, parse_rewards(arguments.rewards)
    check_answers(every, data.rewards)
    run.fingerprints["rewards"] = reward_fingerprint(arguments.rewards, arguments.reward_model)
    if arguments.reward_model is not None:
        model = RewardModel(arguments.reward_model, run.world.device)
        data.rewards = [*data.rewards, WeightedReward("reward_model", 1.0, model, judges_all=True)]
    names = ", ".join(f"{reward.name} x {reward.weight:g}" for reward in data.rewards)
    return [
        f"rewards: {names}",
        f"rollouts: {arguments.num_generations} replies to each of {arguments.rollout_prompts} prompts, at temperature "
        f"{arguments.temperature:g}, {arguments.steps} steps each",
    ]
