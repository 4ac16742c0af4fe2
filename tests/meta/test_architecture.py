"""docs/architecture.md tells the way from the command to the optimizer as it is."""

import os
import re
import sys
import traceback
from pathlib import Path
from types import FrameType

import pytest
from PIL import Image

from support.forked_ranks import forked_processes

MOST_FILES = 9
ENTRY = "cli/entry.py"
"""Where every command begins."""


def watched(way: list[tuple[str, str]], words: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """In a process of its own, `smalti train`: what of the way it has entered, in order, and the files that have led to a step.

    Those are all from which the optimizer was called, from the outermost on.
    """
    import torch.optim.optimizer as optimizers

    import smalti.cli.entry

    base, entered, stack = f"{Path(smalti.__file__).parent}/", [], []

    def enter(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(base):
            place = (frame.f_code.co_filename.removeprefix(base), frame.f_code.co_qualname)
            if place in way and place not in entered:
                entered.append(place)

    def note(*arguments: object) -> None:
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(None)]
        stack[:] = [name.removeprefix(base) for name in reversed(files) if name.startswith(base)]

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]  # with which it would be a rank that another launcher has started
    optimizers.register_optimizer_step_pre_hook(note)
    sys.setprofile(enter)
    with pytest.raises(SystemExit, match="0"):
        smalti.cli.entry.main(["train", *words])
    sys.setprofile(None)
    return entered, list(dict.fromkeys(stack))


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
    with forked_processes(ranks=1, group=False) as process:
        [(entered, stack)] = process.run(watched, way, list(words))
    assert entered == way
    assert set(stack) - {file for file, _ in way} <= {ENTRY}
