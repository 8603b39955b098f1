"""Talk to a model: streaming, many turns, thinking, tools. In a terminal, through a pipe, or for one question.

Examples:
    python scripts/chat.py
    python scripts/chat.py --prompt "Who are you?" --temperature 0
    printf 'Hello!\\nWho are you?\\n' | python scripts/chat.py
    python scripts/chat.py --model_path out/full_sft_256/full_sft_256-q8_0.gguf
    python scripts/chat.py --url http://127.0.0.1:8000/v1
"""

import gc, pathlib, sys  # noqa: E401

sys.path[0] = sys.path[0] if __package__ else str(pathlib.Path(__file__).resolve().parents[1])
__package__ or gc.disable()  # a fifth of the time of the imports; `user_errors` turns it on again

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TextIO

from transformers.utils import logging

from scripts.serving.conversation import OFFERED_TOOLS, Conversation, Event
from scripts.serving.local_model import LocalModel
from scripts.serving.sampling import SamplingArguments
from trainer.config import ModelChoice, flag, parse_arguments, raise_problems, user_errors
from trainer.distributed import choose_device
from trainer.weights import find_model

HELP = """/clear  forget the conversation
/help   this list
/exit   leave (as does Ctrl-D)
Ctrl-C  stop the answer"""


@dataclasses.dataclass
class TalkArguments:
    """What is said."""

    _argument_group_name = "talk"

    prompt: str | None = flag(None, "answer this one message and leave")
    system: str | None = flag(None, "system message: how the model should behave")
    open_thinking: Literal[0, 1] | None = flag(None, "1: think first, 0: do not; by default the model chooses")
    tools: Literal[0, 1] = flag(0, "1: let the model call the built-in safe tools (" + ", ".join(OFFERED_TOOLS) + ")")
    seed: int = flag(42, "seed of the picking; the same seed and words give the same answers")


@dataclasses.dataclass
class RemoteArguments:
    """A server instead of a model here."""

    _argument_group_name = "server"

    url: str | None = flag(
        None, "talk to the model behind this OpenAI-compatible URL, such as http://127.0.0.1:8000/v1"
    )
    api_key: str | None = flag(None, "key for --url, if it wants one")
    remote_model: str | None = flag(None, "which of the models behind --url; by default the first")


class Printer:
    """Writes events as they come: thinking and tools dimmed in a terminal, in brackets elsewhere."""

    STYLES = {"thinking": "\033[2m", "call": "\033[36m", "result": "\033[36m", "note": "\033[33m"}
    LABELS = {"thinking": "[thinking] ", "call": "[call] ", "result": "[result] ", "note": "[note] "}

    def __init__(self, out: TextIO, styled: bool):
        self.out, self.styled = out, styled

    def show(self, events: Iterable[Event]) -> None:
        """Print one answer and end its line."""
        previous, last_text = None, "\n"
        try:
            for event in events:
                if event.kind != previous or event.kind in ("call", "result", "note"):
                    self._open(event.kind, on_new_line=last_text.endswith("\n"))
                previous, last_text = event.kind, event.text
                self.out.write(event.text)
                self.out.flush()
        finally:
            self.out.write("\033[0m\n" if self.styled else "\n")
            self.out.flush()

    def _open(self, kind: str, on_new_line: bool) -> None:
        end = "" if on_new_line else "\n"
        if self.styled:
            self.out.write(f"\033[0m{end}{self.STYLES.get(kind, '')}")
        else:
            self.out.write(end + self.LABELS.get(kind, ""))


@contextlib.contextmanager
def opened_model(choice: ModelChoice, remote: RemoteArguments, sampling: SamplingArguments, seed: int) -> Iterator:
    """Whoever answers, and what to call it: a model folder here, a GGUF file by llama.cpp here, or a server's model."""
    if remote.url is not None:
        model = _remote_module().RemoteModel(remote.url, remote.remote_model, remote.api_key, sampling, seed)
        yield model, f"{model.name} at {remote.url}"
        return
    path = find_model(choice)
    if path.suffix != ".gguf":
        yield LocalModel.open(path, choice, sampling, seed), f"{path} on {choose_device(choice.device)}"
        return
    remote_model = _remote_module()
    from scripts.serving.front import front_in_a_thread
    from scripts.serving.service import EngineArguments, running_service

    with running_service(path, EngineArguments(slots=1), {}) as service:
        with front_in_a_thread(service.engine, service.options) as url:
            yield remote_model.RemoteModel(url, None, None, sampling, seed), f"{path} by llama.cpp"


def _remote_module() -> Any:
    try:
        from scripts.serving import remote_model
    except ModuleNotFoundError as error:
        message = f"--url and GGUF files need the package {error.name}: pip install -r requirements-serve.txt"
        raise ValueError(message) from error
    return remote_model


def talk_by_line(conversation: Conversation, printer: Printer, interactive: bool) -> None:
    """One turn for each line of standard input, until it ends or says /exit."""
    while (line := read_line(interactive)) is not None:
        text = line.strip()
        if text == "/exit":
            return
        if text == "/clear":
            conversation.clear()
        elif text == "/help":
            print(HELP)
        elif text.startswith("/"):
            print(f"unknown command {text.split()[0]}; /help lists them", file=sys.stderr)
        elif text:
            answer(conversation, printer, text, interactive)


def answer(conversation: Conversation, printer: Printer, text: str, interactive: bool) -> None:
    """Print the answer to one message; in a terminal, Ctrl-C and an unusable message end the answer, not the talk."""
    try:
        printer.show(conversation.say(text))
    except KeyboardInterrupt:
        if not interactive:
            raise
        print("(stopped)", file=sys.stderr)
    except ValueError as error:
        if not interactive:
            raise
        print(f"error: {error}", file=sys.stderr)


def read_line(interactive: bool) -> str | None:
    """The next line of the user's, None at the end."""
    if not interactive:
        return sys.stdin.readline() or None
    while True:
        try:
            return input("\n> ")
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D leaves)", file=sys.stderr)
        except EOFError:
            print()
            return None


def main() -> None:
    """Entry point."""
    logging.disable_progress_bar()
    groups = (ModelChoice, TalkArguments, SamplingArguments, RemoteArguments)
    choice, talk, sampling, remote = parse_arguments(*groups, description=__doc__.split("\n")[0])
    raise_problems(sampling.problems())
    for stream in (sys.stdin, sys.stdout):
        # Words are UTF-8 whatever the terminal's locale says; a broken byte must not end the talk.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")
    with opened_model(choice, remote, sampling, talk.seed) as (model, title):
        open_thinking = None if talk.open_thinking is None else bool(talk.open_thinking)
        conversation = Conversation(model, talk.system, bool(talk.tools), open_thinking)
        hold_talk(conversation, talk, title)


def hold_talk(conversation: Conversation, talk: TalkArguments, title: str) -> None:
    """Answer `--prompt`, or everything that comes in by standard input."""
    styled = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    printer = Printer(sys.stdout, styled)
    if talk.prompt is not None:
        if not talk.prompt.strip():
            raise ValueError("--prompt is empty")
        answer(conversation, printer, talk.prompt, interactive=False)
        return
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"{title}. /help lists commands, /exit leaves.", file=sys.stderr)
    talk_by_line(conversation, printer, interactive)


if __name__ == "__main__":
    with user_errors():
        try:
            main()
        except KeyboardInterrupt:
            raise SystemExit(130) from None
