"""A real run from the page: the checks of a dry run, the start, and a server that ends while the run continues."""

import time

import pytest

from smalti.rundir import RunDirectory
from smalti_webui.launch.devices import local_devices
from smalti_webui.launch.launches import Store
from smalti_webui.launch.queue import Queue


@pytest.fixture
def draft(served, draft_in, photos):
    return draft_in(served.settings)


def test_a_run_is_checked_started_from_the_page_and_outlives_the_server(page, served, draft, root):
    page.goto(f"/launch/{draft.id}")
    page.get_by_text("4 samples in 1 bucket").wait_for(timeout=60_000)
    assert page.locator(".check-line.error, .check-line.skipped").count() == 0
    assert page.get_by_text("2 per rank x 1 rank x 1 accumulated = 2").count() == 1
    assert "--toy_depth=2" in page.locator(".code code").first.inner_text()
    page.get_by_role("button", name="Start now").click()
    page.wait_for_url("**/launch/started/*")
    (launch,) = Store(served.settings).all()
    assert Queue(served.settings).reason(launch.request, local_devices()), "its directory is in use"
    served.stop()
    while launch.process.alive():
        time.sleep(0.1)
    run = RunDirectory(root / "runs" / "tiny")
    assert (run.status().condition, run.latest("step").step) == ("finished", 3)
    assert "trained 3 steps" in Store(served.settings).log(launch.id).read_text()
