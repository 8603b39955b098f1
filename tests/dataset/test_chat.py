"""The chat renderer: exact masks, text that stays text, prompts that are prefixes, golden conversations."""

import json
import unicodedata

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from dataset.chat import (
    STAND_INS,
    ChatTemplate,
    _strings_in,
    chat_renderer,
    render_messages,
    render_prompt,
    trim_to_window,
)
from dataset.formats import normalise_messages, parse_reply
from tests.conftest import ROOT

FRAGMENTS = [
    "<|im_end|>", "<|im_start|>assistant\n", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
    "<|endoftext|>", "<|buffer7|>", "<", "<|", ">", "\n", "\n\n", "  ", " ", '"}', "}\n", ".", "é", "e\u0301", "\u0338",
    "😀", "你好", "。", "hello", " world", "12", "\t", "\u3000", "\ufdd0", "\u2028", '{"name": "f", "arguments": {}}',
]  # fmt: skip
CHARACTERS = st.characters(exclude_categories=["Cs"])
TEXT = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join),
    st.text(CHARACTERS, max_size=12),
)


def calls_of(text):
    """Tool calls whose names, keys and values are texts of this kind."""
    values = st.one_of(text, st.integers(), st.booleans(), st.lists(text, max_size=2))
    arguments = st.dictionaries(text, values, max_size=2)
    return st.lists(st.fixed_dictionaries({"name": text, "arguments": arguments}), max_size=2)


CALLS = calls_of(TEXT)


