"""The page in a real browser: quiet, offline, and never wider than the screen."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from twofold.report import write_report

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("no chromium on this machine")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("width", [1440, 900, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_on_a_screen(browser: Any, make_folder: Callable, width: int, scheme: str) -> None:
    folder = make_folder(unfinished=("mqa",), continuations={"qkv": "x" * 400})
    folder.write_seeds()
    report = write_report(folder.path, seed_record=folder.seed_record)
    context = browser.new_context(viewport={"width": width, "height": 850}, color_scheme=scheme, offline=True)
    page = context.new_page()
    complaints: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(report.as_uri())
    assert complaints == []
    assert [url for url in requests if not url.startswith("data:")] == [report.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    plots = page.locator(".plot svg")
    visible = [plots.nth(index).bounding_box() for index in range(plots.count()) if plots.nth(index).is_visible()]
    assert len(visible) == 1
    assert visible[0]["width"] <= width
    assert visible[0]["height"] > 200
    assert page.locator(".plot svg:visible text", has_text="Q-K=V").count() >= 2
    table = page.locator(".scroll").first.evaluate("box => [box.scrollWidth, box.clientWidth]")
    if width == 1440:
        assert table[0] == table[1], "the widest table fits a desktop screen"
    context.close()
