"""Conversations to token ids and back: the only file that knows the chat template.

Every stage that trains on chats, and everything that talks to a model, renders here, so that a model never sees a
prompt in another form than the one it was trained on.

How a conversation becomes ids. The template writes the whole string once and reports the character spans of what the
assistant said (`{% generation %}`). The string is cut only at the control tokens that the template itself wrote and at
the start of each of these spans; each piece is encoded whole, by a copy of the tokenizer that knows no added token.
The mask therefore follows the spans exactly, and control tokens in anybody's words remain ordinary text.

How the template's own control tokens are told from the same characters in somebody's words: every control token
begins with one of a few characters (`<`). Before rendering, these characters are replaced in all words by a stand-in
that occurs nowhere in the conversation, so whatever looks like a control token afterwards was written by the template.
The stand-ins are replaced back in the cut pieces.
"""

import dataclasses
import functools
import itertools
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jinja2
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from dataset.formats import Message, normalise_messages, normalise_tools

Conversation = tuple[list[Message], list[dict[str, Any]] | None]
"""Normalised messages and tool schemas, as `dataset.formats.messages_from_row` gives them."""

STAND_INS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # noncharacters: Unicode keeps them free for internal use
ANY_STAND_IN = re.compile(f"[{STAND_INS[0]}-{STAND_INS[-1]}]")


OPEN_THINKING = {"auto": None, "on": True, "off": False}
"""The template's `open_thinking` by the word of a flag: whether an answer begins with reasoning; auto: as it likes."""


@dataclasses.dataclass
class RenderedChat:
    """A conversation as token ids.

    Attributes:
        input_ids: length T.
        assistant_mask: length T; 1 where a token is the assistant's reasoning, words, tool calls or end of turn.
        turns: (role, index of the turn's first token), in order; the role of tool results is "tool".
    """

    input_ids: list[int]
    assistant_mask: list[int]
    turns: list[tuple[str, int]]


class Piece(NamedTuple):
    """A stretch of the rendered string that is encoded by itself. `span` is the generation span it lies in, or -1."""

    text: str
    is_control: bool
    span: int


class ChatTemplate:
    """A chat template that renders to pieces.

    Args:
        source: the Jinja template.
        control_tokens: every added token of the tokenizer, as text.
    """

    def __init__(self, source: str, control_tokens: Iterable[str]):
        longest_first = sorted(control_tokens, key=len, reverse=True)
        if not longest_first:
            raise ValueError("the tokenizer has no added tokens, so a chat template cannot mark its turns")
        self.source = source
        self.control_pattern = re.compile("|".join(map(re.escape, longest_first)))
        self.first_characters = sorted({token[0] for token in longest_first})

    def pieces(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        open_thinking: bool | None = None,
    ) -> list[Piece]:
        """Render one normalised conversation and cut it.

        Raises:
            ValueError: the template refuses the conversation.
        """
        stand_ins = self._stand_ins("\0".join(_strings_in([messages, tools])))
        if stand_ins:
            messages, tools = _replaced(messages, stand_ins), _replaced(tools, stand_ins)
        try:
            rendered, spans = render_jinja_template(
                [messages], tools=tools, chat_template=self.source, return_assistant_tokens_mask=True,
                add_generation_prompt=add_generation_prompt, open_thinking=open_thinking,
            )  # fmt: skip
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template cannot render this conversation: {error}") from error
        return self._cut(rendered[0], spans[0], [(stand_in, character) for character, stand_in in stand_ins])

    def _stand_ins(self, words: str) -> list[tuple[str, str]]:
        """(character, stand-in) pairs for what control tokens begin with, if that is in the words; else none."""
        if not any(character in words for character in self.first_characters):
            return []
        used = set(ANY_STAND_IN.findall(words))
        free = [stand_in for stand_in in STAND_INS if stand_in not in used]
        if len(free) < len(self.first_characters):
            raise ValueError("the conversation uses all noncharacters from U+FDD0 to U+FDEF; remove them")
        return list(zip(self.first_characters, free, strict=False))

    def _cut(self, text: str, spans: list[tuple[int, int]], to_words: list[tuple[str, str]]) -> list[Piece]:
        edges = [(match.start(), match.end(), True) for match in self.control_pattern.finditer(text)]
        edges += [(start, start, False) for start, _ in spans]
        edges.append((len(text), len(text), False))
        edges.sort()
        pieces: list[Piece] = []
        position, span = 0, 0

        def add(start: int, end: int, is_control: bool) -> None:
            nonlocal span
            while span < len(spans) and spans[span][1] <= start:
                span += 1
            inside = span < len(spans) and spans[span][0] <= start
            words = text[start:end] if is_control else _replaced(text[start:end], to_words)
            pieces.append(Piece(words, is_control, span if inside else -1))

        for start, end, is_control in edges:
            if start > position:
                add(position, start, False)
            if is_control:
                add(start, end, True)
            position = max(position, end)
        return pieces


