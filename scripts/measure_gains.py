"""What the stages behind supervised fine-tuning gain, on questions, pairs and tasks that no stage has trained on.

Each stage is its own command, started from the same fine-tuned model once a seed. Then both models answer the same
questions, so that the intervals are those of paired differences. The last line of the output is the tables as JSON.

    python scripts/measure_gains.py
    python scripts/measure_gains.py --stages dpo grpo --seeds 1 2 3 --output out/gains

It takes about 20 minutes a seed on two CPU cores.
"""

import gc, pathlib, sys  # noqa: E401

sys.path[0] = sys.path[0] if __package__ else str(pathlib.Path(__file__).resolve().parents[1])
__package__ or gc.disable()  # a fifth of the time of the imports; `user_errors` turns it on again

import dataclasses
import json
import shlex
import subprocess
import time
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from dataset.builtin.families.multi_step import MULTI_STEP
from dataset.builtin.store import ensure_builtin_corpus
from dataset.lm_dataset import DPODataset, PromptDataset
from eval.comparison import Comparison, compare
from eval.questions import Interval, limit_questions, load_questions, wilson_interval
from eval.tasks import score_questions
from model.model_minimind import MiniMindForCausalLM
from trainer.config import ROOT, flag, parse_arguments, user_errors
from trainer.data import BUILTIN_FOLDER
from trainer.preference import MODEL_INPUTS, pairs_of, sums_of_documents
from trainer.rollout import BLOCK, RolloutArguments, judge, play, sampler_of
from trainer.rewards import parse_rewards
from trainer.weights import load_tokenizer, open_model

Verdicts = dict[str, bool]
WINDOW = 512
ARITHMETIC = ("addition", "subtraction")
TASKS = tuple(family.__name__ for family in MULTI_STEP)
STEPS = {
    "dpo": (),
    "grpo": ("--max_steps", "150"),
    "agent": ("--max_steps", "40"),
    "distillation": ("--max_steps", "150"),
}


@dataclasses.dataclass
class GainArguments:
    """What is measured, and from where."""

    _argument_group_name = "gains"

    model_path: str = flag(str(ROOT / "out" / "full_sft_256"), "the fine-tuned model; also the teacher")
    start_path: str = flag(str(ROOT / "out" / "mid_train_256"), "the model that becomes the teacher's student")
    stages: list[str] = dataclasses.field(default_factory=lambda: list(STEPS), metadata={"help": "which stages"})
    seeds: list[int] = dataclasses.field(default_factory=lambda: [42, 43, 44], metadata={"help": "a run each"})
    output: str = flag(str(ROOT / "out" / "gains"), "folder of the models and of what their runs print")
    limit: int = flag(0, "judge on so many questions, pairs and tasks; 0: all")
    more: str = flag("", "further flags of the stages, in one string")


@dataclasses.dataclass(frozen=True)
class Gain:
    """How the same items went before and after.

    Attributes:
        name: what was measured.
        seed: the run's.
        paired: the comparison, the first being before.
        before, after: items that went right.
    """

    name: str
    seed: int
    paired: Comparison
    before: int
    after: int

    @classmethod
    def of(cls, name: str, seed: int, before: Verdicts, after: Verdicts) -> "Gain":
        """From the verdicts on the same items."""
        return cls(name, seed, compare(before, after), sum(before.values()), sum(after.values()))

    @property
    def closed(self) -> tuple[float, Interval]:
        """The share of what was wrong before that the gain makes up, and its 95 % interval."""
        wrong = max(1 - self.before / self.paired.shared, 1e-9)
        interval = self.paired.interval
        return self.paired.difference / wrong, Interval(interval.low / wrong, interval.high / wrong)

    def row(self) -> str:
        """A line of the table."""
        count, (closed, interval) = self.paired.shared, self.closed
        both = (self.before, self.after)
        shares = [f"{right / count:.1%} ({_range(wilson_interval(right, count))})" for right in both]
        difference = f"{self.paired.difference:+.1%} ({_range(self.paired.interval)})"
        cells = [self.name, str(self.seed), f"{count:,}", *shares, difference, f"{closed:.0%} ({_range(interval)})"]
        return f"| {' | '.join(cells)} |"


def _range(interval: Interval) -> str:
    return f"{interval.low:.1%} to {interval.high:.1%}"


