"""The report as one HTML file: pictures inside, text that stays text, and experts' loads drawn."""

import numpy as np
import pytest
from matplotlib.image import imread

from eval.experts import draw_experts, loads_of
from eval.records import RunRecord, find_records
from eval.report import write_report
from eval.rewarded import draw_rewards
from eval.web_page import to_html
from tests.conftest import needs_browser
from tests.eval.helpers import make_run


def moe_record(tmp_path, layers=2, experts=4, busy=0):
    shares = np.full((layers, experts), 0.7 / (experts - 1))
    shares[:, busy] = 0.3
    metrics = [{"step": n, "tokens": 100 * n, "loss": 3.0, "expert_load": shares.tolist()} for n in range(1, 5)]
    return RunRecord(tmp_path / "pretrain_256_moe", {"stage": "pretrain"}, metrics)


def test_loads_are_multiples_of_an_even_share(tmp_path):
    tokens, shares = loads_of(moe_record(tmp_path))
    assert tokens == [100, 200, 300, 400] and shares.shape == (4, 2, 4)
    assert np.allclose(shares[-1, :, 0], 1.2) and np.allclose(shares.mean(-1), 1)
    assert loads_of(RunRecord(tmp_path, {}, [{"step": 1, "tokens": 5, "loss": 2.0}])) is None


def test_rewards_are_drawn_only_where_there_are_any(tmp_path):
    path = tmp_path / "rewards.png"
    loss = [{"step": step, "tokens": step, "loss": 1.0} for step in range(3)]
    assert not draw_rewards([RunRecord(tmp_path, {}, loss)], path) and not path.exists()
    rewarded = RunRecord(
        tmp_path / "grpo", {}, [line | {"rollout_reward": 0.5, "validation_reward": 0.6} for line in loss]
    )
    told_apart = RunRecord(tmp_path / "dpo", {}, [line | {"preferred": 0.5} for line in loss])
    assert not rewarded.training_points and not told_apart.training_points, "their losses are no nats per token"
    heights = []
    for records in ([rewarded], [rewarded, told_apart, rewarded]):
        assert draw_rewards(records, path)
        heights.append(imread(path).shape[0])
    assert heights[0] < heights[1], "two a row"


def test_experts_are_drawn_only_where_there_are_any(tmp_path):
    path = tmp_path / "experts.png"
    assert not draw_experts([RunRecord(tmp_path, {}, [])], path) and not path.exists()
    assert draw_experts([moe_record(tmp_path), moe_record(tmp_path, 8, 32, 3)], path)
    assert imread(path).shape[0] > 500


def test_a_page_holds_its_pictures_and_shows_markup_as_text(tmp_path):
    (tmp_path / "a.png").write_bytes(b"\x89PNG picture")
    markdown = (
        "# How it went\n\n- **big**\n\n## Scores & more\n\n![a picture](a.png)\n\n"
        "| family | right |\n| --- | ---: |\n| <script>alert(1)</script> | 99 |\n\n## Last\n\n```\npython x.py\n```\n"
    )
    page = to_html(markdown, tmp_path)
    assert page.startswith("<!DOCTYPE html>") and "<title>How it went</title>" in page
    assert "data:image/png;base64,iVBORyBwaWN0dXJl" in page and 'src="a.png"' not in page
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert '<a href="#part-0">Scores &amp; more</a>' in page and 'id="part-1"' in page
    assert 'style="text-align:right"' in page and "http" not in page


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser_everything_is_there_and_nothing_is_fetched(browser, tmp_path, width):
    for stage in ("full_sft", "pretrain", "mid_train"):
        make_run(tmp_path / f"{stage}_256", stage)
    report = write_report(find_records(tmp_path), tmp_path).with_suffix(".html")
    report = report.rename(tmp_path.parent / f"{width}.html")  # nothing lies beside it
    page = browser.new_page(viewport={"width": width, "height": 900})
    asked, errors = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(report.as_uri())
    assert [url for url in asked if not url.startswith("data:")] == [report.as_uri()] and errors == []
    widths = page.eval_on_selector_all("img", "images => images.map(image => [image.naturalWidth, image.width])")
    assert len(widths) == 2 and all(natural == 1440 and 0 < shown <= width for natural, shown in widths)
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "only tables may be scrolled sideways"
    first, second = (page.locator("h2").nth(index).inner_text() for index in (0, 1))
    assert (first, second) == ("Example answers", "What each stage did")
    page.get_by_role("link", name="Scores by question family").click()
    assert page.get_by_role("heading", name="Scores by question family").bounding_box()["y"] < 200
    page.close()
