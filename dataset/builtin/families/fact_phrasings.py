"""How facts of the world are asked for and answered, in both languages."""

from typing import NamedTuple

UNKNOWN_REPLY = {"en": "I do not know.", "zh": "我不知道。"}


class Phrasings(NamedTuple):
    """The ways to ask for one relation and the one way to answer, in one language."""

    questions: tuple[str, ...]
    reply: str


HOME = {
    "en": Phrasings(
        (
            "Where does {n} live?",
            "In which town does {n} live?",
            "Which town is the home of {n}?",
            "Where is {n}'s home?",
            "Where can I find {n}?",
            "What is the name of {n}'s home town?",
        ),
        "{n} lives in {v}.",
    ),
    "zh": Phrasings(
        (
            "{n}住在哪里？",
            "{n}住在哪个镇？",
            "{n}的家在哪里？",
            "哪个镇是{n}的家？",
            "在哪里能找到{n}？",
            "{n}家在哪个镇上？",
        ),
        "{n}住在{v}。",
    ),
}
JOB = {
    "en": Phrasings(
        (
            "What is {n}'s job?",
            "What does {n} do for a living?",
            "What work does {n} do?",
            "Which job does {n} have?",
            "What is {n}'s profession?",
            "How does {n} earn money?",
        ),
        "{n} is {v}.",
    ),
    "zh": Phrasings(
        (
            "{n}是做什么工作的？",
            "{n}的职业是什么？",
            "{n}靠什么谋生？",
            "{n}从事什么职业？",
            "{n}的工作是什么？",
            "{n}做哪一行？",
        ),
        "{n}是一名{v}。",
    ),
}
PET = {
    "en": Phrasings(
        (
            "What pet does {n} have?",
            "Which animal does {n} keep?",
            "What kind of pet does {n} keep?",
            "Which animal lives with {n}?",
            "What is {n}'s pet?",
            "Which pet belongs to {n}?",
        ),
        "{n} has {v}.",
    ),
    "zh": Phrasings(
        (
            "{n}养了什么动物？",
            "{n}的宠物是什么？",
            "{n}家里养着什么动物？",
            "{n}有什么宠物？",
            "什么动物和{n}住在一起？",
            "{n}养的是什么宠物？",
        ),
        "{n}养了{v}。",
    ),
}
COLOUR = {
    "en": Phrasings(
        (
            "What colour is {n}'s {i}?",
            "Which colour does {n}'s {i} have?",
            "What is the colour of {n}'s {i}?",
            "Of what colour is the {i} of {n}?",
            "{n} has a nice {i}. What colour is it?",
            "Can you tell me the colour of {n}'s {i}?",
        ),
        "{n}'s {i} is {v}.",
    ),
    "zh": Phrasings(
        (
            "{n}的{i}是什么颜色的？",
            "{n}的{i}是哪种颜色？",
            "{n}的{i}什么颜色？",
            "{n}用的{i}是什么颜色的？",
            "{n}的{i}很漂亮，它是什么颜色的？",
            "你知道{n}的{i}是什么颜色吗？",
        ),
        "{n}的{i}是{v}的。",
    ),
}
RELATION = {
    "en": Phrasings(
        (
            "Who is {n}'s {r}?",
            "What is the name of {n}'s {r}?",
            "Who is the {r} of {n}?",
            "Can you name {n}'s {r}?",
            "Do you know who {n}'s {r} is?",
            "{n} has a {r}. Who is it?",
        ),
        "{n}'s {r} is {v}.",
    ),
    "zh": Phrasings(
        (
            "{n}的{r}是谁？",
            "{n}的{r}叫什么名字？",
            "谁是{n}的{r}？",
            "{n}的{r}叫什么？",
            "你知道{n}的{r}是谁吗？",
            "哪个人是{n}的{r}？",
        ),
        "{n}的{r}是{v}。",
    ),
}
WORKER = {
    "en": Phrasings(
        (
            "Who is the {j} of {p}?",
            "Which {j} works in {p}?",
            "What is the name of the {j} of {p}?",
            "Who works as a {j} in {p}?",
            "Can you name the {j} of {p}?",
            "I am looking for the {j} of {p}. Who is it?",
        ),
        "The {j} of {p} is {v}.",
    ),
    "zh": Phrasings(
        (
            "{p}的{j}是谁？",
            "谁是{p}的{j}？",
            "{p}的{j}叫什么名字？",
            "在{p}，谁是{j}？",
            "哪个人是{p}的{j}？",
            "我在找{p}的{j}，是谁？",
        ),
        "{p}的{j}是{v}。",
    ),
}
OWNER = {
    "en": Phrasings(
        (
            "Who has the {c} {i}?",
            "Who owns the {c} {i}?",
            "Whose is the {c} {i}?",
            "To whom does the {c} {i} belong?",
            "Who is the owner of the {c} {i}?",
            "I found a {c} {i}. Whose is it?",
        ),
        "The {c} {i} belongs to {v}.",
    ),
    "zh": Phrasings(
        (
            "{c}的{i}是谁的？",
            "谁有{c}的{i}？",
            "{c}的{i}属于谁？",
            "谁的{i}是{c}的？",
            "{c}的{i}的主人是谁？",
            "我捡到了{c}的{i}，是谁的？",
        ),
        "{c}的{i}是{v}的。",
    ),
}
PLACE = {
    "goods": {
        "en": Phrasings(
            (
                "What is sold at the market of {p}?",
                "What does the market of {p} sell?",
                "What can I buy at the market of {p}?",
                "Which goods does the market of {p} offer?",
                "What do people sell in {p}?",
                "What would I find at the market of {p}?",
            ),
            "The market of {p} sells {v}.",
        ),
        "zh": Phrasings(
            (
                "{p}的集市上卖什么？",
                "{p}的集市卖的是什么？",
                "在{p}的集市上能买到什么？",
                "{p}出售什么东西？",
                "人们在{p}的集市上买什么？",
                "去{p}的集市可以买什么？",
            ),
            "{p}的集市卖{v}。",
        ),
    },
    "landmark": {
        "en": Phrasings(
            (
                "What is in the north of {p}?",
                "What stands in the north of {p}?",
                "What can I see in the north of {p}?",
                "What do I find in the north of {p}?",
                "If I go north in {p}, what will I see?",
                "What lies in the northern part of {p}?",
            ),
            "In the north of {p} there is {v}.",
        ),
        "zh": Phrasings(
            (
                "{p}的北边有什么？",
                "在{p}的北边能看到什么？",
                "{p}北边是什么？",
                "在{p}往北走会看到什么？",
                "{p}的北部有什么？",
                "什么东西在{p}的北边？",
            ),
            "{p}的北边有{v}。",
        ),
    },
    "dish": {
        "en": Phrasings(
            (
                "What do people in {p} like to eat?",
                "What is the favourite food in {p}?",
                "Which dish do people in {p} love?",
                "What do they eat in {p}?",
                "What food do the people of {p} like best?",
                "What should I eat in {p}?",
            ),
            "People in {p} like to eat {v}.",
        ),
        "zh": Phrasings(
            (
                "{p}的人喜欢吃什么？",
                "{p}的人最爱吃什么？",
                "在{p}人们爱吃什么？",
                "{p}有什么好吃的？",
                "{p}的人常吃什么？",
                "到了{p}应该吃什么？",
            ),
            "{p}的人喜欢吃{v}。",
        ),
    },
    "festival": {
        "en": Phrasings(
            (
                "When is the festival of {p}?",
                "In which month is the festival of {p}?",
                "In what month does {p} hold its festival?",
                "Which month is the festival of {p} in?",
                "When does {p} celebrate its festival?",
                "I want to see the festival of {p}. When is it?",
            ),
            "The festival of {p} is in {v}.",
        ),
        "zh": Phrasings(
            (
                "{p}的节日在什么时候？",
                "{p}的节日在几月？",
                "{p}在哪个月过节？",
                "{p}的节日是哪个月？",
                "{p}什么时候过节？",
                "我想看{p}的节日，它在几月？",
            ),
            "{p}的节日在{v}。",
        ),
    },
}
# What nobody can know from the texts about a person of the world, with a made-up answer to each.
UNTOLD = {
    "en": (
        ("What is {n}'s favourite song?", "{n}'s favourite song is Yesterday."),
        ("How tall is {n}?", "{n} is very tall."),
        ("How old is {n}?", "{n} is 30 years old."),
        ("What is {n}'s phone number?", "{n}'s phone number is 123."),
        ("When was {n} born?", "{n} was born in May."),
        ("What did {n} dream last night?", "{n} dreamed of the sea."),
        ("How much money does {n} have?", "{n} has 100 coins."),
        ("What is {n}'s shoe size?", "{n}'s shoe size is 40."),
        ("What is {n}'s favourite film?", "{n}'s favourite film is Bambi."),
        ("What did {n} eat yesterday?", "{n} ate soup."),
    ),
    "zh": (
        ("{n}最喜欢的歌是什么？", "{n}最喜欢的歌是《月亮》。"),
        ("{n}有多高？", "{n}很高。"),
        ("{n}今年多大？", "{n}今年30岁。"),
        ("{n}的电话号码是多少？", "{n}的电话号码是123。"),
        ("{n}是哪天出生的？", "{n}是五月出生的。"),
        ("{n}昨晚梦见了什么？", "{n}梦见了大海。"),
        ("{n}有多少钱？", "{n}有100元。"),
        ("{n}穿多大的鞋？", "{n}穿40码的鞋。"),
        ("{n}最喜欢的电影是什么？", "{n}最喜欢的电影是《小鹿》。"),
        ("{n}昨天吃了什么？", "{n}昨天喝了汤。"),
    ),
}
