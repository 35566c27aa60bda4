"""A page in headless Chromium, which reports whatever it complains of and whatever it asks the network for."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def executable() -> str:
    """The browser; skips the test where there is none."""
    pytest.importorskip("playwright.sync_api")
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium on the PATH (apt-get install chromium)")
    return found


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A running browser."""
    path = executable()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened(browser: Any, path: Path, **options: Any) -> Iterator[Any]:
    """The page at ``path``, ready; afterwards it must have complained of nothing and asked for nothing."""
    context = browser.new_context(**options)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: complaints.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    ready = "html[data-ready=true]" if page.locator("#calls").count() else "html[data-theme], #body tr"
    page.wait_for_selector(ready, state="attached", timeout=30_000)
    if page.locator("#trajectories").count():
        page.wait_for_selector("html[data-trained=true]", state="attached", timeout=30_000)
    try:
        yield page
    finally:
        context.close()
    assert complaints == []


def hover(page: Any, chart: str, x: float, y: float) -> str:
    """The tooltip at that place of the chart's data."""
    place = page.evaluate(
        """([chart, x, y]) => {
            const host = document.getElementById(chart);
            host.scrollIntoView({block: "center", behavior: "instant"});
            const view = [...Bokeh.index].find((view) => host.contains(view.el));
            const frame = view.frame, box = view.el.getBoundingClientRect();
            return [box.left + frame.x_scale.compute(x), box.top + frame.y_scale.compute(y)];
        }""",
        [chart, x, y],
    )
    page.mouse.move(place[0] - 40, place[1] - 3)
    page.mouse.move(*place, steps=4)
    tip = page.locator(".bk-Tooltip .bk-tooltip-content").first
    tip.wait_for(timeout=30_000)
    return str(tip.inner_text())
