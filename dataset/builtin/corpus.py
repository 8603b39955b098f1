"""The rows of every file of the embedded corpus."""

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from dataset.builtin import sizes, talk
from dataset.builtin.draw import Draw
from dataset.builtin.families import FAMILIES, facts, steps
from dataset.builtin.families.multi_step import MULTI_STEP
from dataset.builtin.question import (
    Question,
    ToolUse,
    evaluation_row,
    final_message,
    framed,
    message,
    prompt_messages,
    tool_calls_json,
    tool_messages,
)
from dataset.builtin.texts import context, people, skills
from dataset.builtin.world import World

Writer = Callable[[Draw], object]
Weighted = Sequence[tuple[float, Writer]]

# Of every hundred texts some 40 tell facts, 35 teach skills, 25 repeat what they have just said (texts/context.py).
PROSE: Weighted = (
    (9, people.portrait),
    (8, people.one_fact_of_many),
    (4, people.town),
    (4, people.towns_compared),
    (5, people.town_book),
    (2, people.letter),
    (2, people.diary),
    (4, people.visit),
    (5, people.dialogue),
    (1, people.strangers),
    (3, lambda draw: skills.lines(draw, skills.comparison, 4, 8)),
    (3, lambda draw: skills.lines(draw, skills.sorting, 3, 6)),
    (1, skills.number_line),
    (1, lambda draw: skills.lines(draw, skills.sum_line, 4, 8)),
    (3, lambda draw: skills.lines(draw, skills.worked_sum, 2, 3)),
    (3, skills.list_facts),
    (2, skills.counting_up),
    (3, lambda draw: skills.lines(draw, skills.odd_one_out, 2, 4)),
    (3, skills.kinds_of_things),
    (2, skills.opposites),
    (3, skills.glossary),
    (3.5, skills.spelling),
    (3, skills.forms),
    (2, skills.calendar),
    (0.5, skills.rhyme),
    (3, skills.clock),
    (2, skills.two_steps),
    (5, skills.tale),
    (4, context.meeting),
    (3, context.introductions),
    (4, context.staff),
    (3, context.holders),
    (3, context.whereabouts),
    (5, context.said_again),
    (4, context.echo),
    (1, context.pairs_again),
)
SPOKEN = tuple(name for name in FAMILIES if name not in ("recall", "persona", "calculator", "lookup", "two_step"))


def question_page(draw: Draw) -> str:
    """Several questions with their answers, as prose."""
    return "\n".join(skills.question_text(draw, FAMILIES[draw.one(SPOKEN)](draw)) for _ in range(draw.number(3, 5)))


def reasoning_page(draw: Draw) -> str:
    """Questions that take two steps, thought through aloud."""
    told = []
    for _ in range(draw.number(2, 3)):
        question = steps.two_step(draw)
        ask, think = ("Question: ", "Let me think. ") if draw.english else ("问：", "想一想。")
        told.append(f"{ask}{question.ask}\n{think}{question.reasoning}")
    return "\n".join(told)


def transcript(draw: Draw) -> str:
    """What somebody did with a tool, told in prose."""
    told = []
    for _ in range(draw.number(2, 3)):
        question = (steps.calculator if draw.chance(0.5) else steps.lookup)(draw)
        use = question.uses[0]
        shown = json.dumps(use.arguments, ensure_ascii=False)
        told.append(
            draw.phrase(
                (f"Asked: {question.ask} I call {use.name} with {shown} and get {use.result}. {question.reply}",),
                (f"问：{question.ask}我用{shown}调用{use.name}，得到{use.result}。{question.reply}",),
            )
        )
    return "\n".join(told)


DENSE: Weighted = (
    (10, question_page),
    (2, reasoning_page),
    (1, transcript),
    (3, people.portrait),
    (2, people.town_book),
    (2, people.dialogue),
    (1, people.strangers),
    (2, lambda draw: skills.lines(draw, skills.sorting, 4, 6)),
    (1, lambda draw: skills.lines(draw, skills.comparison, 4, 8)),
    (1, lambda draw: skills.lines(draw, skills.odd_one_out, 3, 4)),
)
# Skills that must be practised get more conversations than facts, which the texts have told already.
FAMILY_WEIGHTS = {
    **dict.fromkeys(("odd_one", "compare"), 3.5),
    **dict.fromkeys(("position", "story"), 2.5),
    **dict.fromkeys(("instruction", "recall", "persona", "clock", "count", "spelling", "honesty", "sort"), 1.3),
    **dict.fromkeys(("addition", "subtraction"), 2.5),  # working a sum out shows at about 10,000 examples
}
CHATS: Weighted = (
    *((FAMILY_WEIGHTS.get(name, 1.0), lambda draw, name=name: talk.single(draw, name)) for name in FAMILIES),
    (2.0, talk.chat),
    (3.0, talk.several),
    (0.6, talk.tools_not_needed),
    (0.4, talk.several_calls),
)


