"""The server: links, sessions, pages, and what they load."""

from __future__ import annotations

import subprocess
import sys

import pytest

from smalti import CommandCollector
from smalti_webui.server.templating import NAVIGATION


def test_the_hook_register_commands_adds_the_command():
    from smalti_webui.plugin import plugin

    commands = CommandCollector()
    plugin.register_commands(commands)
    assert list(commands.commands) == ["ui"]


def test_the_server_imports_no_torch():
    code = "import sys, smalti_webui.server.serve\nassert not {'torch', 'accelerate', 'diffusers'} & sys.modules.keys()"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


@pytest.mark.parametrize("address", [address for _, address, _, _ in NAVIGATION])
def test_each_page_of_the_navigation_is_there_and_is_marked(client, address):
    answer = client.get(address)
    assert answer.status_code == 200
    assert f'href="{address}" data-keys' in answer.text
    assert answer.text.count('aria-current="page"') >= 1


def test_a_link_works_once(stranger, settings):
    assert stranger.get("/runs").status_code == 401
    link = f"/runs?token={settings.token}&sort=name"
    answer = stranger.get(link, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs?sort=name")
    assert {"HttpOnly", "SameSite=strict"} <= set(answer.headers["set-cookie"].split("; "))
    assert stranger.get("/runs").status_code == 200
    stranger.cookies.clear()
    assert stranger.get(link).status_code == 401


def test_the_page_loads_in_a_browser_and_its_dialogs_open(page):
    assert page.title() == "Runs · smalti"
    page.keyboard.press("?")
    assert page.get_by_role("dialog").get_by_text("Keyboard shortcuts").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("c")
    page.wait_for_url("**/configs")
