"""The loss of each training image at each visit: kept once, whatever happens to the run, and what it says."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from smalti import Visits
from smalti.config.resolution import resolve
from smalti.launch.preflight import Preparation
from smalti.launch.rank import run_rank
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.schema import schema_of
from smalti.rundir import RunDirectory
from smalti_validation.command import report
from smalti_validation.learning import read_learning
from smalti_validation.visits import FOLDER, NOISE_LEVELS, RECORD, Share, VisitFile, image_number, read_visits, truncate
from support.forked_popen import ForkedPopen
from support.forked_ranks import forked_processes

FLAGS = (
    *("--model_family=toy", "--toy_width=32", "--toy_depth=2", "--toy_heads=2", "--resolution=16", "--resolution_type=pixel"),
    *("--mixed_precision=no", "--use_cpu", "--caption_strategy=filename", "--lr_scheduler=constant", "--lr_warmup_steps=0"),
)
PLUGINS = ("fsdp2", "toy", "validation", "visits")
ODD = "square 5 of 8.png"
"""The image of noise among images of one colour."""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A folder `photos` with eight images, two of them of another shape."""
    root = tmp_path_factory.mktemp("visits")
    (root / "photos").mkdir()
    for number in range(8):
        name, size = f"square {number} of 8.png", (32, 32) if number < 6 else (48, 24)
        plain = Image.new("RGB", size, (100 + number, 120, 110))
        (Image.effect_noise(size, 90).convert("RGB") if name == ODD else plain).save(root / "photos" / name)
    return root


def given(directory: Path, *flags: str) -> list[str]:
    photos = directory.parent / "photos"
    return [*FLAGS, f"--output_dir={directory}", f"--instance_data_dir={photos}", *flags]


def configured(directory: Path, *flags: str):
    plugins = load_plugins(Selection(only=PLUGINS, without=("console",)))
    return resolve(schema_of(plugins), given(directory, *flags), environment={}), plugins


def train(directory: Path, *flags: str) -> Path:
    assert Preparation.of(*configured(directory, *flags), write=True).launch() == 0
    return directory


def train_as_rank(directory: Path, *flags: str) -> None:
    run_rank(*configured(directory, *flags))


def kept(directory: Path) -> np.ndarray:
    """The records of all visits, by their numbers, of which each is there once."""
    parts = [(numbers, records) for numbers, _, records in read_visits(directory / FOLDER)]
    numbers, records = (np.concatenate(each) for each in zip(*parts, strict=True))
    assert len(set(numbers.tolist())) == len(numbers)
    assert sorted(numbers.tolist()) == list(range(len(numbers)))
    return records[np.argsort(numbers)]


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    """Images and noise levels are the same, losses but for the rounding of sums over other batches."""
    assert found["image"].tolist() == expected["image"].tolist()
    assert found["noise"].tolist() == expected["noise"].tolist()
    np.testing.assert_allclose(found["loss"].astype(float), expected["loss"].astype(float), rtol=5e-3)


@pytest.fixture(scope="module")
def alone(root) -> Path:
    return train(root / "alone", "--train_batch_size=2", "--gradient_accumulation_steps=2", "--max_train_steps=12")


