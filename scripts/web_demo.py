"""A page to talk to a model in the browser: streaming, thinking folded, tools with their results, no network needed.

Examples:
    python scripts/web_demo.py
    python scripts/web_demo.py --weight main --port 7861
    python scripts/web_demo.py --url http://127.0.0.1:8000/v1
"""

import gc, pathlib, sys  # noqa: E401

sys.path[0] = sys.path[0] if __package__ else str(pathlib.Path(__file__).resolve().parents[1])
__package__ or gc.disable()  # a fifth of the time of the imports; `user_errors` turns it on again

import contextlib
import dataclasses
import os
import threading

from transformers.utils import logging

from scripts.serving.sampling import SamplingArguments
from scripts.serving.service import EngineArguments, leave_on_sigterm
from trainer.config import FolderChoice, flag, parse_arguments, raise_problems, user_errors
from trainer.weights import find_model


@dataclasses.dataclass
class PageArguments:
    """Where the page is, and who answers."""

    _argument_group_name = "page"

    host: str = flag("127.0.0.1", "address of the page; any other than the loopback lets others in, without a key")
    port: int = flag(7860, "port of the page; 0: any that is free")
    url: str | None = flag(None, "talk to the models behind this OpenAI-compatible URL instead of starting an engine")
    api_key: str | None = flag(None, "key for --url, if it wants one")

    def problems(self) -> list[str]:
        """What is out of range, by flag."""
        return [] if 0 <= self.port < 65536 else [f"--port {self.port} must lie in 0 to 65535"]


def main() -> None:
    """Entry point."""
    logging.disable_progress_bar()
    groups = (FolderChoice, EngineArguments, SamplingArguments, PageArguments)
    defaults = {"slots": 4}
    choice, engine, sampling, page = parse_arguments(*groups, description=__doc__.split("\n")[0], defaults=defaults)
    raise_problems([*engine.problems(), *sampling.problems(), *page.problems()])
    # Before gradio is imported: it would look up two hosts otherwise.
    os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1"}
    try:
        from scripts.serving.page import Shelf, build_page, open_page
    except ModuleNotFoundError as error:
        raise ValueError(f"the page needs the package {error.name}: pip install -r requirements-serve.txt") from error
    leave_on_sigterm()
    with contextlib.closing(Shelf(engine, page.url, page.api_key)) as shelf:
        if page.url is None:
            shelf.put(find_model(choice), choice.save_dir)
        first = shelf.open(shelf.names[0])  # a mistake shows now, not in the browser
        url = open_page(build_page(shelf, sampling), page.host, page.port)
        print(f"{first.name}: {url}  (Ctrl-C ends it)", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    with user_errors():
        main()