class ChatRenderer:
    """Renders conversations for one tokenizer. Get one through `chat_renderer`, which keeps it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        source = tokenizer.chat_template
        if isinstance(source, dict):
            source = source.get("default")
        name = tokenizer.name_or_path or "the tokenizer"
        if not source:
            raise ValueError(f"{name} has no chat template; put a chat_template.jinja beside its tokenizer.json")
        if not re.search(r"\{%-?\s*generation\s*-?%\}", source):
            raise ValueError(
                f"the chat template of {name} has no {{% generation %}} block, so nothing says which tokens are the "
                "assistant's; take the one of model/tokenizer"
            )
        self.control_ids = {token: index for token, index in tokenizer.get_added_vocab().items()}
        self.template = ChatTemplate(source, self.control_ids)
        self.encoder = plain_encoder(tokenizer)

    def render_many(
        self,
        conversations: Sequence[Conversation],
        add_generation_prompt: bool = False,
        open_thinking: bool | None = None,
        train_on: Literal["all", "last"] = "all",
    ) -> list[RenderedChat]:
        """Render normalised conversations; their pieces are encoded in one batch.

        Raises:
            ValueError: the template refuses a conversation, or `train_on` is unknown.
        """
        if train_on not in ("all", "last"):
            raise ValueError(f"train_on={train_on!r} must be 'all' or 'last'")
        cut = [self.template.pieces(*chat, add_generation_prompt, open_thinking) for chat in conversations]
        # Openings such as "user\n" repeat in every turn: each distinct text is encoded once.
        texts = list({piece.text: None for pieces in cut for piece in pieces if not piece.is_control})
        encoded = self.encoder.encode_batch_fast(texts, add_special_tokens=False)
        ids = {text: encoding.ids for text, encoding in zip(texts, encoded, strict=True)}
        return [self._assemble(pieces, ids, train_on) for pieces in cut]

    def _assemble(self, pieces: list[Piece], text_ids: dict[str, list[int]], train_on: str) -> RenderedChat:
        chat = RenderedChat([], [], [])
        last_span = max((piece.span for piece in pieces), default=-1)
        for index, piece in enumerate(pieces):
            if piece.text == "<|im_start|>" and piece.is_control:
                chat.turns.append((_role_of_turn(pieces, index), len(chat.input_ids)))
            ids = [self.control_ids[piece.text]] if piece.is_control else text_ids[piece.text]
            trained = piece.span >= 0 and (train_on == "all" or piece.span == last_span)
            chat.input_ids += ids
            chat.assistant_mask += [int(trained)] * len(ids)
        return chat


def _role_of_turn(pieces: list[Piece], index: int) -> str:
    """The role behind the `<|im_start|>` at `index`; a user turn that opens with a tool result is "tool"."""
    opening, following = (pieces[index + 1 : index + 3] + [Piece("", False, -1)] * 2)[:2]
    role = opening.text.split("\n", 1)[0]
    return "tool" if role == "user" and following.is_control and following.text == "<tool_response>" else role


def _strings_in(value: Any) -> Iterable[str]:
    """Every string in nested lists and dicts, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from _strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings_in(item)


def _replaced(value: Any, pairs: list[tuple[str, str]]) -> Any:
    """A copy of nested lists and dicts with characters replaced in every string, keys included."""
    if isinstance(value, str):
        for old, new in pairs:
            value = value.replace(old, new)  # eight times as fast as str.translate
        return value
    if isinstance(value, dict):
        return {_replaced(key, pairs): _replaced(item, pairs) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(item, pairs) for item in value]
    return value


