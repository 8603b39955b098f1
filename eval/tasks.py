"""Questions with answers that a program can check: asked greedily in batches, scored by family and language.

Every accuracy comes with its 95 % interval and with the share that the best constant answer would get, because a family
of yes-or-no questions is half right by saying "yes".
"""

import json
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import compress
from typing import Any

import torch

from dataset.chat import chat_renderer, render_prompt
from dataset.formats import parse_reply
from dataset.tools import run_tool
from eval.choices import Continuation, Picks, pick, weigh
from eval.forms import follows, tokens_of_form
from eval.questions import Interval, Question, best_constant, is_right, wilson_interval
from eval.texts import words_in
from model.decoding import Decoder, GeneratedReply, generate_tokens


@dataclass
class FamilyScore:
    """Right replies of one family in one language. `constant_right` is what the best single answer would have got.

    Of multiple choice, `constant_right` is what guessing gets, `right` goes by log-likelihood, and the other two by
    log-likelihood per character and per byte.
    """

    family: str
    language: str
    right: int = 0
    total: int = 0
    ended: int = 0
    constant_right: float = 0
    free_arithmetic: bool = False
    right_by_characters: int | None = None
    right_by_bytes: int | None = None

    @property
    def accuracy(self) -> float:
        """Share of right replies."""
        return self.right / self.total if self.total else 0.0

    @property
    def interval(self) -> Interval:
        """95 % Wilson interval of the accuracy."""
        return wilson_interval(self.right, self.total)

    def to_dict(self) -> dict[str, Any]:
        """Counts and what follows from them, ready for JSON."""
        return asdict(self) | {
            "accuracy": self.accuracy,
            "low": self.interval.low,
            "high": self.interval.high,
            "constant": self.constant_right / self.total if self.total else 0.0,
        }


@dataclass
class ToolScore:
    """How far the replies to tool questions got; each count implies those before it."""

    total: int = 0
    well_formed: int = 0
    right_name: int = 0
    right_arguments: int = 0
    right_final_answer: int = 0


@dataclass
class Answered:
    """What the model said to one question. `turns` counts its replies, `ended` those that it ended by itself."""

    question: Question
    replies: list[str] = field(default_factory=list)
    right: bool = False
    turns: int = 0
    ended: int = 0
    tool_progress: int = 0
    """Of a tool question: 1 well-formed, 2 right name, 3 right arguments, 4 right final answer; 0 none of it."""

    log_likelihoods: list[float] | None = None
    picks: Picks | None = None
    """Of a multiple choice: what was picked by each rule."""

    @property
    def reply(self) -> str:
        """All that the model said, one turn a line."""
        return "\n".join(self.replies)

    def to_dict(self) -> dict[str, Any]:
        """The question, the reply and the verdict, ready for JSON."""
        question = self.question
        return {
            "id": question.id,
            "family": question.family,
            "language": question.language,
            "prompt": question.messages[-1]["content"],
            "reply": self.reply,
            "expected": question.answers[0],
            "right": self.right,
            "ended": self.ended == self.turns,
        } | ({} if self.log_likelihoods is None else {"log_likelihoods": list(map(_finite, self.log_likelihoods))})


