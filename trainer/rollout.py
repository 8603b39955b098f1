"""Rollouts: what a model says to prompts, over one turn or several with tools, and how it is judged.

Token in, token out: what is trained are the very ids that were drawn, with the log-probabilities that the sampler drew
them with. Nothing is decoded and encoded again. The noise of a token is a function of the seed, the step, the prompt,
the sample, the round and the position, and prompts are decoded in blocks of fixed members, so that any number of ranks
and a resumed run draw the same.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from dataset.chat import OPEN_THINKING, render_messages
from dataset.formats import Message, parse_reply
from dataset.tools import run_tool
from model.decoding import Decoder, GeneratedReply, generate_tokens
from model.model_minimind import MiniMindForCausalLM
from trainer.config import flag
from trainer.rewards import Call, Reply, WeightedReward, parse_rewards

BLOCK = 128
"""Replies drawn together."""

DEFAULTS = {
    "from_weight": "auto",
    "max_seq_len": 256,
    "batch_size": 16,
    "optimizer": "adamw",
    "learning_rate": 1e-4,
    "weight_decay": 0.0,
    "min_lr_ratio": 0.0,  # at a constant 3e-4 sums went from 91 to 69 and 89 % right, from 1e-4 down to 0 to 93 %
    "log_interval": 5,
    "eval_interval": 25,
}
"""Of a stage that learns from rollouts."""

SAMPLE_PROMPTS = tuple([{"role": "user", "content": text}] for text in ("What is 47 plus 38?", "81减26是多少？"))
"""Answered as such a stage goes: sums of two digits like the embedded corpus's, which has neither."""

Sampler = Callable[[list[list[int]], list[str]], list[GeneratedReply]]
"""(prompts, what the noise of each depends on) -> replies with their log-probabilities, in order.

All that a rollout needs of an engine; another one than ours, such as a server's, fills in this function.
"""


@dataclasses.dataclass
class RolloutArguments:
    """What is drawn, how it is judged, and how many steps learn from it. All of it is bound to a run."""

    _argument_group_name = "rollouts"
    _may_change = ()

    rewards: list[str] = dataclasses.field(
        default_factory=lambda: ["number"],
        metadata={"help": "NAME, FILE.py:FUNCTION, either with :WEIGHT behind it; see trainer/rewards.py"},
    )
    reward_model: str | None = flag(None, "folder of a sequence-classification model, whose score is a reward too")
    rollout_prompts: int = flag(32, "prompts of a rollout, over all ranks")
    num_generations: int = flag(8, "replies to each prompt")
    num_mini_batches: int = flag(1, "optimizer steps in which a rollout is gone through")
    num_iterations: int = flag(1, "times that it is gone through")
    target_kl: float = flag(
        0.0,
        "a round ends early once what is learned from diverges by more than this from the sampler, as a mean, and more "
        "rounds make up for its steps; 0: never",
    )
    temperature: float = flag(1.0, "of the sampling; the log-probabilities that are trained are those at it")
    max_new_tokens: int = flag(64, "longest reply")
    max_tool_rounds: int = flag(0, "calls with results that a model may make before its answer")
    overlong: Literal["zero", "mask", "keep"] = flag(
        "zero",
        "a reply that the limit cuts off. zero: no reward, whatever it says; mask: nothing is learned from it; keep: "
        "as any other",
    )
    dynamic_sampling: Literal[0, 1] = flag(
        0, "1: prompts whose replies all get the same reward are replaced, as they teach nothing"
    )
    thinking: Literal["auto", "on", "off"] = flag("auto", "reasoning before the answer; auto: as the model likes")

    def problems(self) -> list[str]:
        """What is out of range, by flag."""
        problems = []
        try:
            parse_rewards(self.rewards)
        except ValueError as error:
            problems.append(str(error))
        if not 0 < self.temperature < 1e6:
            problems.append(f"--temperature {self.temperature:g} must be above 0: a greedy policy explores nothing")
        for name in ("rollout_prompts", "num_generations", "num_mini_batches", "num_iterations", "max_new_tokens"):
            if getattr(self, name) < 1:
                problems.append(f"--{name} {getattr(self, name)} must be at least 1")
        if self.num_mini_batches > self.rollout_prompts:
            problems.append(
                f"--num_mini_batches {self.num_mini_batches} must be at most --rollout_prompts {self.rollout_prompts}"
            )
        if not 0 <= self.target_kl < 1e6:
            problems.append(f"--target_kl {self.target_kl:g} must not be negative (and below a million)")
        if self.max_tool_rounds == 0 and any(word.partition(":")[0] == "success" for word in self.rewards):
            problems.append("--rewards success: without --max_tool_rounds no call has a result")
        if self.dynamic_sampling and self.num_generations < 2:
            problems.append(
                f"--dynamic_sampling 1 compares replies, --num_generations {self.num_generations} are too few"
            )
        if self.max_tool_rounds < 0:
            problems.append(f"--max_tool_rounds {self.max_tool_rounds} must not be negative")
        return problems

    @property
    def steps(self) -> int:
        """Optimizer steps that learn from a rollout."""
        return self.num_mini_batches * self.num_iterations