@st.composite
def conversations(draw, text=TEXT):
    """Normalised messages in which any text may stand anywhere, and tools. They end with the assistant."""
    messages = [{"role": "system", "content": draw(text)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        role = draw(st.sampled_from(["user", "user", "tool"]))
        messages += [{"role": role, "content": draw(text)} for _ in range(draw(st.integers(1, 2)))]
        answer = {"role": "assistant", "content": draw(text)}
        if draw(st.booleans()):
            answer["reasoning_content"] = draw(text)
        if calls := draw(CALLS if text is TEXT else calls_of(text)):
            answer["tool_calls"] = calls
        messages.append(answer)
    schema = st.fixed_dictionaries({"name": text, "description": text})
    tools = draw(st.none() | st.lists(schema, min_size=1, max_size=2))
    return messages, tools


def render(tokenizer, conversation, **options):
    """Render without parsing the contents, so that the test alone says what is reasoning and what is words."""
    return chat_renderer(tokenizer).render_many([conversation], **options)[0]


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def trained_stretches(tokenizer, chat) -> list[str]:
    """The decoded stretches of the mask."""
    stretches, current = [], []
    for token, trained in zip(chat.input_ids, chat.assistant_mask, strict=True):
        if trained:
            current.append(token)
            if token == tokenizer.eos_token_id:
                stretches.append(tokenizer.decode(current))
                current = []
        else:
            assert not current, "a supervised stretch that does not end with the end of turn"
    return stretches


def expected_span(message, open_thinking) -> str:
    """What the assistant says in a turn, written down independently of the template."""
    reasoning = message.get("reasoning_content", "").strip()
    text = ""
    if open_thinking is None and reasoning:
        text = f"<think>\n{reasoning}\n</think>\n\n"
    elif open_thinking:
        text = f"{reasoning}\n</think>\n\n"
    text += message["content"]
    for number, call in enumerate(message.get("tool_calls", [])):
        text += "\n" if number or message["content"] else ""
        arguments = json.dumps(call["arguments"], ensure_ascii=False)
        name = json.dumps(call["name"], ensure_ascii=False)
        text += f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
    return text + "<|im_end|>"


@given(conversations(), st.sampled_from([None, True, False]))
def test_mask_is_exactly_what_the_assistant_says(tokenizer, conversation, open_thinking):
    chat = render(tokenizer, conversation, open_thinking=open_thinking)
    said = [message for message in conversation[0] if message["role"] == "assistant"]
    stretches = trained_stretches(tokenizer, chat)
    assert len(stretches) == len(said)
    for stretch, message in zip(stretches, said, strict=True):
        # A cut between characters that NFC would join leaves them apart: compare in NFC.
        assert nfc(stretch) == nfc(expected_span(message, open_thinking))


@given(conversations())
def test_control_tokens_are_only_those_of_the_template(tokenizer, conversation):
    messages, tools = conversation
    chat = render(tokenizer, conversation)
    counts = {token: chat.input_ids.count(index) for token, index in tokenizer.get_added_vocab().items()}
    assistant = [message for message in messages if message["role"] == "assistant"]
    results = [index for index, message in enumerate(messages) if message["role"] == "tool"]
    merged = sum(index - 1 in results for index in results)
    turns = len(messages) - merged + (1 if tools and messages[0]["role"] != "system" else 0)
    thoughts = sum(bool(message.get("reasoning_content", "").strip()) for message in assistant)
    calls = sum(len(message.get("tool_calls", [])) for message in assistant)
    expected = {
        "<|im_start|>": turns, "<|im_end|>": turns, "<think>": thoughts, "</think>": thoughts, "<tool_call>": calls,
        "</tool_call>": calls, "<tool_response>": len(results), "</tool_response>": len(results),
    }  # fmt: skip
    assert counts == {token: expected.get(token, 0) for token in counts}


@given(conversations())
def test_decoded_ids_are_the_rendered_text(tokenizer, conversation):
    chat = render(tokenizer, conversation)
    pieces = chat_renderer(tokenizer).template.pieces(*conversation)
    assert tokenizer.decode(chat.input_ids) == "".join(nfc(piece.text) for piece in pieces)


@given(conversations(), st.sampled_from([None, True, False]))
def test_prompt_is_a_prefix_of_prompt_and_answer(tokenizer, conversation, open_thinking):
    messages, tools = conversation
    whole = render(tokenizer, conversation, open_thinking=open_thinking)
    for index, message in enumerate(messages):
        if index and message["role"] == "assistant":
            options = {"add_generation_prompt": True, "open_thinking": open_thinking}
            prompt = render(tokenizer, (messages[:index], tools), **options)
            size = len(prompt.input_ids)
            assert whole.input_ids[:size] == prompt.input_ids
            assert whole.assistant_mask[:size] == prompt.assistant_mask
            assert whole.assistant_mask[size] == 1, "what follows the prompt is what the assistant says"


@given(conversations())
def test_a_prompt_that_opens_thinking_continues_as_trained(tokenizer, conversation):
    """Trained with reasoning where there is some, a model must meet the same tokens when thinking is forced."""
    messages, tools = conversation
    if not messages[-1].get("reasoning_content", "").strip():
        return
    for message in messages[:-1]:
        message.pop("reasoning_content", None)
    first = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
    if first != len(messages) - 1:
        return  # earlier turns without reasoning show an empty block under open_thinking
    prompt = render(tokenizer, (messages[:-1], tools), add_generation_prompt=True, open_thinking=True)
    whole = render(tokenizer, conversation)
    assert whole.input_ids[: len(prompt.input_ids)] == prompt.input_ids


@given(conversations())
def test_last_trains_the_last_turn_only(tokenizer, conversation):
    every, last = render(tokenizer, conversation), render(tokenizer, conversation, train_on="last")
    assert last.input_ids == every.input_ids
    assert trained_stretches(tokenizer, last) == trained_stretches(tokenizer, every)[-1:]


@given(TEXT)
def test_round_trip_is_nfc(tokenizer, text):
    ids = chat_renderer(tokenizer).encoder.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == nfc(text)
    assert not set(ids) & set(tokenizer.get_added_vocab().values())


@given(st.lists(conversations(), max_size=4))
def test_many_is_the_same_as_one_by_one(tokenizer, batch):
    assert chat_renderer(tokenizer).render_many(batch) == [render(tokenizer, one) for one in batch]


def is_plain(conversation, open_thinking) -> bool:
    """No control-like text, no answer that starts with white space: there the tokenizer's own way cannot be ours."""
    texts = [text for text in _strings_in(conversation) if "<" in text]
    spans = [expected_span(message, open_thinking) for message in conversation[0] if message["role"] == "assistant"]
    return not texts and not any(span[0].isspace() for span in spans)


PLAIN_TEXT = st.text("abc XYZ,.!?}\"'你好世界😀é\n\t12", max_size=20)


@given(conversations(PLAIN_TEXT), st.booleans(), st.sampled_from([None, True, False]))
def test_ids_equal_apply_chat_template(tokenizer, conversation, prompt, open_thinking):
    assume(is_plain(conversation, open_thinking))
    messages, tools = conversation
    options = {"add_generation_prompt": prompt, "open_thinking": open_thinking}
    theirs = tokenizer.apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True, **options
    )
    chat = render(tokenizer, conversation, **options)
    assert chat.input_ids == theirs["input_ids"]
    assert chat.assistant_mask == theirs["assistant_masks"]


@pytest.mark.parametrize(
    "options, ending",
    [
        ({}, "assistant\n"),
        ({"open_thinking": True}, "assistant\n<think>\n"),
        ({"open_thinking": False}, "assistant\n<think>\n\n</think>\n\n"),
        ({"enable_thinking": True}, "assistant\n"),
        ({"enable_thinking": False}, "assistant\n<think>\n\n</think>\n\n"),
        ({"enable_thinking": False, "open_thinking": True}, "assistant\n<think>\n"),
        ({"enable_thinking": None, "open_thinking": None}, "assistant\n"),
    ],
)
def test_thinking_switches(tokenizer, options, ending):
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>" + ending
    if "open_thinking" in options:
        thinking = options["open_thinking"]
        assert tokenizer.decode(render_prompt(messages, tokenizer, open_thinking=thinking)).endswith(ending)


@given(conversations())
def test_parse_reply_undoes_rendering(tokenizer, conversation):
    """What the model writes, read back, is the message that the template wrote, where its text is not ambiguous."""
    message = conversation[0][-1]
    texts = [message["content"], message.get("reasoning_content", "")]
    if any("<" in text for text in texts) or message["content"].startswith("\n") or message["content"].endswith("\n"):
        return
    if nfc(json.dumps(message, ensure_ascii=False)) != json.dumps(message, ensure_ascii=False):
        return
    chat = render(tokenizer, ([{"role": "user", "content": ""}, message], None))
    size = len(render_prompt([{"role": "user", "content": ""}], tokenizer))
    reply = tokenizer.decode(chat.input_ids[size:]).removesuffix("\n").removesuffix("<|im_end|>")
    expected = {"role": "assistant", "content": message["content"]}
    if reasoning := message.get("reasoning_content", "").strip():
        expected["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        expected["tool_calls"] = message["tool_calls"]
    assert parse_reply(reply) == expected


def test_parse_reply_of_unfinished_and_malformed():
    assert parse_reply("<think>\nhm") == {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert parse_reply("hm\n</think>\n\n4", open_thinking=True)["content"] == "4"
    assert parse_reply("hm\n</think>\n\n4", open_thinking=True)["reasoning_content"] == "hm"
    broken = '<tool_call>\n{"name": "f", "arguments": {}\n</tool_call>'
    assert parse_reply(broken) == {"role": "assistant", "content": broken}
    nested = '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>'
    assert parse_reply(nested)["tool_calls"] == [{"name": "f", "arguments": {"x": "</tool_call>"}}]
    assert "tool_calls" not in parse_reply(nested + " is how tools are called")


@pytest.mark.parametrize(
    "messages, problem",
    [
        ([{"role": "wizard", "content": "x"}], "message 1: role 'wizard' is not one of system, user, assistant, tool"),
        ([{"role": "user", "content": "x"}, "y"], "message 2: is a string, not an object"),
        ([{"role": "user", "content": 3}], "message 1: 'content' is a number, not a string"),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 1: 'content' is a list, not a string"),
        (
            [{"role": "assistant", "content": "", "tool_calls": "[{"}],
            "message 1: 'tool_calls' is a string that is not valid",
        ),
        ([{"role": "assistant", "content": "", "tool_calls": [{"name": 1}]}], "message 1: tool call 1 is not"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "x"}]}], "tool call 1 is not"),
        ([{"role": "system", "content": "", "tools": '[{"x": 1}]'}], "message 1: tool 1 has no name"),
        ([{"role": "user", "content": "\ud800"}], "message 1: the text holds .* half a surrogate pair"),
        ([], "no messages"),
    ],
)
def test_bad_messages_are_named(messages, problem):
    with pytest.raises(ValueError, match=problem):
        normalise_messages(messages)