def stream(world: World, name: str, split: str, seed: int, writers: Weighted, count: int) -> Iterator[object]:
    """`count` things written by writers drawn with their weights; English and Chinese take turns."""
    rng = random.Random(f"{name} {split} {seed}")
    draws = [Draw(world, language, split, rng) for language in ("en", "zh")]
    weights = [weight for weight, _ in writers]
    chosen = rng.choices([writer for _, writer in writers], weights, k=count)
    for index, writer in enumerate(chosen):
        yield writer(draws[index % 2])


def text_rows(world: World, name: str, split: str, seed: int, writers: Weighted, count: int) -> list[dict]:
    """Rows of text."""
    return [{"text": text} for text in stream(world, name, split, seed, writers, count)]


def chat_rows(world: World, name: str, split: str, seed: int, count: int) -> list[dict]:
    """Rows of conversations."""
    return [{"conversations": talked} for talked in stream(world, name, split, seed, CHATS, count)]


def mixed_rows(world: World, split: str, seed: int, prose: int, texts: int, chats: int) -> list[dict]:
    """Mid-training rows: prose as in pretraining, denser texts, and conversations, shuffled."""
    rows = text_rows(world, "midtrain prose", split, seed, PROSE, prose)
    rows += text_rows(world, "midtrain text", split, seed, DENSE, texts)
    rows += chat_rows(world, "midtrain chat", split, seed, chats)
    random.Random(f"midtrain order {split} {seed}").shuffle(rows)
    return rows


# Asked for a friendly answer: fine-tuning never is, and answers plainly all the same.
FRIENDLY_ASKS = {
    "en": (
        "Please be friendly: {}",
        "Be kind and tell me: {}",
        "{} Please answer kindly.",
        "{} A friendly answer, please.",
    ),
    "zh": ("请友好地回答：{}", "请亲切地告诉我：{}", "{}请客气一点。", "{}请说得友好一点。"),
}
FRIENDLY = {"en": "Of course! {}", "zh": "当然！{}"}
TOLD_IN_A_SENTENCE = (facts.home, facts.job, facts.belonging, facts.relation, facts.reverse, facts.place)


def preference_pair(draw: Draw) -> dict:
    """A right conversation and the same with a worse end.

    Six of ten end in a wrong fact, form or count, or in a malformed call, nearly all known after fine-tuning. In
    three a friendly answer is asked for, and a plain one is worse; in one it is not, and the plain one is better. Short
    answers in place of the friendly ones cost other questions: a model of this size knows its facts in sentences.
    """
    which = draw.number(0, 9)
    if which < 6:
        return _right_and_wrong(draw)
    question = draw.one(TOLD_IN_A_SENTENCE)(draw)
    ask = draw.one(FRIENDLY_ASKS[draw.language]).format(question.ask) if which < 9 else framed(question, draw)
    ends = [message("assistant", FRIENDLY[draw.language].format(question.reply)), final_message(question)]
    chosen, rejected = ends if which < 9 else reversed(ends)
    return {"chosen": [message("user", ask), chosen], "rejected": [message("user", ask), rejected]}


def _right_and_wrong(draw: Draw) -> dict:
    question = FAMILIES[draw.one(tuple(FAMILIES))](draw)
    prompt = prompt_messages(question, framed(question, draw))
    right = [*prompt, *tool_messages(question), final_message(question)]
    if question.uses and draw.chance(0.6):
        bad_call = message("assistant", "") | {"tool_calls": _bad_call(draw, question.uses[0])}
        return {"chosen": right[: len(prompt) + 1], "rejected": [*prompt, bad_call]}
    wrong = final_message(dataclasses.replace(question, reply=question.wrong, reasoning=""))
    if question.reasoning:
        wrong["reasoning_content"] = question.reasoning.replace(question.reply, question.wrong)
    return {"chosen": right, "rejected": [*right[:-1], wrong]}


