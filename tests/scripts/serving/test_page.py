"""The page in a real browser: a streamed answer in Chinese, a tool call, stop, and a hostile answer that stays text."""

import os
import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT, needs_browser
from tests.scripts.serving.conftest import CALCULATION, HOSTILE, LONG, THINKING

pytestmark = [pytest.mark.slow, needs_browser]


@pytest.fixture(scope="module")
def url(taught):
    command = [sys.executable, str(ROOT / "scripts" / "web_demo.py"), "--model_path", str(taught), "--port", "0"]
    command += ["--temperature", "0", "--threads", "1", "--save_dir", str(taught.parent), "--quantize", "f32"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd="/")
    line = process.stdout.readline()
    yield next(word for word in line.split() if word.startswith("http"))
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGTERM


@pytest.fixture(params=["en-US", "zh-CN"])
def page(request, browser, url):
    context = browser.new_context(locale=request.param)
    page = context.new_page()
    page.outside, page.errors, page.language = [], [], request.param[:2]
    page.on("request", lambda asked: page.outside.append(asked.url) if is_outside(asked.url) else None)
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.goto(url)
    page.wait_for_selector("#message textarea", timeout=60_000)
    yield page
    assert page.outside == [] and page.errors == []
    context.close()


def is_outside(url):
    return not url.startswith(("http://127.0.0.1", "data:", "blob:"))


def say(page, text):
    page.fill("#message textarea", text)
    page.press("#message textarea", "Enter")


def wait_for(page, text):
    page.wait_for_function("text => document.querySelector('#chat')?.innerText.includes(text)", arg=text)


def wait_for_no(page, text):
    page.wait_for_function("text => document.querySelector('#chat')?.innerText.includes(text) === false", arg=text)


def test_an_answer_in_chinese_with_its_thinking_folded(page):
    say(page, THINKING[0]["content"])
    wait_for(page, "米拉是医生。")
    wait_for(page, "Thinking")
    page.wait_for_function("document.querySelector('#rate input, #rate textarea')?.value.includes('tokens/s')")
    wait_for_no(page, "Mila is a doctor.")  # folded
    page.click("#chat >> text=Thinking")
    wait_for(page, "Mila is a doctor.")
    labels = page.inner_text("body")
    assert ("重新生成" if page.language == "zh" else "Regenerate") in labels
    page.click("#again")
    page.wait_for_timeout(1500)
    wait_for(page, "米拉是医生。")
    assert page.inner_text("#chat").count("谁是米拉") == 1


def test_a_tool_call_is_shown_with_its_result(page):
    page.check("#tools input")
    say(page, CALCULATION[0]["content"])
    wait_for(page, "It is 42.")
    page.click("#chat >> text=Tool")
    wait_for(page, 'calculate({"expression": "12 + 30"})')
    wait_for(page, "→ 42")


def test_stop_ends_the_answer_and_what_was_said_stays(page):
    say(page, LONG[0]["content"])
    wait_for(page, "3 4 5")
    page.click("#stop")
    page.wait_for_timeout(1500)
    first = page.inner_text("#chat")
    page.wait_for_timeout(1000)
    assert page.inner_text("#chat") == first and "1 2 3" in first
    page.click("#clear")
    wait_for_no(page, "1 2 3")


def test_a_hostile_answer_and_question_are_shown_as_text(page):
    title = page.title()
    say(page, HOSTILE[0]["content"])
    wait_for(page, "<img src=x onerror=")
    wait_for(page, "<b>bold</b> **stars** [x](javascript:1)")
    page.click("#clear")
    say(page, "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">")
    wait_for(page, "<script>document.title='owned'</script>")
    page.wait_for_timeout(1500)
    assert page.title() == title
