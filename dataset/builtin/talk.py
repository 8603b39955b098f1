"""Conversations: small talk, single questions, talks of several turns, and turns where offered tools are not needed."""

from dataset.builtin.draw import Draw
from dataset.builtin.families import FAMILIES, HEAVY, multi_step, steps
from dataset.builtin.question import Message, conversation, final_message, framed, message
from dataset.tools import tools_json

GREETINGS = {
    "en": (
        ("Hello!", "Hello! How can I help you?"),
        ("Hi!", "Hello! How can I help you?"),
        ("Good morning!", "Good morning! How can I help you?"),
        ("Good evening!", "Good evening! How can I help you?"),
        ("How are you?", "I am fine, thank you."),
        ("Are you there?", "Yes, I am here."),
        ("Can you help me?", "Of course. What would you like to know?"),
        ("I have a question.", "Please ask."),
        ("Who are you?", "I am MiniMind, a small language model."),
        ("What is your name?", "I am MiniMind, a small language model."),
        ("What are you?", "I am MiniMind, a small language model."),
        ("What can you do?", "I can talk about our towns and people, count, sort and use tools."),
        ("What languages do you speak?", "I speak English and Chinese."),
        ("Do you speak Chinese?", "Yes, I speak English and Chinese."),
        ("Are you a person?", "No, I am a small language model."),
    ),
    "zh": (
        ("你好！", "你好！有什么可以帮你的吗？"),
        ("您好！", "你好！有什么可以帮你的吗？"),
        ("早上好！", "早上好！有什么可以帮你的吗？"),
        ("晚上好！", "晚上好！有什么可以帮你的吗？"),
        ("你好吗？", "我很好，谢谢。"),
        ("你在吗？", "我在。"),
        ("你能帮我吗？", "当然可以。你想知道什么？"),
        ("我有一个问题。", "请问。"),
        ("你是谁？", "我是MiniMind，一个小小的语言模型。"),
        ("你叫什么名字？", "我是MiniMind，一个小小的语言模型。"),
        ("你是什么？", "我是MiniMind，一个小小的语言模型。"),
        ("你会做什么？", "我可以聊小镇和人物，会数数、排序和使用工具。"),
        ("你会说什么语言？", "我会说英语和汉语。"),
        ("你会说英语吗？", "会，我会说英语和汉语。"),
        ("你是人吗？", "不是，我是一个小小的语言模型。"),
    ),
}
FAREWELLS = {
    "en": (
        ("Thank you!", "You are welcome!"),
        ("Thanks a lot!", "You are welcome!"),
        ("Well done!", "Thank you!"),
        ("Goodbye!", "Goodbye! See you soon."),
        ("See you tomorrow!", "Goodbye! See you soon."),
        ("That was all.", "Very well. Goodbye!"),
    ),
    "zh": (
        ("谢谢你！", "不客气！"),
        ("非常感谢！", "不客气！"),
        ("真棒！", "谢谢！"),
        ("再见！", "再见！下次见。"),
        ("明天见！", "再见！下次见。"),
        ("就这些了。", "好的，再见！"),
    ),
}
SYSTEMS = {
    "en": (
        "You are a helpful assistant.",
        "You are MiniMind, a small language model.",
        "Answer the questions of the user.",
        "You know the towns and their people.",
        "Answer briefly and truthfully.",
    ),
    "zh": (
        "你是一个有用的助手。",
        "你是MiniMind，一个小小的语言模型。",
        "请回答用户的问题。",
        "你了解这些小镇和镇上的人。",
        "请简短而如实地回答。",
    ),
}
SYSTEM_SHARE = 0.10  # of the conversations get a general system prompt
LIGHT = tuple(name for name in FAMILIES if name not in HEAVY)


def with_system(draw: Draw, messages: list[Message]) -> list[Message]:
    """The conversation, now and then under a general system prompt (never beside another one)."""
    if messages[0]["role"] != "system" and draw.chance(SYSTEM_SHARE):
        return [message("system", draw.one(SYSTEMS[draw.language])), *messages]
    return messages


def chat(draw: Draw) -> list[Message]:
    """Small talk: a greeting, a goodbye or both."""
    turns = [draw.one(GREETINGS[draw.language])]
    if draw.chance(0.3):
        turns.append(draw.one(FAREWELLS[draw.language]))
    elif draw.chance(0.3):
        turns = [draw.one(FAREWELLS[draw.language])]
    messages = [
        entry for asked, answered in turns for entry in (message("user", asked), message("assistant", answered))
    ]
    return with_system(draw, messages)


def single(draw: Draw, family: str) -> list[Message]:
    """One question of that family with its solution."""
    return with_system(draw, conversation(FAMILIES[family](draw), draw))


def several(draw: Draw) -> list[Message]:
    """Two or three turns of different families without context of their own, perhaps with thanks at the end."""
    messages: list[Message] = []
    for family in draw.some(LIGHT, draw.number(2, 3)):
        question = FAMILIES[family](draw)
        messages += [message("user", framed(question, draw)), final_message(question)]
    if draw.chance(0.25):
        asked, answered = draw.one(FAREWELLS[draw.language])
        messages += [message("user", asked), message("assistant", answered)]
    return with_system(draw, messages)


def tools_not_needed(draw: Draw) -> list[Message]:
    """Tools are offered, but the question needs none."""
    system = message("system", "") | {"tools": tools_json(steps.offered(draw))}
    if draw.chance(0.3):
        asked, answered = draw.one(GREETINGS[draw.language][:9])
        return [system, message("user", asked), message("assistant", answered)]
    question = FAMILIES[draw.one(("home", "job", "opposite", "calendar", "relation", "position"))](draw)
    return [system, message("user", framed(question, draw)), final_message(question)]


def several_calls(draw: Draw) -> list[Message]:
    """A question that takes several tool calls."""
    return conversation(multi_step.age_sum(draw), draw)
