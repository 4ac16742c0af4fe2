"""The pages of datasets, samples and caches in a browser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from smalti.rundir import RunDirectory

MakeRun = Callable[..., RunDirectory]


@pytest.fixture
def photos(root: Path) -> Path:
    folder = root / "photos"
    folder.mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (64, 48), "teal").save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"a photo of {name}\n")
    return folder


def _id(run: RunDirectory) -> str:
    record = run.record()
    assert record is not None
    return record.id


def test_a_cache_is_cleared_after_a_question_and_says_so(page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    blocks = tmp_path / "cache" / "smalti" / "fsdp-blocks.json"
    blocks.parent.mkdir(parents=True)
    blocks.write_text('{"format": 1, "entries": {"a model": []}}')
    page.goto("/maintenance")
    clear = page.get_by_role("button", name="Clear … fsdp-blocks")

    clear.click()
    question = page.get_by_role("dialog", name="Clear fsdp-blocks?")
    assert str(blocks) in question.inner_text()
    assert f"({blocks.stat().st_size} bytes)" in question.inner_text()
    question.get_by_role("button", name="Cancel").click()
    assert blocks.exists()
    clear.click()
    question.get_by_role("button", name="Clear", exact=False).last.click()

    page.locator("#toasts .toast", has_text=f"{blocks}: cleared").wait_for()
    assert not blocks.exists()
    assert f"{blocks}: cleared" in page.locator("#caches [role=status]").inner_text()
    assert clear.is_disabled()


def test_a_caption_is_edited_with_the_keyboard_and_undone(page: Any, photos: Path) -> None:
    page.goto("/datasets")
    page.get_by_role("button", name="Add a folder").first.click()
    page.get_by_label("Folder", exact=True).fill(str(photos))
    with page.expect_navigation():
        page.keyboard.press("Enter")
    image = page.get_by_role("button", name="Edit the caption of a.png")
    image.focus()
    page.keyboard.press("Enter")
    text = page.get_by_label("Caption of a.png")
    text.wait_for()
    assert _findings(page) == []
    text.fill("a <b>dog</b>")
    page.once("dialog", lambda question: question.dismiss())
    page.keyboard.press("Escape")
    assert text.is_visible()
    page.keyboard.press("Control+Enter")
    page.locator("#toasts .toast", has_text="a.txt saved").wait_for()
    assert (photos / "a.txt").read_text() == "a <b>dog</b>\n"
    assert page.locator("#photos .text").first.inner_text() == "a <b>dog</b>"

    page.get_by_role("button", name="Undo the last change").click()
    page.locator("#toasts .toast", has_text="undone").wait_for()
    assert (photos / "a.txt").read_text() == "a photo of a\n"
    page.keyboard.press("Alt+ArrowRight")
    page.get_by_label("Caption of b.png").wait_for()
    page.keyboard.press("Escape")
    page.locator("button.cell:focus", has_text="b.png").wait_for()


def test_the_gallery_is_walked_with_the_keyboard(page: Any, make_run: MakeRun) -> None:
    run = make_run(samples=(10, 20), prompts=("a face", "a cat <b>bold</b>"))
    page.goto(f"/runs/{_id(run)}/samples")
    title, prompt = page.locator("#lightbox-title"), page.locator("#lightbox-prompt")

    page.locator("#gallery [tabindex='0']").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert (title.inner_text(), prompt.inner_text()) == ("Step 20", "a cat <b>bold</b>")
    page.keyboard.press("ArrowLeft")
    assert (title.inner_text(), page.get_by_role("img", name="a cat <b>bold</b>, step 10").count()) == ("Step 10", 2)
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    assert prompt.inner_text() == "a face"
    page.locator("#lightbox-settings", has_text="config digest").wait_for()
    page.get_by_label("Compare with").select_option("20")
    assert page.locator("#lightbox-before").get_attribute("alt") == "a face, step 20"
    page.get_by_label("Border between the two").fill("25")
    assert "75%" in page.locator("#lightbox-before").evaluate("image => getComputedStyle(image).clipPath")
    assert _findings(page) == []
    page.keyboard.press("Escape")
    page.locator("button.cell:focus[data-file='00000010/0.png']").wait_for()


def test_runs_are_compared_by_their_curves(page: Any, make_run: MakeRun) -> None:
    one, two = make_run("one", steps=30), make_run("two", steps=12)
    page.goto(f"/compare?run={_id(one)}&run={_id(two)}")

    page.get_by_text("Loss at the end: one").wait_for()
    assert page.locator("#curves canvas").count() == 1
    page.get_by_label("Over").select_option("time")
    page.get_by_label("Log").check()
    page.get_by_text("Values as a table").click()
    assert page.get_by_role("row", name="100 %").inner_text().count("at") == 2
    assert _findings(page) == []


def _findings(page: Any) -> list[str]:
    """Serious findings of axe on what the page shows; in the dark theme only those of contrast, as the rest is the same."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    found = []
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme, reduced_motion="reduce")
        rules = {"runOnly": {"type": "rule", "values": ["color-contrast"]}} if theme == "dark" else {}
        result = axe.run(page, options={"resultTypes": ["violations"], **rules})
        serious = [each for each in result.response["violations"] if each["impact"] in ("serious", "critical")]
        found += [f"{theme}: {each['id']}: {each['nodes'][0]['html']}" for each in serious]
    return found
