"""What a model says in the middle of its training: answers to look at, and questions that a program can check."""

import sys
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from dataset.builtin.store import ensure_builtin_corpus
from dataset.chat import render_prompt
from eval.choices import encode_continuation
from eval.questions import Question, limit_questions, load_questions
from eval.tasks import continuations_of, score_questions
from model.decoding import generate_tokens
from trainer.config import Settings
from trainer.data import BUILTIN_FOLDER
from trainer.distributed import whole_model
from trainer.run import Run

Prompt = str | list[dict[str, str]]

EMBEDDED_QUESTIONS = 104
"""Two of each family and language: 1 s at nano, and the share of right answers to within 10 per cent."""


def questions_to_ask(
    settings: Settings, is_chat: bool, tokenizer: PreTrainedTokenizerBase, places: int
) -> tuple[list[Question], list[str]]:
    """What `--questions` and `--eval_questions` say, by default some of the embedded ones; and notes for the user.

    These make sense for a stage that trains on conversations of the embedded corpus. They are of its validation part:
    the test part is the report's.

    Args:
        settings: of the run.
        is_chat: whether the stage trains on conversations.
        tokenizer: with the chat template.
        places: positions that the model knows; longer questions are left out.

    Raises:
        ValueError: a question file that cannot be used.
    """
    path, most = settings.run.questions, settings.run.eval_questions
    if most is None:
        most = EMBEDDED_QUESTIONS if path or (is_chat and settings.data.data_path is None) else 0
    if not most:
        return [], []
    path = path or ensure_builtin_corpus(BUILTIN_FOLDER)["eval.val"]
    questions = limit_questions(load_questions(path), most)
    fitting = [one for one in questions if _longest(one, tokenizer) < places]
    longer = len(questions) - len(fitting)
    note = f"questions: {len(fitting)} of {path} at each evaluation"
    return fitting, [note + (f"; {longer} are longer than the model's {places:,} positions" if longer else "")]


def _longest(question: Question, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of a question, with its longest choice where it has some.

    Raises:
        ValueError: a choice that cannot be weighed.
    """
    if question.choices:
        try:
            encoded = [
                encode_continuation(tokenizer, one, sys.maxsize) for one in continuations_of(question, tokenizer)
            ]
        except ValueError as error:
            raise ValueError(f"the question {question.id}: {error}") from error
        return max(len(ids) for ids, _ in encoded)
    return len(render_prompt(question.messages, tokenizer, question.tools))


def ask_questions(run: Run, questions: Sequence[Question], tokenizer: PreTrainedTokenizerBase) -> None:
    """Score the questions, print and log the share of right answers, by family too; touches no generator."""
    if not questions or (model := whole_model(run.model, run.world)) is None:
        return
    report = score_questions(model, tokenizer, questions, dtype=run.precision.dtype)
    right: dict[str, list[bool]] = {}
    for item in report.answered:
        right.setdefault(item.question.family, []).append(item.right)
    total = sum(item.right for item in report.answered)
    shares = {family: sum(verdicts) / len(verdicts) for family, verdicts in sorted(right.items())}
    metrics = {"question_accuracy": total / len(questions), "turn_ending_rate": report.turn_ending_rate}
    metrics |= {f"question_accuracy_{family}": share for family, share in shares.items()}
    run.tracker.log(run.progress.step, {"tokens": run.progress.tokens} | metrics)
    run.tracker.say(
        f"step {run.progress.step}/{run.total_steps} | questions {total}/{len(questions)} right "
        f"({total / len(questions):.0%}), {report.turn_ending_rate:.0%} of turns ended, {report.seconds:.1f} s"
    )


@torch.no_grad()
def sample_answers(run: Run, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> None:
    """Greedy continuations of the stage's sample prompts, printed and logged; touches no generator of the training."""
    if not prompts or (model := whole_model(run.model, run.world)) is None:
        return
    rendered = [
        tokenizer.encode(f"{tokenizer.decode([0])}{prompt}")
        if isinstance(prompt, str)
        else render_prompt(prompt, tokenizer)
        for prompt in prompts
    ]
    model.eval()
    stop_ids = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    with run.autocast():
        replies = generate_tokens(model, rendered, max_new_tokens=48, stop_ids=stop_ids)
    model.train()
    samples = []
    for prompt, reply in zip(prompts, replies, strict=True):
        question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        answer = tokenizer.decode(reply.ids, skip_special_tokens=True)
        samples.append({"prompt": question, "reply": answer})
        run.tracker.say(f"  sample | {question} -> {answer!r}")
    run.tracker.log(run.progress.step, {"tokens": run.progress.tokens, "samples": samples})
