"""The page: a chat on any model of OpenAI's form. What the model writes is shown as text, never as markup."""

import contextlib
import html
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from scripts.serving.conversation import Conversation, Event
from scripts.serving.front import front_in_a_thread
from scripts.serving.remote_model import RemoteModel, list_models
from scripts.serving.sampling import SamplingArguments
from scripts.serving.service import EngineArguments, running_service

WORDS = {
    "en": {
        "title": "Talk to it",
        "model": "Model",
        "message": "Message",
        "send": "Send",
        "stop": "Stop",
        "again": "Regenerate",
        "clear": "Clear",
        "system": "System prompt",
        "temperature": "Temperature (0: always the likeliest word)",
        "top_p": "Top p",
        "longest": "Longest answer, tokens",
        "thinking": "Thinking",
        "tools": "Tools: calculator and register",
        "rate": "Speed",
        "free": "as the model likes",
        "on": "on",
        "off": "off",
    },
    "zh": {
        "title": "与模型对话",
        "model": "模型",
        "message": "消息",
        "send": "发送",
        "stop": "停止",
        "again": "重新生成",
        "clear": "清空",
        "system": "系统提示词",
        "temperature": "温度（0：总取最可能的词）",
        "top_p": "Top p",
        "longest": "回答最长词元数",
        "thinking": "思考",
        "tools": "工具：计算器与登记簿",
        "rate": "速度",
        "free": "由模型决定",
        "on": "开",
        "off": "关",
    },
}
THOUGHT, TOOL, NOTE = "Thinking · 思考", "Tool · 工具", "Note · 说明"
THINKING = {"free": None, "on": True, "off": False}


class Shelf:
    """The models that the page offers; each gets its engine when it is first asked for.

    Args:
        engine: how engines are started.
        url: of a server whose models are offered instead; api_key: what it wants.
    """

    def __init__(self, engine: EngineArguments, url: str | None = None, api_key: str | None = None):
        self._engine, self._api_key = engine, api_key
        self._paths: dict[str, Path] = {}
        self._urls: dict[str, str] = {}
        self._running, self._lock = contextlib.ExitStack(), threading.Lock()
        if url is not None:
            self._urls = dict.fromkeys(list_models(url, api_key), url)

    def put(self, path: Path, save_dir: str) -> None:
        """Offer a model folder or a GGUF file first, and behind it the finished models of `save_dir`."""
        self._paths[path.name] = path
        for config in sorted(Path(save_dir).glob("*/config.json")):
            if any(config.parent.glob("*.safetensors")):
                self._paths.setdefault(config.parent.name, config.parent)

    @property
    def names(self) -> list[str]:
        """What can be picked."""
        return [*self._paths] or [*self._urls]

    def open(self, name: str, sampling: SamplingArguments | None = None, seed: int = 0) -> RemoteModel:
        """The model of that name, ready to answer.

        Raises:
            ValueError: its engine does not start.
        """
        with self._lock:
            if name not in self._urls:
                service = self._running.enter_context(running_service(self._paths[name], self._engine, {}))
                self._urls[name] = self._running.enter_context(front_in_a_thread(service.engine, service.options))
        asked_for = None if name in self._paths else name
        return RemoteModel(self._urls[name], asked_for, self._api_key, sampling or SamplingArguments(), seed)

    def close(self) -> None:
        """Stop every engine."""
        self._running.close()


class Transcript:
    """Events of an answer as messages of the chat component: thinking and tools folded, text as it is."""

    def __init__(self, shown: list[dict[str, Any]]):
        self._before, self._answer = shown, []
        self._kind: str | None = None

    @property
    def shown(self) -> list[dict[str, Any]]:
        """The whole transcript."""
        return [*self._before, *self._answer]

    def add(self, event: Event) -> None:
        """Show one more event."""
        if event.kind == "text":
            self._grow("text", event.text, {})
        elif event.kind == "thinking":
            self._grow("thinking", event.text, {"title": THOUGHT, "status": "pending"})
        elif event.kind == "call":
            self._grow("call", event.text, {"title": TOOL, "status": "pending"}, new=True)
        elif event.kind == "result":
            self._result(event.text)
        else:
            self._grow("note", event.text, {"title": NOTE}, new=True)

    def _grow(self, kind: str, text: str, metadata: dict[str, str], new: bool = False) -> None:
        if new or kind != self._kind:
            self.close()
            self._answer.append({"role": "assistant", "content": "", "metadata": metadata})
        self._kind = kind
        self._answer[-1]["content"] += html.escape(text, quote=False)  # the component would render markup

    def _result(self, text: str) -> None:
        call = next(message for message in self._answer if message["metadata"].get("status") == "pending")
        call["content"] += f"\n→ {html.escape(text, quote=False)}"
        call["metadata"] = {"title": TOOL, "status": "done"}
        self._kind = "result"

    def close(self) -> None:
        """Fold what is still open, but for calls that wait for their results."""
        for message in self._answer:
            if message["metadata"].get("title") == THOUGHT:
                message["metadata"] = {"title": THOUGHT, "status": "done"}


