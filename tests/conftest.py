"""What every test shares: one thread, no network, the shipped tokenizer."""

import os
import shutil

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path  # noqa: E402

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from transformers import AutoTokenizer, PreTrainedTokenizerBase  # noqa: E402

from trainer.hardware import has_working_amx  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium and a CJK font: apt-get install chromium fonts-wqy-zenhei"
)

torch.set_num_threads(1)
has_working_amx()
# The same cases every time, and as many as the environment asks for: HYPOTHESIS_PROFILE=thorough for 5,000.
for name, examples in (("default", 500), ("thorough", 5000)):
    hypothesis.settings.register_profile(name, max_examples=examples, deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer that ships with the repository."""
    return AutoTokenizer.from_pretrained(ROOT / "model" / "tokenizer")


@pytest.fixture(scope="module")  # no longer: while it lives, nothing else in this process can run an event loop
def browser():
    """Chromium; tests that use it bear `needs_browser`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()