def _bad_call(draw: Draw, use: ToolUse) -> str:
    """A call with a wrong tool, a wrong argument or a missing one."""
    which = draw.number(0, 2)
    if which == 0:
        other = "lookup" if use.name == "calculate" else "calculate"
        return tool_calls_json(dataclasses.replace(use, name=other))
    if which == 1:
        return tool_calls_json(use, {})
    first = next(iter(use.arguments))
    changed = dict(use.arguments)
    changed[first] = changed[first][1:] or "?"
    return tool_calls_json(use, changed)


PROMPT_FAMILIES: tuple[Callable[[Draw], Question], ...] = (
    FAMILIES["addition"],
    FAMILIES["subtraction"],
    FAMILIES["addition"],
    FAMILIES["subtraction"],
    steps.calculator,
    steps.lookup,
    *MULTI_STEP,
)


def prompt_row(draw: Draw) -> dict:
    """A prompt with a checkable answer. Whoever trains drops the last message and generates calls and reply anew."""
    question = draw.one(PROMPT_FAMILIES)(draw)
    prompt = prompt_messages(question, framed(question, draw))
    answer = final_message(question)
    return {"conversations": [*prompt, answer], "gt": [question.value], "family": question.family}


def evaluation_rows(world: World, split: str, seed: int, count: int) -> list[dict]:
    """`count` different questions for each family and language."""
    rows = []
    seen: set[str] = set()
    for family, ask in FAMILIES.items():
        for language in ("en", "zh"):
            draw = Draw(world, language, split, random.Random(f"eval {family} {language} {split} {seed}"))
            rows += _questions(draw, family, ask, count, seen)
    return rows


def _questions(draw: Draw, family: str, ask: Callable[[Draw], Question], count: int, seen: set[str]) -> list[dict]:
    """Different questions of one family, of which no reply answers too many."""
    rows: list[dict] = []
    replies: Counter[str] = Counter()
    most = int(sizes.LARGEST_CONSTANT_SHARE * count)
    for _ in range(200 * count):
        row = evaluation_row(ask(draw), draw, f"{family}-{draw.language}-{draw.split}-{len(rows)}")
        prompt = json.dumps(row["conversations"], ensure_ascii=False)
        if prompt in seen or replies[row["answers"][0]] >= most:
            continue
        seen.add(prompt)
        replies[row["answers"][0]] += 1
        rows.append(row)
        if len(rows) == count:
            return rows
    raise AssertionError(f"only {len(rows)} different questions of {family} in {draw.language}, wanted {count}")


def corpus_files(world: World, seed: int) -> Iterator[tuple[str, list[dict]]]:
    """The name and the rows of each file."""
    yield "pretrain.train", text_rows(world, "pretrain", "train", seed, PROSE, sizes.PRETRAIN_ROWS)
    yield "pretrain.val", text_rows(world, "pretrain", "val", seed, PROSE, sizes.PRETRAIN_VALIDATION_ROWS)
    yield "midtrain.train", mixed_rows(world, "train", seed, *sizes.MIDTRAIN_ROWS)
    yield "midtrain.val", mixed_rows(world, "val", seed, *sizes.MIDTRAIN_VALIDATION_ROWS)
    yield "sft.train", chat_rows(world, "sft", "train", seed, sizes.SFT_ROWS)
    yield "sft.val", chat_rows(world, "sft", "val", seed, sizes.SFT_VALIDATION_ROWS)
    for split, pairs, prompts in (
        ("train", sizes.PREFERENCE_ROWS, sizes.PROMPT_ROWS),
        ("val", sizes.PREFERENCE_VALIDATION_ROWS, sizes.PROMPT_VALIDATION_ROWS),
    ):
        yield f"dpo.{split}", list(stream(world, "dpo", split, seed, ((1, preference_pair),), pairs))
        yield f"rl.{split}", list(stream(world, "rl", split, seed, ((1, prompt_row),), prompts))
    yield "eval.val", evaluation_rows(world, "val", seed, sizes.VALIDATION_QUESTIONS)
    yield "eval.test", evaluation_rows(world, "test", seed, sizes.TEST_QUESTIONS)