@dataclass
class TaskReport:
    """The scores of one model on one set of questions, and every reply."""

    answered: list[Answered]
    seconds: float = 0.0

    @property
    def families(self) -> list[FamilyScore]:
        """One score for each family and language, in the order of their names."""
        groups: dict[tuple[str, str], list[Answered]] = defaultdict(list)
        for item in self.answered:
            groups[item.question.family, item.question.language].append(item)
        return [_family_score(*key, items) for key, items in sorted(groups.items())]

    @property
    def tools(self) -> ToolScore:
        """Totals over the questions that ask for a tool."""
        progress = [item.tool_progress for item in self.answered if item.question.check == "tool_call"]
        return ToolScore(len(progress), *(sum(value >= level for value in progress) for level in range(1, 5)))

    @property
    def turn_ending_rate(self) -> float:
        """Share of the model's turns that it ended by itself before the cap on their length."""
        return sum(item.ended for item in self.answered) / max(1, sum(item.turns for item in self.answered))

    @property
    def repetition_rate(self) -> float:
        """Mean share of a reply's sequences of four words that occurred in it before; replies of fewer do not count."""
        replies = [item.reply for item in self.answered if item.turns]  # a choice is no reply
        shares = [share for reply in replies if (share := repeated_share(reply)) is not None]
        return sum(shares) / max(1, len(shares))

    def samples(self, per_family: int = 1) -> list[dict[str, Any]]:
        """The first questions of each family and language with their replies: the same ones for every model."""
        taken: Counter[tuple[str, str]] = Counter()
        chosen = []
        for item in self.answered:
            key = item.question.family, item.question.language
            if taken[key] < per_family:
                taken[key] += 1
                chosen.append(item.to_dict())
        return chosen

    def to_dict(self) -> dict[str, Any]:
        """Scores without the replies, ready for JSON."""
        return {
            "questions": len(self.answered),
            "right": sum(item.right for item in self.answered),
            "turns": sum(item.turns for item in self.answered),
            "turns_ended": sum(item.ended for item in self.answered),
            "turn_ending_rate": self.turn_ending_rate,
            "repetition_rate": self.repetition_rate,
            "tools": asdict(self.tools),
            "families": [score.to_dict() for score in self.families],
            "seconds": self.seconds,
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def repeated_share(text: str, length: int = 4) -> float | None:
    """Share of a text's sequences of `length` words that are repetitions of earlier ones; None if it has none."""
    words = words_in(text)
    sequences = [tuple(words[start : start + length]) for start in range(len(words) - length + 1)]
    return 1 - len(set(sequences)) / len(sequences) if sequences else None


def _family_score(family: str, language: str, items: list[Answered]) -> FamilyScore:
    questions = [item.question for item in items]
    picks = [(item.picks, item.question) for item in items if item.picks]
    return FamilyScore(
        family=family,
        language=language,
        right=sum(item.right for item in items),
        total=len(items),
        ended=sum(item.ended == item.turns for item in items),
        constant_right=best_constant([question for question in questions if question.check not in ("choice", "form")])
        + sum(1 / len(question.choices) for question in questions if question.choices),
        free_arithmetic=any(question.free_arithmetic for question in questions),
        right_by_characters=sum(_is_pick(pick.by_characters, question) for pick, question in picks) if picks else None,
        right_by_bytes=sum(_is_pick(pick.by_bytes, question) for pick, question in picks) if picks else None,
    )


def _is_pick(index: int, question: Question) -> bool:
    return question.choices[index] == question.answers[0]


def score_questions(
    model,
    tokenizer,
    questions: Sequence[Question],
    max_new_tokens: int | None = None,
    batch_size: int = 128,
    seed: int = 0,
    max_tool_rounds: int = 4,
    dtype: torch.dtype | None = None,
    open_thinking: bool | None = None,
) -> TaskReport:
    """Ask every question greedily and score the replies. Replies that never end are capped and count as not ended.

    Questions with choices are weighed, see `eval.choices`.

    Args:
        model: MiniMindForCausalLM on its device; it is left as it was.
        tokenizer: with the chat template that the model was trained on.
        questions: see `load_questions`.
        max_new_tokens: cap of one reply; by default the longest accepted answer of its family, and room to be wrong.
        batch_size: prompts answered together.
        seed: handed to the sampler, which does not draw when it is greedy.
        max_tool_rounds: calls with results that a model may make before its final answer.
        dtype: precision to answer in, by default the model's own.
        open_thinking: whether answers begin with reasoning, see `dataset.chat.render_prompt`.

    Raises:
        ValueError: a conversation that the chat template refuses.
    """
    started = time.perf_counter()
    decoder = Decoder(model, dtype)
    answered = [Answered(question) for question in questions]
    _weigh_choices(model, tokenizer, [item for item in answered if item.question.choices], dtype)
    caps = reply_caps(tokenizer, questions) if max_new_tokens is None else [max_new_tokens] * len(questions)
    histories = [list(question.messages) for question in questions]
    open_indices = [index for index, question in enumerate(questions) if not question.choices]
    for tool_round in range(max_tool_rounds + 1 if open_indices else 0):
        conversations = [(histories[index], questions[index].tools) for index in open_indices]
        chats = chat_renderer(tokenizer).render_many(conversations, True, open_thinking)
        prompts = [chat.input_ids for chat in chats]
        if not tool_round:
            check_lengths(model, [questions[index] for index in open_indices], prompts)
        else:  # what the model called may have become longer than it can read: then that was its last word
            fits = [len(prompt) < model.config.max_position_embeddings for prompt in prompts]
            open_indices, prompts = ([*compress(items, fits)] for items in (open_indices, prompts))
        replies = _generate(decoder, tokenizer, prompts, [caps[index] for index in open_indices], batch_size, seed)
        going_on = []
        for index, reply in zip(open_indices, replies, strict=True):
            message = _take_reply(answered[index], reply, tokenizer, open_thinking)
            results = _run_tools(message) if questions[index].tools and tool_round < max_tool_rounds else []
            if results:
                histories[index] += [message, *results]
                going_on.append(index)
            else:
                _judge(answered[index], message)
        open_indices = going_on
        if not open_indices:
            break
    return TaskReport(answered, seconds=time.perf_counter() - started)


def check_lengths(model, questions: Sequence[Question], prompts: Sequence[list[int]]) -> None:
    """Raise ValueError that names the questions that are longer than the model can read."""
    places = model.config.max_position_embeddings
    pairs = zip(questions, prompts, strict=True)
    long = [f"{question.id} ({len(ids):,} tokens)" for question, ids in pairs if len(ids) >= places]
    if long:
        more = f" and {len(long) - 5} more" if len(long) > 5 else ""
        raise ValueError(f"the model reads {places:,} tokens; longer are the questions {', '.join(long[:5])}{more}")


def continuations_of(question: Question, tokenizer) -> list[Continuation]:
    """Each choice of a question behind what it is asked with."""
    prompt = question.prompt
    if prompt is None:
        prompt = render_prompt(question.messages, tokenizer, question.tools)
    return [Continuation(prompt, choice) for choice in question.choices]


def _weigh_choices(model, tokenizer, items: Sequence[Answered], dtype: torch.dtype | None) -> None:
    """Weigh every choice of every item, and note what was picked."""
    continuations = [one for item in items for one in continuations_of(item.question, tokenizer)]
    was_training = model.training
    model.eval()
    try:
        weighed = iter(weigh(model, tokenizer, continuations, dtype or torch.float32))
    finally:
        model.train(was_training)
    for item in items:
        item.log_likelihoods = [next(weighed).log_likelihood for _ in item.question.choices]
        item.picks = pick(item.question.choices, item.log_likelihoods)
        item.replies.append(item.question.choices[item.picks.raw])
        # Weights that are not numbers choose nothing.
        item.right = all(map(math.isfinite, item.log_likelihoods)) and _is_pick(item.picks.raw, item.question)


def reply_caps(tokenizer, questions: Sequence[Question]) -> list[int]:
    """A cap for each question: three times its family's longest right reply and 40 tokens, in few distinct sizes.

    A model may think before it answers (38 tokens about an odd one out), and a wrong reply needs room to end, or it
    would count as one that never does.
    """
    texts = []
    for question in questions:
        call = json.dumps(question.tool_call, ensure_ascii=False) if question.tool_call else ""
        texts.append(max((call, *question.answers), key=len))
    longest: dict[str, int] = defaultdict(int)
    for question, ids in zip(questions, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True):
        needed = len(ids) if question.form is None else tokens_of_form(question.form)
        longest[question.family] = max(longest[question.family], needed)
    # Prompts are batched by cap, so few sizes mean full batches.
    return [8 * (-(-(3 * longest[question.family] + 40) // 8)) for question in questions]


def _generate(
    decoder: Decoder, tokenizer, prompts: list[list[int]], caps: list[int], batch_size: int, seed: int
) -> list[GeneratedReply]:
    """One greedy reply for each prompt, in order; prompts with the same cap share batches."""
    replies: list[GeneratedReply | None] = [None] * len(prompts)
    for cap in sorted(set(caps)):
        indices = [index for index, its_cap in enumerate(caps) if its_cap == cap]
        batch = generate_tokens(
            decoder,
            [prompts[index] for index in indices],
            max_new_tokens=cap,
            stop_ids=[tokenizer.eos_token_id, tokenizer.pad_token_id],
            temperature=0.0,
            seed=seed,
            batch_size=batch_size,
        )
        for index, reply in zip(indices, batch, strict=True):
            replies[index] = reply
    return replies


def _take_reply(item: Answered, reply: GeneratedReply, tokenizer, open_thinking: bool | None) -> dict[str, Any]:
    """Note one turn of the model; returns it as a message.

    Only the end-of-turn token ends a turn, as for whatever serves the model; but a base model closes its documents with
    another one, and would begin the next, which is no part of its reply.
    """
    text = tokenizer.decode(reply.ids, skip_special_tokens=True)
    item.replies.append(text.strip())
    item.turns += 1
    item.ended += int(reply.stop_id == tokenizer.eos_token_id)
    message = parse_reply(text, open_thinking)
    if item.question.check == "tool_call" and item.turns == 1:
        item.tool_progress = _call_progress(message.get("tool_calls", []), item.question.tool_call)
    return message


def _call_progress(calls: list[dict[str, Any]], wanted: dict[str, Any]) -> int:
    """0 no well-formed call, 1 well-formed, 2 the right tool, 3 exactly one call with exactly the right arguments."""
    if not calls:
        return 0
    if any(call["name"] != wanted["name"] for call in calls):
        return 1
    return 3 if len(calls) == 1 and _is_same(calls[0]["arguments"], wanted["arguments"]) else 2


def _is_same(first: Any, second: Any) -> bool:
    """Equality of JSON: 1 is 1.0 and is not true."""
    return first == second and re.findall("true|false", json.dumps(first, sort_keys=True)) == re.findall(
        "true|false", json.dumps(second, sort_keys=True)
    )


def _run_tools(message: dict[str, Any]) -> list[dict[str, str]]:
    """The results of a message's tool calls as messages."""
    calls = message.get("tool_calls", [])
    return [{"role": "tool", "content": run_tool(call["name"], call["arguments"])} for call in calls]


def _judge(item: Answered, message: dict[str, Any]) -> None:
    """The verdict on the last turn of a reply; a tool question also needs the right call before it."""
    question = item.question
    called = bool(message.get("tool_calls"))
    if question.form is not None:
        fits = not called and follows(message["content"], question.form)
    else:
        fits = not called and is_right(message["content"], question.answers, question.check)
    if question.check == "tool_call":
        item.tool_progress += int(fits and item.tool_progress == 3)
        fits = item.tool_progress == 4
    item.right = fits