def test_each_visit_is_kept_with_its_image_and_noise_level(alone):
    records = kept(alone)
    assert len(records) == 4 * 12
    names = {image_number(f"photos/square {number} of 8.png") for number in range(8)}
    assert set(records["image"].tolist()) == names
    assert len(set(records["noise"].tolist())) > 40
    steps = [json.loads(line) for line in (alone / "events.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in steps if event["type"] == "step"]
    means = records["loss"].astype(float).reshape(-1, 4).mean(1)
    np.testing.assert_allclose(means[[0, -1]], [losses[0], losses[-1]], rtol=1e-3)


@pytest.mark.parametrize("strategy", [(), ("--fsdp_enable",)], ids=["ddp", "fsdp2"])
def test_two_ranks_keep_what_one_keeps(root, alone, strategy):
    together = root / f"together{len(strategy)}"
    flags = ("--train_batch_size=1", "--gradient_accumulation_steps=2", "--max_train_steps=12", "--num_processes=2", *strategy)
    with forked_processes(group=False) as pair:
        pair.run(train_as_rank, together, *flags)
    assert sorted(path.name for path in together.glob("visits/2x1x2/*")) == ["0.bin", "1.bin"]
    assert_same(kept(together), kept(alone))


def test_a_run_that_was_killed_and_goes_on_with_other_batches_keeps_each_visit_once(root, alone):
    directory = root / "killed"
    flags = ("--train_batch_size=2", "--gradient_accumulation_steps=2", "--checkpoint_step_interval=4")
    command = [sys.executable, "-m", "smalti", "train", *given(directory, *flags, "--max_train_steps=100000")]
    environment = {**os.environ, "SMALTI_PLUGINS": ",".join(PLUGINS)}
    process = ForkedPopen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    file, until = directory / "visits" / "1x2x2" / "0.bin", time.monotonic() + 120
    while not (file.exists() and file.stat().st_size > 10 * 4 * RECORD.itemsize):
        assert time.monotonic() < until
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    for late in sorted((directory / "checkpoints").glob("step-*"))[1:]:  # it may have come further
        shutil.rmtree(late)
    assert file.stat().st_size > 4 * 4 * RECORD.itemsize
    train(directory, "--train_batch_size=4", "--max_train_steps=12")
    assert file.stat().st_size == 4 * 4 * RECORD.itemsize, "cut where the run goes on"
    assert_same(kept(directory), kept(alone))


def test_a_step_that_was_skipped_is_not_kept(root):
    records = kept(train(root / "skipped", "--train_batch_size=4", "--max_train_steps=1"))
    file = VisitFile(root / "written", Share(ranks=1, micro_batch=4, accumulation=1), 0)
    visits = Visits(numbers=range(8, 12), keys="abcd", fractions=[0.0, 1e-9, 0.5, 1.0], losses=[1.0, float("nan"), 1e9, 2.0])
    file.write(visits, 4)
    file.close()
    [(numbers, positions, found)] = read_visits(root / "written")
    assert (numbers.tolist(), positions.tolist()) == ([8, 10, 11], [2, 2, 2]), "nothing of the two steps before"
    assert found["loss"].tolist() == [1.0, 65504.0, 2.0]
    assert found["noise"].tolist() == [1, 32768, NOISE_LEVELS]
    assert len(records) == 4


def test_places_of_ranks_interleave_as_the_loader_deals_out():
    share = Share(ranks=2, micro_batch=2, accumulation=2)
    assert share.numbers(0, 0, 8).tolist() == [0, 1, 4, 5, 8, 9, 12, 13]
    assert share.numbers(1, 3, 3).tolist() == [7, 10, 11]


def test_a_full_disk_ends_the_keeping_and_not_the_run(root, caplog):
    (root / "full").mkdir()
    (root / "full" / FOLDER).write_text("no folder")
    train(root / "full", "--train_batch_size=4", "--max_train_steps=2")
    assert caplog.text.count("the losses of visits are not kept by this rank") == 1


# --- what they say --------------------------------------------------------------------------------------------------


def written(directory: Path, losses, images, noise) -> RunDirectory:
    """A run with visits, one in each step."""
    file = VisitFile(directory / FOLDER, Share(ranks=1, micro_batch=1, accumulation=1), 0)
    for number, (loss, image, level) in enumerate(zip(losses, images, noise, strict=True)):
        file.write(Visits(numbers=[number], keys=[str(image)], fractions=[level], losses=[loss]), 1)
    file.close()
    return RunDirectory(directory)


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """8000 visits of 20 images: 0 and 1 are worse by 20 and 10 %, 19 better by 15 %; the loss falls at low noise alone."""
    chance = np.random.default_rng(0)
    images, noise, time = chance.integers(0, 20, 8000), chance.uniform(0.01, 1, 8000), np.linspace(0, 1, 8000)
    factors = np.array([1.2, 1.1, *[1.0] * 17, 0.85])[images] * chance.normal(1, 0.2, 8000)
    losses = (2.0 / (0.1 + noise) - np.where(noise < 0.2, time, 0)) * factors
    directory = written(tmp_path_factory.mktemp("said") / "run", losses, images, noise)
    return directory, losses, images, noise, read_learning(directory, {300: 4001, 500: 7900})


def test_images_are_compared_at_their_noise_levels(said):
    _, _, images, _, learning = said
    assert (learning.visits, learning.count, len(learning.least)) == (8000, 20, 20)
    assert [each.key for each in learning.least[:2]] == [f"{image_number(name):08x}" for name in ("0", "1")]
    assert learning.most[0].key == f"{image_number('19'):08x}"
    worst = learning.least[0]
    assert worst.visits == (images == 0).sum()
    assert worst.first == pytest.approx(1.2, abs=0.06)
    assert worst.last == pytest.approx(1.2, abs=0.06)
    assert 0.01 < worst.interval < 0.06


def test_levels_have_the_loss_of_the_beginning_and_of_the_end(said):
    _, losses, _, noise, learning = said
    assert [each.timestep for each in learning.levels] == [100, 300, 500, 700, 900]
    low, second, third, *_ = learning.levels
    end = slice(7200, None)
    assert low.last == pytest.approx(losses[end][noise[end] < 0.2].mean(), rel=0.05)
    assert sum(each.visits for each in learning.levels) == 8000
    assert (low.change.since, low.change.improves) == (1, True)
    assert low.change.loss == pytest.approx(-0.9, abs=0.3)
    assert (second.change.since, second.change.improves, second.change.worsens) == (4001, False, False)
    assert third.change is None, "its best step is in the last tenth"


def test_a_visit_that_was_cut_does_not_count(said, tmp_path):
    shutil.copytree(said[0].path, tmp_path / "run")
    truncate(tmp_path / "run" / FOLDER, 100)
    found = read_learning(RunDirectory(tmp_path / "run"), {})
    assert found.visits == 100
    truncate(tmp_path / "run" / FOLDER, 0)
    assert read_learning(RunDirectory(tmp_path / "run"), {}) is None


def test_a_run_of_ten_steps_has_a_first_and_a_last_tenth(tmp_path):
    found = read_learning(written(tmp_path / "short", range(10, 0, -1), "ab" * 5, [0.5] * 10), {})
    [level] = found.levels
    assert (level.first, level.last, level.change) == (10, 1, None)
    assert [(image.visits, image.first > image.last) for image in found.least] == [(5, True), (5, True)]
    one = read_learning(written(tmp_path / "one", [1.0], "a", [0.5]), {})
    assert (one.count, one.least[0].interval) == (1, None)


def test_a_run_that_trains_meanwhile_is_read_as_it_was(said, tmp_path, monkeypatch):
    shutil.copytree(said[0].path, tmp_path / "run")
    truncate(tmp_path / "run" / FOLDER, 4000)
    directory = RunDirectory(tmp_path / "run")
    expected = read_learning(directory, {})

    def read(folder):
        yield from read_visits(folder)
        file = VisitFile(folder, Share(ranks=1, micro_batch=1, accumulation=1), 0)
        file.write(Visits(numbers=[4000], keys=["new"], fractions=[0.5], losses=[9.0]), 1)
        file.close()

    monkeypatch.setattr("smalti_validation.learning.read_visits", read)
    assert read_learning(directory, {}) == expected


def test_an_image_of_noise_is_learned_least_and_named(root):
    directory = train(root / "odd", "--train_batch_size=4", "--max_train_steps=150", "--learning_rate=3e-3")
    output = CliRunner().invoke(report, [str(directory)], catch_exceptions=False).output
    assert "600 visits of training images; 8 images in the second half of the run\n" in output
    assert output.splitlines()[output.splitlines().index("") + 2].startswith(f"photos: {ODD} ")
    content = json.loads(CliRunner().invoke(report, [str(directory), "--json"], catch_exceptions=False).output)["training"]
    first = content["least"][0]
    assert (first["dataset"], first["key"], content["unnamed"]) == ("photos", ODD, "")
    assert first["last"] - first["interval"] > 1.5
    assert len(content["least"]) == len(content["most"]) == 8
    (directory / "data" / "photos.arrow").unlink()
    unnamed = CliRunner().invoke(report, [str(directory)], catch_exceptions=False).output
    assert "images without a name: " in unnamed
    assert f"{image_number(f'photos/{ODD}'):08x}" in unnamed
