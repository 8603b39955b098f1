"""A talk with a model, here or behind a URL: turns, thinking, and the tools that it calls."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, Protocol

from dataset.tools import TOOL_SCHEMAS, run_tool

MAX_TOOL_ROUNDS = 5

# Both tools of the built-in training data, in an order that occurs there; a tool that a model never saw confuses it.
OFFERED_TOOLS = ("calculate", "lookup")


class Event(NamedTuple):
    """A piece of an answer. Text and thinking come in pieces; a call, a result or a note comes whole."""

    kind: Literal["text", "thinking", "call", "result", "note"]
    text: str


class TooLong(ValueError):
    """The conversation does not fit; one with fewer turns may."""


class Reply(Protocol):
    """One turn of a model, in pieces as it says them. `message` is what it said so far, also when it was stopped."""

    message: dict[str, Any]

    def __iter__(self) -> Iterator[Event]: ...


class Model(Protocol):
    """Whoever answers."""

    def reply(
        self, messages: list[dict[str, Any]], tools: list[dict] | None, open_thinking: bool | None, is_last_try: bool
    ) -> Reply:
        """Begin the next turn. Raises TooLong when turns should be left out first; never so on the last try."""


class Conversation:
    """A talk with one model. `say` adds a turn of the user's and streams what comes back, tool calls included.

    Args:
        model: who answers.
        system: the system message, if any.
        use_tools: whether the built-in safe tools are offered and run.
        open_thinking: True: think first; False: do not; None: the model chooses.
    """

    def __init__(
        self, model: Model, system: str | None = None, use_tools: bool = False, open_thinking: bool | None = None
    ):
        self.model, self.open_thinking = model, open_thinking
        self.tools = [TOOL_SCHEMAS[name] for name in OFFERED_TOOLS] if use_tools else None
        self._opening = [{"role": "system", "content": system}] if system else []
        self.clear()

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.messages: list[dict[str, Any]] = list(self._opening)

    def say(self, text: str) -> Iterator[Event]:
        """Answer one message of the user's.

        What was said so far stays in the conversation when the caller stops early.

        Raises:
            ValueError: the message does not fit into the model, or the server refuses; the message is forgotten.
        """
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            yield from self._exchange()
        except ValueError:
            self.messages = before
            raise

    def _exchange(self) -> Iterator[Event]:
        """The model's turns and the tools' results up to its answer."""
        for tool_round in range(MAX_TOOL_ROUNDS + 1):
            yield from self._reply()
            calls = self.messages[-1].get("tool_calls", [])
            for call in calls:
                yield Event("call", f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})")
            if not calls or self.tools is None:
                return
            if tool_round == MAX_TOOL_ROUNDS:
                yield Event("note", f"stopped after {MAX_TOOL_ROUNDS} rounds of tool calls")
                return
            for call in calls:
                result = run_tool(call["name"], call["arguments"])
                self.messages.append({"role": "tool", "content": result})
                yield Event("result", result)

    def _reply(self) -> Iterator[Event]:
        """Stream one turn of the model and add it to the conversation."""
        reply, dropped = self._begin()
        if dropped:
            yield Event("note", f"the oldest {dropped} turns were left out: too long for the model")
        messages = self.messages
        try:
            yield from reply
        finally:  # also when the caller stops in the middle
            messages.append(reply.message)

    def _begin(self) -> tuple[Reply, int]:
        """The model's turn and how many of the oldest turns had to be left out for it."""
        first, dropped = len(self._opening), 0
        while True:
            turns = [i for i, message in enumerate(self.messages) if message["role"] == "user" and i > first]
            try:
                reply = self.model.reply(self.messages, self.tools, self.open_thinking, is_last_try=not turns)
                return reply, dropped
            except TooLong:
                if not turns:
                    raise
                self.messages = [*self._opening, *self.messages[turns[0] :]]
                dropped += 1


def joined(events: Iterable[Event], kind: str) -> str:
    """All text of one kind."""
    return "".join(event.text for event in events if event.kind == kind)