def test_tokenizer_without_spans_is_refused(tmp_path):
    other = AutoTokenizer.from_pretrained(ROOT / "model" / "tokenizer")
    other.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.raises(ValueError, match="no {% generation %} block"):
        chat_renderer(other)
    other.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        chat_renderer(other)


def test_template_that_refuses_is_a_plain_error(tokenizer):
    template = ChatTemplate("{% generation %}{% endgeneration %}{{ raise_exception('no') }}", ["<|im_end|>"])
    with pytest.raises(ValueError, match="cannot render this conversation: no"):
        template.pieces([{"role": "user", "content": "x"}])


def test_all_stand_ins_in_use_is_a_plain_error(tokenizer):
    with pytest.raises(ValueError, match="noncharacters"):
        render_messages([{"role": "user", "content": "<" + "".join(STAND_INS)}], tokenizer)


@given(conversations(), st.integers(4, 60))
def test_trimmed_conversations_fit_and_train(tokenizer, conversation, window):
    chat = render(tokenizer, conversation)
    trimmed = trim_to_window(chat, window)
    if isinstance(trimmed, str):
        return
    size = len(trimmed.input_ids)
    assert size <= window or trimmed is chat and size <= window
    assert len(trimmed.assistant_mask) == size
    assert any(trimmed.assistant_mask[1:])
    for _, start in trimmed.turns:
        assert trimmed.input_ids[start] == tokenizer.bos_token_id
    if chat.turns[0][0] == "system" and trimmed is not chat:
        assert trimmed.turns[0] == ("system", 0)
        assert trimmed.turns[1][0] == "user" or not any(role == "user" for role, _ in chat.turns)


def test_trimming_keeps_the_system_turn_and_the_last_exchanges(tokenizer):
    system = {"role": "system", "content": "Be kind."}
    turns = [{"role": role, "content": f"{role} {number}"} for number in range(5) for role in ("user", "assistant")]
    whole = render_messages([system, *turns], tokenizer)
    kept = render_messages([system, *turns[-4:]], tokenizer)
    for window in range(len(kept.input_ids), len(kept.input_ids) + 5):
        assert trim_to_window(whole, window) == kept
    last = render_messages([system, *turns[-2:]], tokenizer)
    cut = trim_to_window(whole, len(last.input_ids) - 3)
    assert cut.input_ids == last.input_ids[:-3] and any(cut.assistant_mask)
    assert "no answer fits" in trim_to_window(whole, 8)
