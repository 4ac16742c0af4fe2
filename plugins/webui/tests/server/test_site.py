"""All pages in a browser: accessibility in both themes, widths, requests, and the keyboard.

The pages are found by following links from the navigation, one address for each route.
"""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from starlette.routing import Match

from smalti_webui.configs.drafts import drafts_of
from smalti_webui.server.templating import NAVIGATION
from support.whole import some

FIRST_PAGE_REQUESTS = 15
DRAFT = 'model_family = "toy"\noutput_dir = "run"\ninstance_data_dir = "photos"\nmax_train_steps = 10\nfsdp_enable = true\n'
SERIOUS = ("serious", "critical")


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core."""
    package = pytest.importorskip("axe_playwright_python", reason="needs axe-playwright-python")
    return (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")


@pytest.fixture
def site(make_run: Any, served: Any, page: Any, root: Path) -> list[str]:
    """The addresses of the pages of a server with runs, a draft and a folder of images."""
    first = make_run("first").record().id
    failed = make_run("failed", steps=5, condition="failed", message="out of memory", samples=(), checkpoints=()).record().id
    draft = drafts_of(served.settings).new(DRAFT, name="portraits").id
    (root / "photos").mkdir()
    Image.new("RGB", (64, 64)).save(root / "photos/one.png")
    (root / "photos/one.txt").write_text("a face")
    own = {"origin": served.url, "sec-fetch-site": "same-origin"}
    added = page.request.post("/datasets/folders", form={"folder": str(root / "photos")}, headers=own)
    assert added.ok
    known = [f"/runs/{first}", f"/runs/{failed}/errors", *(f"/{room}/{draft}" for room in ("configs", "hardware", "launch"))]
    found = follow_links(served, page, [*known, f"/compare?run={first}"])
    assert {address.split("/")[1].partition("?")[0] for address in found} >= {
        "datasets",
        "compare",
        "hardware",
        "launch",
        "configs",
    }
    assert any(address.startswith("/datasets/") for address in found)
    assert {"metrics", "samples", "log", "config", "checkpoints", "errors"} <= {address.split("/")[-1] for address in found}
    return found


def follow_links(served: Any, page: Any, first: list[str]) -> list[str]:
    seen: dict[str, str] = {}
    waiting = deque([*(address for _, address, _, _ in NAVIGATION), *first])
    while waiting:
        address = waiting.popleft()
        kind = route_of(served.app, address.partition("?")[0])
        if not kind or kind in seen:
            continue
        answer = page.request.get(address)
        if not answer.headers.get("content-type", "").startswith("text/html"):
            continue
        assert answer.status == 200, address
        seen[kind] = address
        waiting.extend(found.replace("&amp;", "&") for found in re.findall(r'<a\b[^>]*\shref="(/[^"#]*)', answer.text()))
    return list(seen.values())


def route_of(app: Any, path: str) -> str:
    """The path with parameters of the route of an address; empty if there is none."""

    def search(routes: Any) -> str:
        for route in routes:
            inner = getattr(getattr(route, "original_router", None), "routes", None)
            if inner and (found := search(inner)):
                return found
            if hasattr(route, "path_regex") and hasattr(route, "methods"):
                match, _ = route.matches({"type": "http", "path": path, "method": "GET", "root_path": ""})
                if match is Match.FULL:
                    return str(route.path)
        return ""

    return search(app.routes)


def findings(page: Any, axe: str, *, rules: str | None = None) -> list[str]:
    """Serious findings of axe on the page that is shown."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(axe)
    options = {"resultTypes": ["violations"]} | ({"runOnly": {"type": "rule", "values": [rules]}} if rules else {})
    result = page.evaluate("options => axe.run(document, options)", options)
    return [
        f"{each['id']}: {node['target']} {node['failureSummary']}"
        for each in result["violations"]
        if each["impact"] in SERIOUS
        for node in each["nodes"][:3]
    ]


def test_every_page_is_accessible_in_both_themes_and_fits_a_narrow_screen(site: list[str], page: Any, axe: str) -> None:
    wrong = {}
    kinds = {(address.split("/")[1].partition("?")[0], address.count("/") > 1): address for address in site}
    examined = some(site, *kinds.values())  # a list and what it leads to, of each kind
    page.emulate_media(reduced_motion="reduce")
    for address in site:
        page.set_viewport_size({"width": 1280, "height": 800})
        page.emulate_media(color_scheme="light")
        page.goto(address)
        found = findings(page, axe) if address in examined else []
        found += ["more than one h1"] if page.locator("h1").count() != 1 else []
        page.emulate_media(color_scheme="dark")
        found += [f"dark: {each}" for each in findings(page, axe, rules="color-contrast")] if address in examined else []
        page.set_viewport_size({"width": 390, "height": 800})
        width = page.evaluate("document.documentElement.scrollWidth")
        found += [f"{width} pixels wide on a screen of 390"] if width > 390 else []
        wrong |= {address: found} if found else {}
    assert wrong == {}


def test_dialogs_are_accessible(page: Any, axe: str) -> None:
    for opener, name in (("shortcuts", "Keyboard shortcuts"), ("recent", "Recent messages"), ("palette", "Go to a page")):
        page.locator(f"[data-opens={opener}]").click()
        assert page.get_by_role("dialog", name=name).is_visible()
        assert findings(page, axe) == []
        page.keyboard.press("Escape")
        assert page.evaluate("document.activeElement.dataset.opens") == opener


def test_the_first_page_makes_few_requests_and_the_next_fewer(served: Any, browser: Any) -> None:
    context = browser.new_context()
    opened, asked = context.new_page(), []
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(served.link)
    opened.wait_for_load_state("networkidle")
    first = len(asked)
    context.close()
    assert 5 < first <= FIRST_PAGE_REQUESTS, asked


def test_the_theme_is_kept_and_is_there_at_the_first_paint(page: Any) -> None:
    for _ in range(2):
        with page.expect_response("**/theme"):
            page.keyboard.press("t")
    page.reload()
    assert page.locator("html").get_attribute("data-theme") == "dark"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 21, 27)"


def test_the_keyboard_reaches_everything_of_the_frame(page: Any) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("Control+k")
    page.keyboard.type("doct")
    page.keyboard.press("Enter")
    page.wait_for_url("**/doctor")
    page.keyboard.press("g")
    page.keyboard.press("c")
    page.wait_for_url("**/configs")


def test_messages_are_shown_and_kept(page: Any, served: Any) -> None:
    from fastapi import Response
    from starlette.responses import RedirectResponse

    from smalti_webui.server.messages import toast

    def part() -> Response:
        answer = Response("<p>done</p>", media_type="text/html")
        toast(answer, "Cleared 3 files <b>", "warning")
        return answer

    def whole() -> Response:
        answer = RedirectResponse("/configs", 303)
        toast(answer, "Saved")
        return answer

    served.app.add_api_route("/part", part, methods=["POST"])
    served.app.add_api_route("/whole", whole, methods=["POST"])
    page.evaluate("htmx.ajax('POST', '/part', {target: '#top-status', swap: 'innerHTML'})")
    page.get_by_role("status").get_by_text("Cleared 3 files <b>").wait_for()
    page.evaluate("""() => {
        const form = Object.assign(document.createElement('form'), {method: 'post', action: '/whole'});
        document.body.append(form);
        form.submit();
    }""")
    page.get_by_role("status").get_by_text("Saved").wait_for()
    page.wait_for_load_state()
    page.locator("[data-opens=recent]").click()
    assert page.get_by_role("dialog").get_by_role("listitem").all_inner_texts()[1].startswith("Cleared 3 files <b>")
