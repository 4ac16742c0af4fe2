"""docs/architecture.md tells the way from the command to the optimizer as it is."""

import json
import re
import subprocess
import sys

import pytest
from PIL import Image

MOST_FILES = 9
ENTRY = "cli/entry.py"
"""Where every command begins."""
WATCHED = """
import json, sys, traceback
from pathlib import Path
import smalti.cli.entry
from torch.optim.optimizer import register_optimizer_step_pre_hook

folder, base = Path(sys.argv[1]), f"{Path(smalti.__file__).parent}/"
told, entered, stack = set(map(tuple, json.loads(sys.argv[2]))), [], []

def enter(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(base):
        place = (frame.f_code.co_filename.removeprefix(base), frame.f_code.co_qualname)
        if place in told and place not in entered:
            entered.append(place)

def note(*arguments):
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(None)]
    stack[:] = [name.removeprefix(base) for name in reversed(files) if name.startswith(base)]

register_optimizer_step_pre_hook(note)
sys.setprofile(enter)
try:
    smalti.cli.entry.main(["train", *sys.argv[3:]])
finally:
    sys.setprofile(None)
    (folder / "seen.json").write_text(json.dumps([entered, list(dict.fromkeys(stack))]))
"""


@pytest.fixture(scope="module")
def page(root) -> str:
    return (root / "docs" / "architecture.md").read_text(encoding="utf-8")


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its head."""
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("|---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def told(page: str) -> list[tuple[str, str]]:
    """File and function of each row of the way."""
    found = []
    for number, (place, file, function, _) in enumerate(rows(page, "From the command to the optimizer"), start=1):
        [(name, path)] = re.findall(r"\[`(.+)`\]\(\.\./core/src/smalti/(.+)\)", file)
        assert (place, name) == (str(number), path)
        found.append((path, function.strip("`")))
    return found


def test_a_run_of_one_process_goes_the_way_that_is_told(page, tmp_path):
    way = told(page)
    assert len(way) <= MOST_FILES
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / "photos/0.png")
    (tmp_path / "photos/0.txt").write_text("nothing")
    words = (
        *("--model_family=toy", f"--instance_data_dir={tmp_path}/photos", f"--output_dir={tmp_path}/run", "--use_cpu"),
        *("--resolution=16", "--resolution_type=pixel", "--max_train_steps=1", "--num_processes=1", "--without=plots"),
    )
    command = [sys.executable, "-c", WATCHED, str(tmp_path), json.dumps(way), *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    entered, stack = json.loads((tmp_path / "seen.json").read_text())
    assert list(map(tuple, entered)) == way
    assert set(stack) - {file for file, _ in way} <= {ENTRY}
