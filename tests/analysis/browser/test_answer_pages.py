"""Tests in a browser of the pages that `zeroscale predict` and `zeroscale advise` write: on wide and narrow screens, in
light and dark mode."""

from collections.abc import Callable
from pathlib import Path

import pytest
from opened import Opened

from bench.cli import main

pytestmark = [pytest.mark.thorough, pytest.mark.processes]

Open = Callable[..., Opened]
LEAST_PX = 8.0
"""Smallest height of legible letters, in pixels."""


@pytest.fixture(scope="module", params=["predict", "advise"])
def answer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HTML file. Each test runs twice: with a file by `zeroscale predict`, and with a file by `zeroscale advise`."""
    path = tmp_path_factory.mktemp("answer") / f"{request.param}.html"
    words = ["model=mt5_xl", "machine=h200", "devices_per_node=8", "nodes=1,2", "batch.micro=8", "engine=ddp,zero2"]
    assert main([request.param, *words, "--page", str(path)]) == 0
    return path


@pytest.mark.parametrize("width", [1400, 400])
def test_page_fits_the_screen_without_network_requests_or_errors(opened: Open, answer: Path, width: int) -> None:
    page, requests, errors = opened(answer, width)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert (requests, errors) == ([answer.as_uri()], [])


def test_text_of_figures_is_legible_on_a_narrow_screen(opened: Open, answer: Path) -> None:
    page = opened(answer, 400).page
    text = "e => parseFloat(getComputedStyle(e).fontSize) * e.ownerSVGElement.getScreenCTM().a"
    heights = [one.evaluate(text) for one in page.locator("figure svg text:visible").all()]
    assert heights and min(heights) >= LEAST_PX


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_have_the_colours_of_the_page(opened: Open, answer: Path, scheme: str) -> None:
    page = opened(answer, color_scheme=scheme).page
    ink = page.evaluate("getComputedStyle(document.body).color")
    fills = {one.evaluate("e => getComputedStyle(e).fill") for one in page.locator("figure svg text:visible").all()}
    assert fills == {ink}
