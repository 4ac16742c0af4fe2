"""A run in a real browser: started in a shell, watched, through a reload and a restart of the server, stopped and resumed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from smalti.rundir import RunDirectory, read_events

TOY = (
    *("--model_family=toy", "--toy_width=16", "--toy_depth=1", "--toy_heads=1", "--resolution=16", "--mixed_precision=no"),
    *("--caption_strategy=filename", "--use_cpu", "--preflight=off", "--memory_forecast=off"),
    "--log_interval=10",
)

PARTS = {"curve": "figure.chart", "numbers": "#numbers-title", "phases": "#phases-title"}


@pytest.fixture
def shell(root: Path, tmp_path: Path) -> Iterator[RunDirectory]:
    """A run of the toy family, started in a shell in the folder of the server, as long as nobody stops it."""
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(4):
        Image.new("RGB", (16, 16), (60 * number, 90, 200 - 40 * number)).save(photos / f"colour {number}.png")
    arguments = [*TOY, f"--instance_data_dir={photos}", "--output_dir=runs/toy", "--max_train_steps=1000000"]
    command = [sys.executable, "-m", "smalti", "train", *arguments]
    with (tmp_path / "console").open("wb") as console:
        process = subprocess.Popen(
            command,
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=console,
            stderr=console,
            start_new_session=True,
        )
    run = RunDirectory(root / "runs" / "toy")
    yield run
    heartbeat = run.heartbeat()
    for pid in {process.pid, heartbeat.process.pid if heartbeat and heartbeat.process else process.pid}:
        subprocess.run(["kill", "-9", str(pid)], check=False, capture_output=True)
    process.wait(20)


def test_a_run_is_watched_stopped_and_resumed(shell: RunDirectory, page: Any, served: Any, root: Path, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    expect.set_options(timeout=60_000)
    # It appears on the page that had no runs, with its progress and its loss.
    page.goto("/runs")
    row = page.locator("tr[data-key]")
    expect(row.get_by_text("toy", exact=True)).to_be_visible()
    expect(row.locator(".pill")).to_have_text("running")
    expect(row.locator(".run-number")).not_to_have_text("–")
    expect(row.locator("progress")).to_have_attribute("max", "1000000")
    # Its curves grow, also after a reload and after a restart of the server, without a gap and without a duplicate.
    page.get_by_role("link", name="toy", exact=True).click()
    page.get_by_role("link", name="Metrics").click()
    chart = page.locator("figure.chart").first
    grown(page)
    page.reload()
    grown(page)
    port = served.settings.port
    served.stop()
    again = type(served)((root,), tmp_path / "data", port)
    try:
        grown(page)
        # Stop by keyboard: the answer is shown, and the status changes.
        page.get_by_role("button", name="Finish the step, save a checkpoint and stop").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#toasts")).to_contain_text("Accepted: stopping after step")
        expect(page.locator("[data-condition]")).to_have_attribute("data-condition", "stopped")
        steps = [event.step or 0 for event in read_events(shell.events_file) if event.kind == "step"]
        last = steps[-1]
        expect(chart).to_have_attribute("data-last", str(last))
        counted = page.evaluate("() => fetch(document.getElementById('charts').dataset.series).then((answer) => answer.json())")
        assert sum(next(each["count"] for each in counted["series"] if each["name"] == "loss")) == len(steps)
        # Resumed from the page it continues; a second Ctrl-C ends it without another checkpoint.
        page.get_by_role("button", name="Start again from the latest checkpoint").click()
        expect(page.locator("[data-condition]")).to_have_attribute("data-condition", "running")
        page.wait_for_function(f"() => Number(document.querySelector('figure.chart').dataset.last) > {last}", timeout=60_000)
        page.get_by_role("button", name="Stop now…").click()
        page.get_by_role("button", name="Stop now", exact=True).click()
        expect(page.locator("[data-condition]")).to_have_attribute("data-condition", "failed")
    finally:
        again.stop()


def grown(page: Any) -> None:
    """Wait until the first chart has got more steps."""
    page.wait_for_selector("figure.chart[data-last]", timeout=60_000)
    before = page.evaluate("() => Number(document.querySelector('figure.chart').dataset.last)")
    page.wait_for_function(f"() => Number(document.querySelector('figure.chart')?.dataset.last) > {before}", timeout=60_000)


def test_the_overview_draws_the_loss_and_shows_new_images_as_they_come(make_run: Any, page: Any) -> None:
    from playwright.sync_api import expect

    run = make_run("alpha", steps=20, max_steps=50, samples=(10,), condition="running")
    record = run.record()
    page.goto(f"/runs/{record.id}")
    curve, images = page.locator("figure.chart"), page.locator(".newest img")
    expect(curve).to_have_attribute("data-last", "20", timeout=20_000)
    expect(images).to_have_count(2)
    assert images.first.evaluate("image => image.decode().then(() => image.naturalWidth)") == 64
    for place in PARTS.values():
        expect(page.locator(place)).to_be_visible()
    top = {name: page.locator(place).evaluate("part => part.getBoundingClientRect().top") for name, place in PARTS.items()}
    assert sorted(top, key=lambda name: top[name]) == ["curve", "numbers", "phases"]
    writer = make_run.writers["alpha"]
    writer.events.append("step", step=21, max_steps=50, loss=0.04, samples=4)
    make_run.sample(run, writer, 21, ("a dog",))
    expect(curve).to_have_attribute("data-last", "21", timeout=20_000)
    expect(page.locator(".newest")).to_contain_text("step 21")
    expect(images).to_have_count(1)
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    writer.close()


def test_the_table_is_updated_without_losing_focus_and_selection(make_run: Any, page: Any) -> None:
    from playwright.sync_api import expect

    for name in ("alpha", "beta", "gamma"):
        make_run(name, steps=5, max_steps=50, condition="running")
    page.goto("/runs")
    for name in ("alpha", "gamma"):
        page.get_by_label(f"Select {name} to compare").check()
    link = page.get_by_role("link", name="beta", exact=True)
    link.focus()
    writer = make_run.writers["beta"]
    writer.events.append("step", step=6, max_steps=50, loss=0.5, samples=4)
    make_run("delta")
    expect(page.locator("tr[data-key]", has_text="beta").locator(".bar-text")).to_have_text("6/50", timeout=20_000)
    expect(page.locator("tr[data-key]")).to_have_count(4)
    expect(link).to_be_focused()
    expect(page.get_by_label("Select gamma to compare")).to_be_checked()
    expect(page.locator("#selected")).to_have_text("2 runs selected.")
    page.keyboard.press("j")
    expect(page.get_by_label("Select alpha to compare")).to_be_focused()
    page.get_by_role("button", name="Compare").click()
    page.wait_for_url("**/compare?run=*&run=*")
    for each in make_run.writers.values():
        each.close()
