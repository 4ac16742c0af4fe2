"""`smalti hub push` and runs that publish, against a server that speaks the Hub's protocol."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from support.forked_popen import ForkedPopen, run_forked
from support.hub_server import READ_TOKEN, TOKEN, HubServer, hub_server
from support.images import images_in

MODEL = "model.safetensors"
TOY = (
    "--model_family=toy",
    "--toy_width=16",
    "--toy_depth=1",
    "--toy_heads=1",
    "--resolution=32",
    "--aspect_bucket_alignment=8",
    "--train_batch_size=2",
    "--mixed_precision=no",
    "--use_cpu",
)


@pytest.fixture
def hub():
    with hub_server() as server:
        yield server


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return images_in(tmp_path_factory.mktemp("photos"), 4, caption="a square")


@pytest.fixture
def exported(tmp_path) -> Path:
    folder = tmp_path / "style lora"
    folder.mkdir()
    save_file({"weight": torch.rand(64, 64)}, folder / MODEL)
    (folder / "config.json").write_text("{}")
    return folder


def environment(hub: HubServer, home: Path, token: str | None = TOKEN) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "SMALTI_PLUGINS": "toy,hub"}
    return found | own | ({"HF_TOKEN": token} if token else {})


def smalti(hub, home, *arguments, token=TOKEN):
    command = [sys.executable, "-m", "smalti", *map(str, arguments)]
    return run_forked(command, env=environment(hub, home, token), timeout=300)


def test_an_export_arrives_as_it_is_in_a_private_repository_and_is_not_sent_twice(hub, exported, tmp_path):
    done = smalti(hub, tmp_path, "hub", "push", exported, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["repository"] == "ann/style-lora"
    assert hub.private == {"ann/style-lora": True}
    assert hub.repositories["ann/style-lora"] == {path.name: path.read_bytes() for path in exported.iterdir()}
    assert smalti(hub, tmp_path, "hub", "push", exported).returncode == 0
    assert hub.sent("PUT", "/lfs/") == 1


def test_an_upload_that_broke_off_is_continued_by_the_same_command(hub, exported, tmp_path):
    hub.fail("POST", "/commit/", 403)
    done = smalti(hub, tmp_path, "hub", "push", exported, "--to=ann/style", "--public")
    assert (done.returncode, hub.commits, hub.private["ann/style"]) == (2, [], False)
    assert "403" in done.stderr
    assert "fix: use a token that may write there" in done.stderr
    hub.fail("PUT", "/lfs/", 500)
    assert smalti(hub, tmp_path, "hub", "push", exported, "--to=ann/style").returncode == 0
    assert hub.sent("PUT", "/lfs/") == 1
    assert len(hub.repositories["ann/style"]) == 2


def test_the_index_of_a_modular_pipeline_says_that_its_parts_are_in_the_repository(hub, tmp_path):
    folder, nowhere = tmp_path / "modular", {"pretrained_model_name_or_path": None, "revision": None}
    (folder / "vae").mkdir(parents=True)
    save_file({"weight": torch.rand(2)}, folder / "vae" / MODEL)
    elsewhere = ["transformers", "T5Tokenizer", {**nowhere, "pretrained_model_name_or_path": "bob/t5"}]
    index = {"_class_name": "AnimaModularPipeline", "vae": ["diffusers", "VAE", nowhere], "tokenizer": elsewhere}
    (folder / "modular_model_index.json").write_text(json.dumps(index))
    done = smalti(hub, tmp_path, "hub", "push", folder, "--to=ann/style")
    assert done.returncode == 0, done.stderr
    pushed = json.loads(hub.repositories["ann/style"]["modular_model_index.json"])
    index["vae"] = ["diffusers", "VAE", {**nowhere, "pretrained_model_name_or_path": "ann/style"}]
    assert pushed == index


def test_errors_of_the_server_are_retried(hub, exported, tmp_path):
    hub.fail("PUT", "/lfs/", 500)
    hub.fail("POST", "objects/batch", 503)
    done = smalti(hub, tmp_path, "hub", "push", exported, "--to=ann/style")
    assert done.returncode == 0, done.stderr
    assert (len(hub.commits), hub.sent("PUT", "/lfs/")) == (1, 2)


def test_a_card_that_its_author_wrote_is_kept_and_ours_is_renewed(hub, exported, tmp_path):
    card = exported / "README.md"
    card.write_text("first <!-- This card was written by smalti. -->")
    assert smalti(hub, tmp_path, "hub", "push", exported, "--to=ann/style").returncode == 0
    card.write_text("second <!-- This card was written by smalti. -->")
    assert smalti(hub, tmp_path, "hub", "push", exported, "--to=ann/style").returncode == 0
    assert hub.repositories["ann/style"]["README.md"].startswith(b"second")
    hub.repositories["ann/style"]["README.md"] = b"mine"
    done = smalti(hub, tmp_path, "hub", "push", exported, "--to=ann/style")
    assert "the model card on the Hub was kept" in done.stderr
    assert hub.repositories["ann/style"]["README.md"] == b"mine"


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (None, "there is no token for the Hugging Face Hub"),
        (READ_TOKEN, "the token for the Hugging Face Hub may only read"),
        ("hf_unknown", "the Hub refused the token: 401"),
    ],
)
def test_a_run_that_may_not_publish_is_refused_before_it_starts(hub, photos, tmp_path, token, expected):
    words = ("train", *TOY, f"--instance_data_dir={photos}", f"--output_dir={tmp_path / 'run'}", "--push_to_hub", "--dry-run")
    done = smalti(hub, tmp_path, *words, token=token)
    assert done.returncode == 2
    assert expected in done.stderr
    assert hub.repositories == {}


def train(hub, home, photos, directory, *words):
    return smalti(hub, home, "train", *TOY, f"--instance_data_dir={photos}", f"--output_dir={directory}", *words)


def test_a_run_publishes_its_checkpoints_and_its_end(hub, photos, tmp_path):
    directory = tmp_path / "cat run"
    options = ("--max_train_steps=4", "--checkpoint_step_interval=2", "--push_to_hub", "--push_checkpoints_to_hub")
    done = train(hub, tmp_path, photos, directory, *options)
    assert done.returncode == 0, done.stderr
    assert hub.commits[-1] == "Step 4", done.stderr
    assert set(hub.commits) <= {"Step 2", "Step 4"}
    files = hub.repositories["ann/cat-run"]
    assert files.keys() >= {"config.json", "diffusion_pytorch_model.safetensors"}
    assert json.loads((directory / "hub" / "published.json").read_text())["step"] == 4
    assert not list((directory / "hub").glob("export-*"))


def test_a_failed_upload_leaves_the_run_as_it_is_and_says_how_to_repeat_it(hub, photos, tmp_path):
    hub.fail("POST", "/commit/", 403, times=100)
    directory = tmp_path / "run"
    done = train(hub, tmp_path, photos, directory, "--max_train_steps=2", "--push_to_hub", "--hub_model_id=ann/style")
    assert done.returncode == 0, done.stderr
    command = f"smalti hub push {directory} --to=ann/style"
    assert f"fix: {command}" in done.stderr
    hub.recover()
    again = smalti(hub, tmp_path, *command.split()[1:])
    assert again.returncode == 0, again.stderr
    assert hub.commits == ["Step 2"]


def test_a_run_that_is_stopped_does_not_wait_for_an_upload(hub, photos, tmp_path):
    hub.fail("POST", "/api/repos/create", 503, times=1000)  # huggingface_hub tries again for a while
    directory = tmp_path / "run"
    words = ("--max_train_steps=100000", "--checkpoint_step_interval=100", "--push_to_hub", "--push_checkpoints_to_hub")
    command = [sys.executable, "-m", "smalti", "train", *TOY, f"--instance_data_dir={photos}", f"--output_dir={directory}"]
    run = ForkedPopen([*command, *words], env=environment(hub, tmp_path), stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 240
        while not hub.sent("POST", "/api/repos/create"):
            assert time.monotonic() < until
            assert run.poll() is None
            time.sleep(0.1)
        run.send_signal(signal.SIGTERM)
        _, errors = run.communicate(timeout=240)
    finally:
        run.kill()
    assert run.returncode == 6, errors
    assert not list((directory / "hub").glob("export-*"))
