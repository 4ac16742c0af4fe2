"""Screenshots of the pages for the documentation: `python plugins/webui/screenshots.py docs/web`, in the repository.

It trains a small model as in examples/emoji for some hundred steps, starts `smalti ui`, and needs Chromium and playwright.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from smalti_webui.configs.drafts import drafts_of
from smalti_webui.server.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
EMOJI = ROOT / "examples/emoji"
COLOURS = 256
STEP = 130
"""The run is shown at this step, after two validations."""
TRAIN = (
    *("--num_processes=1", "--no_fsdp_enable", "--train_batch_size=4", "--toy_width=64", "--max_train_steps=300"),
    *("--validation_step_interval=50", "--validation_num_inference_steps=8", "--checkpoint_step_interval=50"),
)

CONFIG = """model_family = "toy"
toy_width = 3072
toy_depth = 28
toy_heads = 16
output_dir = "runs/large"
instance_data_dir = "faces"
resolution = 64
train_batch_size = 8
gradient_checkpointing = true
max_train_steps = 10_000
fsdp_enable = true
num_processes = 8
"""
"""A model that is planned and not trained. Those of diffusers need the network."""
SHORTEN = """home => {
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(home, "~");
}"""


def main(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, EMOJI / "prepare.py", folder / "faces"], check=True)
        data, runs = f"--instance_data_dir={folder / 'faces'}", folder / "runs"
        run = smalti("train", str(EMOJI / "config.toml"), *TRAIN, data, f"--output_dir={runs / 'faces'}", cwd=folder)
        try:
            runs.mkdir(exist_ok=True)
            settings = Settings(roots=(runs,), data=folder / "data/smalti/ui")
            draft = drafts_of(settings).new(CONFIG, name="large").id
            server = smalti("ui", str(runs), "--port=0", "--no_open", "--json", cwd=folder, stdout=subprocess.PIPE)
            assert server.stdout is not None
            link = json.loads(server.stdout.readline())["url"]
            take(link, draft, folder, target)
        finally:
            for process in (run, server):
                process.terminate()
                process.wait(60)


def smalti(*arguments: str, cwd: Path, **streams: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "XDG_DATA_HOME": str(cwd / "data"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "smalti", *arguments], cwd=cwd, env=environment, text=True, **streams)


def wait_for(directory: Path, step: int) -> str:
    """Wait until the run has made this step; its id."""
    events = directory / "events.jsonl"
    while not events.exists() or f'"step":{step},' not in events.read_text().replace(" ", ""):
        time.sleep(0.5)
    return str(json.loads((directory / "run.json").read_text())["id"])


def take(link: str, draft: str, home: Path, target: Path) -> None:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 860}, base_url=link.partition("/runs")[0])
        page.goto(link)
        identity = wait_for(home / "runs" / "faces", STEP)
        page.goto(f"/runs/{identity}")
        shoot(page, target / "watch.png", home)
        page.goto(f"/configs/{draft}")
        shoot(page, target / "configure.png", home)
        page.goto(f"/hardware/{draft}")
        page.get_by_label("Device", exact=True).select_option("h100-80g")
        page.get_by_label("Number of devices").fill("8")
        page.get_by_role("button", name="Plan", exact=True).click()
        page.locator("#plan table").first.wait_for(timeout=300_000)
        page.evaluate("document.querySelector('#plan').closest('section').scrollIntoView()")
        shoot(page, target / "plan.png", home)
        browser.close()


def shoot(page: Any, path: Path, home: Path) -> None:
    """Write what is visible, in few colours, so that the file is small. The folder `home` is shown as ~."""
    page.wait_for_timeout(1500)
    page.evaluate(SHORTEN, str(home))
    with Image.open(BytesIO(page.screenshot())) as image:
        image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
