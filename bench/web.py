"""The web page: how long a browser needs for the first page with many runs, and what it costs the server.

The runs are real run directories. The first page is loaded by a browser without a cache; its time is until the document and its
scripts are there. Skipped where there is no Chromium.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
from run import Result, paired
from sizes import sized

if TYPE_CHECKING:
    from playwright.sync_api import Request

RUNS = sized(40, short=2)
ROUNDS = sized(7, short=1)
GOAL_MS = 300.0
CHROMIUM = shutil.which("chromium")


def measure() -> list[Result]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "plugins/webui/tests"))
    from conftest import Runs, Server

    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "runs"
        root.mkdir()
        make = Runs(root)
        for number in range(RUNS):
            make(f"run-{number}", steps=200, samples=(200,), checkpoints=(200,))
        server = Server((root,), Path(name) / "data")
        try:
            return [*in_browser(server), in_server(server)]
        finally:
            server.stop()


def in_server(server: Any) -> Result:
    """CPU seconds of this process for the page of the runs, the request included."""
    with httpx2.Client(base_url=server.url, follow_redirects=True) as client:
        client.get(server.link)
        seconds = []
        for _ in range(ROUNDS):
            begun = time.process_time()
            client.get("/runs").raise_for_status()
            seconds.append(1e3 * (time.process_time() - begun))
    return paired(f"web: the page of {RUNS} runs, server", seconds, [1.0] * ROUNDS, unit="CPU ms", goal=GOAL_MS)


def note(asked: list[str], request: Request) -> None:
    asked.append(request.url)


def in_browser(server: Any) -> list[Result]:
    """Milliseconds from the navigation to the end of loading, and requests."""
    if CHROMIUM is None:
        return []
    from playwright.sync_api import sync_playwright

    times, requests = [], []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for _ in range(ROUNDS):
            context = browser.new_context()
            page = context.new_page()
            asked: list[str] = []
            page.on("request", partial(note, asked))
            page.goto(server.link)
            page.wait_for_load_state("load")
            times.append(page.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"))
            requests.append(float(len(asked)))
            context.close()
        browser.close()
    once = [1.0] * ROUNDS
    return [
        paired(f"web: the first page with {RUNS} runs, browser", times, once, unit="ms", goal=GOAL_MS),
        paired("web: the first page, requests", requests, once, unit="requests", goal=15.0),
    ]