def plain_encoder(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """A copy of the tokenizer's Rust backend that knows no added token: whatever it encodes stays text.

    `split_special_tokens=True` is not enough: added tokens that are not "special", such as `<think>`, would still be
    turned into their ids. Building a copy takes about 30 ms, so the last few are kept; do not change it.
    """
    return _cached_encoder(tokenizer, len(tokenizer), True)


def encoder_of_normal_text(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """The same for texts that `is_normal`: it leaves out the work of normalising them, 4 % of all."""
    return _cached_encoder(tokenizer, len(tokenizer), False)


def is_normal(text: str) -> bool:
    """Whether NFC leaves a text as it is, in every version of Unicode.

    Beyond U+FFFF new characters that compose are still being added, so such texts are left to the tokenizer's library.
    """
    return text.isascii() or (unicodedata.is_normalized("NFC", text) and len(text.encode("utf-16-le")) == 2 * len(text))


@functools.lru_cache(maxsize=8)
def _cached_encoder(tokenizer: PreTrainedTokenizerBase, vocabulary: int, normalises: bool) -> Tokenizer:
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
    if not normalises and state["normalizer"] == {"type": "NFC"}:
        state["normalizer"] = None
    for step in (state["pre_tokenizer"] or {}).get("pretokenizers", []):
        if "trim_offsets" in step:
            step["trim_offsets"] = False  # where a token stood in the text, nobody asks; 2 % of the work
    return Tokenizer.from_str(json.dumps(state, ensure_ascii=False))


def chat_renderer(tokenizer: PreTrainedTokenizerBase) -> ChatRenderer:
    """The renderer of this tokenizer as it is now; the last few are kept."""
    return _cached_renderer(tokenizer, str(tokenizer.chat_template), len(tokenizer))


@functools.lru_cache(maxsize=4)
def _cached_renderer(tokenizer: PreTrainedTokenizerBase, template: str, vocabulary: int) -> ChatRenderer:
    return ChatRenderer(tokenizer)


def render_messages(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: Any = None,
    add_generation_prompt: bool = False,
    open_thinking: bool | None = None,
    train_on: Literal["all", "last"] = "all",
) -> RenderedChat:
    """Render one conversation, given in any of the forms that users bring.

    Args:
        messages: {"role", "content", "reasoning_content"?, "tool_calls"?} each; see `dataset.formats`.
        tokenizer: with a chat template that marks its generation spans.
        tools: list of function schemas, or the same as a JSON string.
        add_generation_prompt: open an assistant turn at the end.
        open_thinking: True makes the model reason, False keeps it from it, None leaves it the choice.
        train_on: "all" assistant turns are supervised, or only the "last".

    Raises:
        ValueError: a message or tool has another form; it is named.
    """
    messages, own_tools = normalise_messages(messages)
    conversation = (messages, normalise_tools(tools) or own_tools)
    return chat_renderer(tokenizer).render_many([conversation], add_generation_prompt, open_thinking, train_on)[0]


def render_prompt(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: Any = None,
    open_thinking: bool | None = None,
) -> list[int]:
    """Ids that ask the model for the next assistant message; a prefix of the ids of the same chat with its answer."""
    return render_messages(messages, tokenizer, tools, True, open_thinking).input_ids


def trim_to_window(chat: RenderedChat, max_length: int) -> RenderedChat | str:
    """Shorten a conversation that is longer than `max_length` tokens so that it still trains something.

    Kept are the system turn and as many of the last turns as fit, beginning with a user's. Where not even the last
    exchange fits, its end is cut off. Turns are rendered independently of each other, so what is kept has the ids that
    it would have alone.

    Returns:
        The shorter conversation, or the reason why none of its supervised tokens can be kept.
    """
    if len(chat.input_ids) <= max_length:
        return chat
    system_end = _system_end(chat)
    last_trained = max((index for index, trained in enumerate(chat.assistant_mask) if trained), default=-1)
    starts = [start for role, start in chat.turns if role == "user" and start <= last_trained]
    if not starts:
        starts = [system_end]
    total = len(chat.input_ids)
    start = next((start for start in starts if system_end + total - start <= max_length), starts[-1])
    kept = _keep_from(chat, system_end, start, max_length)
    if not any(kept.assistant_mask[1:]):
        return "longer than the window: no answer fits behind its prompt"
    return kept


def trim_pair(chosen: RenderedChat, rejected: RenderedChat, max_length: int) -> tuple[RenderedChat, RenderedChat] | str:
    """Shorten both sides of a preference alike, so that together they have at most `max_length` tokens.

    Kept are the system turn and as many turns before the answers as fit, the same on both sides. Answers stay whole:
    one that is cut off would be compared with one that is not.

    Returns:
        Both sides, or the reason why the pair cannot be used.
    """
    if len(chosen.input_ids) + len(rejected.input_ids) <= max_length:
        return chosen, rejected
    sides = (chosen, rejected)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*(side.input_ids for side in sides), strict=False))
    common = sum(1 for _ in same)
    system_end = _system_end(chosen)
    for start in [start for role, start in chosen.turns if role == "user" and start < common]:
        if sum(system_end + len(side.input_ids) - start for side in sides) <= max_length:
            return tuple(_keep_from(side, system_end, start, max_length) for side in sides)
    return "longer than the window: the two answers do not fit with their prompt"


def _system_end(chat: RenderedChat) -> int:
    """Tokens of the system turn, if there is one."""
    if not chat.turns or chat.turns[0][0] != "system":
        return 0
    return chat.turns[1][1] if len(chat.turns) > 1 else len(chat.input_ids)


def _keep_from(chat: RenderedChat, system_end: int, start: int, max_length: int) -> RenderedChat:
    """The system turn and what follows from `start` on, cut off at `max_length`."""
    keep = [*range(system_end), *range(start, len(chat.input_ids))][:max_length]
    shift = start - system_end
    turns = [(role, index) for role, index in chat.turns if index < system_end]
    turns += [(role, index - shift) for role, index in chat.turns if start <= index and index - shift < max_length]
    return RenderedChat(
        [chat.input_ids[index] for index in keep], [chat.assistant_mask[index] for index in keep], turns
    )
