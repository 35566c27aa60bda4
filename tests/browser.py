"""A page in headless Chromium, which reports whatever it complains of and whatever it asks the network for."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def executable() -> str:
    """The browser; without one the test skips, and fails in CI."""
    pytest.importorskip("playwright.sync_api")
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no Chromium on the PATH (apt-get install chromium)")
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
    if options.get("java_script_enabled", True):
        page.wait_for_selector("html.js, html[data-theme], #body tr", state="attached", timeout=30_000)
    try:
        yield page
    finally:
        context.close()
    assert complaints == []