@dataclasses.dataclass
class Rollout:
    """One sample of what follows a prompt.

    Attributes:
        prompt: number of the prompt.
        sample: which of its samples.
        ids: of the prompt and all that followed, tools' results too.
        drawn: by the model; one for each id, as the next.
        log_probs: of the drawn ids at the sampling temperature, 0 for others.
        reply: the last turn.
        reward: the weighted sum of its rewards.
        rewards: each by its name.
    """

    prompt: int
    sample: int
    ids: list[int]
    drawn: list[bool]
    log_probs: list[float]
    reply: Reply | None = None
    reward: float = 0.0
    rewards: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def length(self) -> int:
        """How many tokens the model drew."""
        return sum(self.drawn)

    def take(self, ids: Sequence[int], log_probs: Sequence[float] | None = None) -> None:
        """Append what the model drew, or with no log-probabilities what it was told."""
        self.ids += ids
        self.drawn += [log_probs is not None] * len(ids)
        self.log_probs += [0.0] * len(ids) if log_probs is None else log_probs


def sampler_of(
    model: MiniMindForCausalLM, stop_ids: list[int], max_new_tokens: int, temperature: float, seed: int, dtype=None
) -> Sampler:
    """Our decoder as an engine, with the model's weights as they are now; temperature 0 is greedy."""
    decoder = Decoder(model, dtype)

    def sample(prompts: list[list[int]], noise_keys: list[str]) -> list[GeneratedReply]:
        return generate_tokens(
            decoder, prompts, max_new_tokens, stop_ids, temperature=temperature, seed=seed, batch_size=len(prompts),
            noise_keys=noise_keys, keep_log_probs=True,
        )  # fmt: skip

    return sample


