"""The editor in a browser: with the keyboard only, with two tabs, across reloads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from smalti.config import draft
from smalti.plugins import Selection
from smalti_webui.configs.drafts import Draft, drafts_of
from smalti_webui.configs.schemas import schema_with

EDITOR = re.compile(r"/configs/[0-9a-f]{12}")


@pytest.fixture
def begun(served: Any) -> Draft:
    """A draft that was begun before the browser was opened."""
    return drafts_of(served.settings).new("# mine\nmodel_family = 'toy'\nema_decay = 0.9\n", name="begun")


def stored(served: Any, draft: Draft) -> str:
    return drafts_of(served.settings).get(draft.id).text


def tab_to(page: Any, selector: str, limit: int = 60) -> None:
    """Press Tab until the focus is on the element."""
    for _ in range(limit):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"Tab does not reach {selector}")


def test_a_new_configuration_from_a_recipe_an_error_its_fix_and_saving_with_the_keyboard_only(page: Any, root: Path) -> None:
    page.keyboard.press("g")
    page.keyboard.press("c")
    page.wait_for_url("**/configs")
    tab_to(page, "[data-opens=recipes]")
    page.keyboard.press("Enter")
    tab_to(page, "form:has([value=first-run]) button")
    page.keyboard.press("Enter")
    page.wait_for_url(EDITOR)
    page.keyboard.press("/")
    page.keyboard.type("--learning_rate")
    tab_to(page, "#option-learning_rate")
    page.keyboard.type("abc")
    page.keyboard.press("Tab")
    error = page.locator("#option-learning_rate-error")
    error.get_by_text("learning_rate cannot be 'abc'").wait_for()
    assert page.locator("#option-learning_rate").get_attribute("aria-invalid") == "true"
    page.keyboard.press("Shift+Tab")  # to the list of problems, whose link leads back to the field
    page.keyboard.press("Enter")
    page.keyboard.type("1e-3")
    page.keyboard.press("Tab")
    error.wait_for(state="hidden")
    page.keyboard.press("Control+s")
    page.wait_for_url("**/save")
    assert "learning_rate = 0.001" in page.locator(".diff").inner_text()
    page.keyboard.press("Enter")
    page.get_by_role("status").get_by_text("Saved to").wait_for()
    assert draft(schema_with(Selection()), file=root / "first-run.toml", environment={}).value("learning_rate") == 1e-3
    assert (root / "first-run.toml").read_text().startswith("# A first run on any machine")


def test_the_views_and_tabs_of_one_draft_agree_and_lose_nothing(page: Any, served: Any, begun: Draft) -> None:
    page.goto(f"/configs/{begun.id}?section=training&level=expert")
    decay = page.locator("#option-ema_decay")
    assert (decay.is_disabled(), decay.input_value()) == (True, "0.9")
    assert "Has no effect unless use_ema." in page.locator("#option-ema_decay-reason").inner_text()

    other = page.context.new_page()
    other.goto(f"/configs/{begun.id}")
    page.locator("#option-use_ema").check()
    page.locator("#option-ema_decay:enabled").wait_for()
    other.locator("#option-output_dir").fill("runs/b")
    other.locator("#option-seed").focus()
    conflict = other.get_by_role("alert").filter(has_text="changed in another tab")
    conflict.get_by_text("Not stored: output_dir").wait_for()
    assert "runs/b" not in stored(served, begun)
    with other.expect_navigation():
        conflict.get_by_role("button", name="Store mine too").click()
    other.locator("#differences").get_by_text("use_ema").wait_for()
    other.close()
    assert {"# mine", "use_ema = true", 'output_dir = "runs/b"'} <= set(stored(served, begun).splitlines())

    page.goto(f"/configs/{begun.id}?view=toml")
    page.locator("#text").fill("seed = \n")
    page.locator("#text-error").get_by_text("line 1").wait_for()
    page.locator("#text").fill("seed = 3 # three\n")
    page.locator("#text-error").wait_for(state="hidden")
    page.get_by_role("link", name="Flags").click()
    page.wait_for_url("**view=flags")
    assert page.locator("#text").input_value() == "smalti train \\\n    --seed=3"
    page.locator("#text").fill("smalti train --seed=4")  # what was typed is stored before the next view is opened
    page.get_by_role("link", name="Form").click()
    page.wait_for_url("**view=form")
    assert page.locator("#option-seed").input_value() == "4"
    assert stored(served, begun) == "seed = 4 # three\n"
    assert begun.text in [each.text for each in drafts_of(served.settings).get(begun.id).revisions]
