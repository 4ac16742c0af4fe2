"""A pipe, a socket or a device where a file belongs ends a command at once, with what is wrong."""

import os
import shutil
import socket
from pathlib import Path

import pytest
from PIL import Image

from support.commands import commands


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, where the path of a socket is short enough."""
    monkeypatch.chdir(tmp_path)
    images = tmp_path / "images"
    images.mkdir()
    Image.new("RGB", (64, 64)).save(images / "a.png")
    (images / "a.txt").write_text("a")
    return tmp_path


def put(kind: str, path: Path) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)


@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
def test_what_is_no_file_is_refused_as_any_file_of_a_run(folder, capsys, kind):
    call = commands(capsys, "train")
    common = ("--model_family=toy", "--output_dir=run", "--max_train_steps=1", "--resolution=64", "--dry-run")
    for name in ("c.toml", "d.json", "p.json"):
        put(kind, folder / name)
    for words in (
        ["c.toml"],
        ["--data_backend_config=d.json"],
        ["--instance_data_dir=images", "--validation_prompt_library=p.json"],
    ):
        code, _, told = call(*words, *common)
        assert (code, "cannot" in told, "fix:" in told) == (2, True, True), (words, told)


def test_a_pipe_in_a_checkpoint_is_a_damaged_checkpoint(folder, capsys):
    options = ("--model_family=toy", "--instance_data_dir=images", "--resolution=64", "--use_cpu")
    call = commands(capsys, "train")
    assert call(*options, "--output_dir=run", "--max_train_steps=1")[0] == 0
    for name in ("manifest.json", "state.json", "model/rank-00000-part-00000.safetensors"):
        shutil.rmtree("again", ignore_errors=True)
        shutil.copytree("run", "again")
        file = folder / "again/checkpoints/step-00000001" / name
        file.unlink()
        os.mkfifo(file)
        code, _, told = call(*options, "--output_dir=again", "--max_train_steps=2", "--dry-run")
        assert (code, f"{name} is not a regular file" in told) == (8, True), told