def blocks_of(numbers: Sequence[int], num_generations: int) -> list[list[tuple[int, int]]]:
    """(prompt, sample) pairs cut into blocks that are drawn together, a prompt's samples all in one."""
    size = max(1, BLOCK // num_generations)
    return [
        [(number, sample) for number in numbers[first : first + size] for sample in range(num_generations)]
        for first in range(0, len(numbers), size)
    ]


def play(
    sample: Sampler,
    pairs: Sequence[tuple[int, int]],
    items: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    arguments: RolloutArguments,
    window: int,
    noise: str,
) -> list[Rollout]:
    """Draw the rollouts of a block together, round by round.

    Args:
        sample: draws.
        pairs: (prompt, sample) of each.
        items: all prompts, see `PromptDataset`.
        tokenizer: the model's.
        arguments: how many rounds, and how the prompts were rendered.
        window: a rollout that would become longer than this ends where it is, and did not end by itself.
        noise: what the noise depends on besides prompt, sample, round and position.
    """
    rollouts = []
    for number, which in pairs:
        ids = items[number]["input_ids"].tolist()
        rollouts.append(Rollout(number, which, ids, [False] * len(ids), [0.0] * len(ids)))
    open_thinking, playing = OPEN_THINKING[arguments.thinking], rollouts
    for tool_round in range(arguments.max_tool_rounds + 1):
        keys = [f"{noise}:{one.prompt}:{one.sample}:{tool_round}" for one in playing]
        replies = sample([one.ids for one in playing], keys)
        going_on = []
        for one, drawn in zip(playing, replies, strict=True):
            results = _take_reply(one, drawn, tokenizer, open_thinking, items[one.prompt]["tools"])
            if not results or tool_round == arguments.max_tool_rounds:
                continue
            try:
                told = tool_turn(one.reply.message, results, tokenizer, open_thinking)
            except ValueError:  # arguments that no text can hold, such as half of a surrogate pair
                told = [0] * window
            if len(one.ids) + len(told) + arguments.max_new_tokens > window:
                one.reply = dataclasses.replace(one.reply, ended=False)
                continue
            one.take(told)
            going_on.append(one)
        playing = going_on
        if not playing:
            break
    return rollouts


def _take_reply(
    rollout: Rollout,
    drawn: GeneratedReply,
    tokenizer: PreTrainedTokenizerBase,
    open_thinking: bool | None,
    tools: Sequence[Mapping[str, Any]] | None,
) -> list[Message]:
    """Append one turn of the model; returns the results of its tool calls as messages."""
    stop = [] if drawn.stop_id is None else [drawn.stop_id]
    rollout.take([*drawn.ids, *stop], drawn.log_probs)
    text, ended = tokenizer.decode(drawn.ids), drawn.stop_id == tokenizer.eos_token_id
    text = f"<think>\n{text}" if open_thinking else text  # which the prompt ends with
    message = parse_reply(text)
    before = rollout.reply.calls if rollout.reply else ()
    offered = {tool.get("function", tool)["name"] for tool in tools or ()}
    made = tuple(
        Call(call["name"], call["arguments"], run_tool(call["name"], call["arguments"]))
        if call["name"] in offered
        else Call(call["name"], call["arguments"], f"error: no tool {call['name']!r} here")
        for call in (message.get("tool_calls", []) if ended and tools else [])
    )
    rollout.reply = Reply(text, message, ended, rollout.length, before + made)
    return [{"role": "tool", "content": call.result} for call in made]


def tool_turn(
    message: Message, results: Sequence[Message], tokenizer: PreTrainedTokenizerBase, open_thinking: bool | None
) -> list[int]:
    """Ids between the end of a turn that calls tools and the next turn of the model: the results, and its opening.

    Turns are rendered independently of each other, so these are the ids that a whole conversation has there.
    """
    chat = render_messages([{"role": "user", "content": "?"}, message, *results], tokenizer, None, True, open_thinking)
    start = next(place for role, place in chat.turns if role == "tool")
    while chat.input_ids[start - 1] != tokenizer.eos_token_id:  # a line break stands between the turns
        start -= 1
    return chat.input_ids[start:]


def judge(
    rollouts: Sequence[Rollout],
    items: Sequence[Mapping[str, Any]],
    rewards: Sequence[WeightedReward],
    arguments: RolloutArguments,
) -> None:
    """Give rollouts their rewards; `items` are all prompts.

    Raises:
        ValueError: a user's function failed or gave something else than a finite number.
    """
    for reward in rewards:
        for rollout, value in zip(rollouts, values_of(reward, rollouts, items), strict=True):
            cut_off = arguments.overlong == "zero" and not rollout.reply.ended
            rollout.rewards[reward.name] = min(0.0, value) if cut_off else value
    for rollout in rollouts:
        rollout.reward = sum(reward.weight * rollout.rewards[reward.name] for reward in rewards)


def values_of(
    reward: WeightedReward, rollouts: Sequence[Rollout], items: Sequence[Mapping[str, Any]]
) -> Sequence[float]:
    """What one reward gives each rollout."""
    if reward.judges_all:
        values = reward.function([one.reply for one in rollouts], [items[one.prompt] for one in rollouts])
        if not all(map(math.isfinite, values)):
            raise ValueError(f"--{reward.name} gave a reward that is no number")
        return values
    values = []
    for rollout in rollouts:
        said = rollout.reply.text[:80]
        try:
            value = float(reward.function(rollout.reply, items[rollout.prompt]))
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise ValueError(f"--rewards {reward.name} failed on the reply {said!r}: {problem}") from error
        if not math.isfinite(value):
            raise ValueError(f"--rewards {reward.name} gave {value} for the reply {said!r}")
        values.append(value)
    return values


def describe(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """What is worth watching of some rollouts: means of the reward, of each of its parts, of lengths and of ends."""
    count = max(len(rollouts), 1)
    means = {"reward": sum(one.reward for one in rollouts) / count}
    names = rollouts[0].rewards if rollouts else ()
    if len(names) > 1:
        means |= {f"reward_{name}": sum(one.rewards[name] for one in rollouts) / count for name in names}
    means["reply_tokens"] = sum(one.length for one in rollouts) / count
    if any(one.reply.calls for one in rollouts):
        means["tool_calls"] = sum(len(one.reply.calls) for one in rollouts) / count
    means["ended"] = sum(one.reply.ended for one in rollouts) / count
    return means
