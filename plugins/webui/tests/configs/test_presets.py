"""A draft for a model and a card: from the first button of the page to the text, and what is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from smalti.config import draft
from smalti.plugins import Selection
from smalti_webui.configs.drafts import drafts_of
from smalti_webui.configs.schemas import schema_with
from support.images import images_in


@pytest.mark.usefixtures("own_folders")
def test_the_first_button_leads_to_a_draft_that_fits_the_card(page: Any, served: Any, root: Path) -> None:
    images_in(root / "photos", 3, caption="a photo of zwx")
    first = page.locator("main .button, main button").first
    assert first.inner_text() == "For a model and a card"
    first.click()
    page.wait_for_url("**/configs/card")
    page.get_by_label("Model").select_option("sana/600m-512")
    page.get_by_label("Card").select_option("12GB")
    page.get_by_label("Folder of the images").fill("photos")
    page.get_by_role("button", name="Make the configuration").click()
    page.wait_for_url("**view=toml", timeout=180_000)
    text = page.locator("#text").input_value()
    assert 'instance_data_dir = "photos" # 3 images' in text
    values = tomllib.loads(text)
    assert values["pretrained_model_name_or_path"] == "Efficient-Large-Model/Sana_600M_512px_diffusers"
    [made] = drafts_of(served.settings).list()
    assert (made.text, made.origin) == (text, "sana/600m-512 on 12GB")
    assert draft(schema_with(Selection()), file=made.file, environment={}).problems == ()


def test_what_the_command_refuses_is_shown_and_no_draft_is_made(client: TestClient, settings: Any, root: Path) -> None:
    (root / "empty").mkdir()
    for form, message in (
        ({"model": "sdxl", "card": "rtx9999"}, "is unknown"),
        ({"model": "sdxl", "card": "24GB", "data": "empty"}, "no images in empty"),
    ):
        answer = client.post("/configs/card", data=form)
        assert (answer.status_code, message in answer.text, "hx-redirect" in answer.headers) == (200, True, False)
    assert client.post("/configs/card", data={"model": "sdxl", "data": "/etc"}).status_code == 403
    assert drafts_of(settings).list() == []
