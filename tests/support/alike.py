"""Whether two runs have trained the same, bit for bit."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


def losses(directory: Path) -> list[float]:
    events = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    return [event["loss"] for event in events if event["type"] == "step"]


def assert_alike(directory: Path, other: Path, step: int) -> None:
    """By the losses of all steps, and by the tensors of the checkpoint of this one."""
    assert losses(directory) == losses(other)
    folders = [each / "checkpoints" / f"step-{step:08}" for each in (directory, other)]
    files = [sorted(folder.glob("**/*.safetensors")) for folder in folders]
    assert [path.name for path in files[0]] == [path.name for path in files[1]] != []
    for one, another in zip(*files, strict=True):
        left, right = load_file(one), load_file(another)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)