class Judge:
    """All held-out items, and how a model does on them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, limit: int):
        corpus = ensure_builtin_corpus(BUILTIN_FOLDER)
        self.tokenizer, limit = tokenizer, limit or None
        self.questions = limit_questions(load_questions(corpus["eval.test"]), limit)
        self.pairs = DPODataset(str(corpus["dpo.val"]), tokenizer, WINDOW, train_on="last", say=None)
        prompts = PromptDataset(str(corpus["rl.val"]), tokenizer, WINDOW, say=None)
        self.tasks = [item for item in prompts.items if item["extra"]["family"] in TASKS][:limit]
        self.limit = limit

    def answers(self, model: MiniMindForCausalLM) -> tuple[Verdicts, Verdicts]:
        """The test questions of the evaluation: sums without a tool, and all others."""
        report = score_questions(model, self.tokenizer, self.questions)
        right = {item.question.id: item for item in report.answered}
        sums = {name: item.right for name, item in right.items() if item.question.family in ARITHMETIC}
        return sums, {name: item.right for name, item in right.items() if name not in sums}

    @torch.inference_mode()
    def preferences(self, model: MiniMindForCausalLM) -> torch.Tensor:
        """(pairs,) how much likelier the chosen side is than the rejected one, in nats."""
        margins = []
        for index in range(len(self.pairs)):
            batch = {name: self.pairs[index][name][None] for name in MODEL_INPUTS}
            log_probs, _ = sums_of_documents(model(**batch, return_token_losses=True).token_losses, batch)
            both = pairs_of(log_probs[:, : int(batch["document_ids"].max())])
            margins.append((both[..., 0] - both[..., 1]).flatten())
        return torch.cat(margins)[: self.limit]

    def successes(self, model: MiniMindForCausalLM) -> Verdicts:
        """Tasks that take several calls of tools: the right answer by calls that work."""
        arguments = RolloutArguments(rewards=["success"], max_tool_rounds=4)
        rewards, stop_ids = parse_rewards(arguments.rewards), [self.tokenizer.eos_token_id, self.tokenizer.pad_token_id]
        sample, done = sampler_of(model, stop_ids, arguments.max_new_tokens, 0.0, 0), {}
        for first in range(0, len(self.tasks), BLOCK):
            block = [(number, 0) for number in range(first, min(first + BLOCK, len(self.tasks)))]
            rollouts = play(sample, block, self.tasks, self.tokenizer, arguments, WINDOW, "")
            judge(rollouts, self.tasks, rewards, arguments)
            done |= {str(one.prompt): one.reward >= 1 for one in rollouts}
        return done


def train(options: GainArguments, entry: str, start: str, seed: int, *words: str, name: str = "") -> Path:
    """Run a stage's own command; returns the folder of its model.

    Raises:
        ValueError: it failed; what it said stands in its log.
    """
    folder = Path(options.output) / f"{name or entry}_{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / "trainer" / f"train_{entry}.py"), "--from_weight", start, "--seed", str(seed)]
    command += ["--save_dir", str(folder), "--checkpoint_dir", str(folder / "checkpoints"), *words]
    command += ["--eval_interval", "0", "--eval_questions", "0", *shlex.split(options.more)]
    say(f"{name or entry}, seed {seed}: running; see {folder / 'log.txt'}")
    started = time.monotonic()
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    if code:
        raise ValueError(f"{shlex.join(command)} failed; see {folder / 'log.txt'}")
    say(f"{name or entry}, seed {seed}: {time.monotonic() - started:.0f} s")
    return next(path.parent for path in folder.glob("*/config.json"))


def measure_stage(options: GainArguments, stage: str, seed: int, judge_of: Judge, before: "Before") -> list[Gain]:
    """Run one stage and compare."""
    if stage == "distillation":
        alone = train(options, "full_sft", options.start_path, seed, *STEPS[stage], name="without_teacher")
        taught = train(
            options, "distillation", options.start_path, seed, "--teacher", options.model_path, *STEPS[stage]
        )
        both = [judge_of.answers(open_model(folder).eval()) for folder in (alone, taught)]
        first, second = (sums | others for sums, others in both)
        return [Gain.of("a student: without a teacher, with one", seed, first, second)]
    model = open_model(train(options, stage, options.model_path, seed, *STEPS[stage])).eval()
    sums, others = judge_of.answers(model)
    gains = []
    if stage == "dpo":
        margins = judge_of.preferences(model)
        gains.append(Gain.of("dpo: the chosen side is likelier", seed, _verdicts(before.margins), _verdicts(margins)))
        implicit = wilson_interval(int((margins > before.margins).sum()), len(margins))
        say(f"dpo, seed {seed}: the chosen side gained on the rejected one in {_range(implicit)} of the pairs")
    elif stage == "grpo":
        gains.append(Gain.of("grpo: sums without a tool", seed, before.sums, sums))
    else:
        gains.append(Gain.of("agent: several calls", seed, before.successes, judge_of.successes(model)))
    return [*gains, Gain.of(f"{stage}: all other questions", seed, before.others, others)]


@dataclasses.dataclass(frozen=True)
class Before:
    """How the fine-tuned model does."""

    sums: Verdicts
    others: Verdicts
    margins: torch.Tensor
    successes: Verdicts


def _verdicts(margins: torch.Tensor) -> Verdicts:
    return {str(index): margin > 0 for index, margin in enumerate(margins.tolist())}


def say(line: str) -> None:
    """Print at once: it takes long."""
    print(line, flush=True)


def main() -> None:
    """Entry point."""
    logging.disable_progress_bar()
    (options,) = parse_arguments(GainArguments, description=__doc__)
    if unknown := sorted(set(options.stages) - set(STEPS)):
        raise ValueError(f"--stages {' '.join(unknown)}: choose of {', '.join(STEPS)}")
    model_path = Path(options.model_path)
    judge_of, model = Judge(load_tokenizer(model_path), options.limit), open_model(model_path).eval()
    before = Before(*judge_of.answers(model), judge_of.preferences(model), judge_of.successes(model))
    gains = []
    for seed in options.seeds:
        for stage in options.stages:
            gains += measure_stage(options, stage, seed, judge_of, before)
    say("\n| | seed | items | before | after | difference | of the gap |\n|---|---|---|---|---|---|---|")
    for gain in sorted(gains, key=lambda gain: gain.name):  # stable: seeds stay in order
        say(gain.row())
    print(json.dumps([dataclasses.asdict(gain) for gain in gains]))


if __name__ == "__main__":
    with user_errors():
        main()