class Talk:
    """What one browser's buttons do."""

    def __init__(self, shelf: Shelf):
        self.shelf = shelf
        self._stops: dict[str, threading.Event] = {}

    def stop(self, request: gr.Request) -> None:
        """End the answer that is running in this browser."""
        if event := self._stops.get(request.session_hash):
            event.set()

    def say(
        self,
        text: str,
        shown: list,
        messages: list,
        name: str,
        system: str,
        thinking: str,
        use_tools: bool,
        temperature: float,
        top_p: float,
        longest: float,
        request: gr.Request,
    ) -> Iterator[tuple[str, list, list, str]]:
        """Answer one message: (message box, transcript, messages, rate) again and again as it grows."""
        if not text.strip():
            yield text, shown, messages, ""
            return
        stop = self._stops[request.session_hash] = threading.Event()
        transcript = Transcript([*shown, {"role": "user", "content": html.escape(text, quote=False)}])
        yield "", transcript.shown, messages, "…"
        sampling = SamplingArguments(temperature=temperature, top_p=top_p, max_new_tokens=int(longest))
        try:
            model = self.shelf.open(name, sampling, seed=time.time_ns() % 2**31)
            conversation = Conversation(model, system.strip() or None, use_tools, THINKING[thinking])
            conversation.messages += messages
            events = conversation.say(text)
            for event in events:
                transcript.add(event)
                yield "", transcript.shown, messages, rate_of(model)
                if stop.is_set():
                    events.close()
                    break
            transcript.close()
            first = 1 if system.strip() else 0
            yield "", transcript.shown, conversation.messages[first:], rate_of(model)
        except ValueError as error:
            transcript.add(Event("note", str(error)))
            yield "", transcript.shown, messages, ""

    def again(self, shown: list, messages: list, *settings: Any) -> Iterator[tuple[str, list, list, str]]:
        """Answer the last message once more."""
        asked = [index for index, message in enumerate(messages) if message["role"] == "user"]
        seen = [index for index, message in enumerate(shown) if message["role"] == "user"]
        if not asked or not seen:
            yield "", shown, messages, ""
            return
        text = messages[asked[-1]]["content"]
        yield from self.say(text, shown[: seen[-1]], messages[: asked[-1]], *settings)


def rate_of(model: RemoteModel) -> str:
    """Such as "310 tokens/s, 57 tokens"."""
    if not model.tokens or not model.seconds:
        return "…"
    return f"{model.tokens / model.seconds:,.0f} tokens/s, {model.tokens:,} tokens"


def build_page(shelf: Shelf, sampling: SamplingArguments) -> gr.Blocks:
    """The page's components and what they do."""
    talk, words = (
        Talk(shelf),
        gr.I18n(**{("zh-CN" if code == "zh" else code): WORDS[code] for code in WORDS}, zh=WORDS["zh"]),
    )
    with gr.Blocks(title="minimind-pipeline", analytics_enabled=False) as page:
        messages = gr.State([])
        with gr.Sidebar():
            name = gr.Dropdown(shelf.names, value=shelf.names[0], label=words("model"), elem_id="model")
            system = gr.Textbox(label=words("system"), lines=2, elem_id="system")
            options = [(words(key), key) for key in THINKING]
            thinking = gr.Radio(options, value="free", label=words("thinking"), elem_id="thinking")
            use_tools = gr.Checkbox(label=words("tools"), elem_id="tools")
            temperature = gr.Slider(0, 2, sampling.temperature, step=0.05, label=words("temperature"))
            top_p = gr.Slider(0.05, 1, sampling.top_p, step=0.05, label=words("top_p"))
            longest = gr.Slider(16, 2048, sampling.max_new_tokens, step=16, label=words("longest"))
        chat = gr.Chatbot(
            label=words("title"),
            height="65vh",
            render_markdown=False,
            sanitize_html=True,
            allow_tags=False,
            buttons=["copy"],
            feedback_options=None,
            elem_id="chat",
        )
        box = gr.Textbox(label=words("message"), elem_id="message", autofocus=True, submit_btn=words("send"))
        with gr.Row():
            stop, again, clear = (gr.Button(words(key), elem_id=key) for key in ("stop", "again", "clear"))
            rate = gr.Textbox(label=words("rate"), interactive=False, elem_id="rate", max_lines=1, scale=4)
        settings = [name, system, thinking, use_tools, temperature, top_p, longest]
        outputs = [box, chat, messages, rate]
        box.submit(talk.say, [box, chat, messages, *settings], outputs, concurrency_limit=None)
        again.click(talk.again, [chat, messages, *settings], outputs, concurrency_limit=None)
        stop.click(talk.stop, None, None, queue=False)
        clear.click(lambda: ("", [], [], ""), None, outputs, queue=False)
        chat.clear(lambda: [], None, messages, queue=False)  # the component's own button empties only what it shows
    page.i18n = words
    return page


def open_page(page: gr.Blocks, host: str, port: int) -> str:
    """Serve the page in a thread; gives its URL.

    Raises:
        ValueError: the port is taken.
    """
    # Gradio's own themes fetch their fonts from the network.
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    try:
        _, url, _ = page.queue(default_concurrency_limit=None).launch(
            server_name=host,
            server_port=port or None,
            prevent_thread_lock=True,
            quiet=True,
            share=False,
            theme=theme,
            i18n=page.i18n,
            footer_links=[],
            ssr_mode=False,
        )
    except OSError as error:
        raise ValueError(f"--port {port}: cannot listen there ({error})") from error
    return url
