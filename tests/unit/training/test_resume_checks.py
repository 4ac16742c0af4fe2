"""What of a run may change between a checkpoint and the run that resumes from it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from smalti.config.config import Config
from smalti.data.from_options import scan_data, total_steps
from smalti.data.prepared import PreparedData
from smalti.data.scan.changes import keep
from smalti.data.scan.identity import Identity, first_digest
from smalti.errors import CheckpointError, PreflightError
from smalti.plugins.registry import Plugins
from smalti.training.resume import check_adapter
from smalti.training.resume_checks import Resumption, check_resumable

FIRST_DIGEST = "47f49a90682c2fa2937d090e72178c6203b593d175ded3824c20c1cefda7eb8a"
"""Of the images below, as checkpoints held it that were written at bb9dd29."""


def image(path: Path, red: int, size: tuple[int, int] = (32, 32), caption: str | None = None) -> None:
    Image.new("RGB", size, (red, 0, 0)).save(path)
    path.with_suffix(".txt").write_text(caption or f"number {path.stem}")


class Project:
    """A folder of images, and a run that trains on it."""

    def __init__(self, place: Path, configure: Callable[..., Config], plugins: Plugins) -> None:
        self.images, self.run = place / "images", place / "run"
        self._configure, self._plugins = configure, plugins
        self.images.mkdir()
        for number in range(8):
            image(self.images / f"{number}.png", 20 * number, (32, 32) if number < 6 else (48, 24))

    def config(self, *flags: str) -> Config:
        words = (f"--instance_data_dir={self.images}", f"--output_dir={self.run}", "--resolution=16", "--train_batch_size=2")
        return self._configure(*words, "--model_family=toy", "--max_train_steps=1", "--use_cpu", *flags)

    def scan(self, *flags: str) -> PreparedData:
        """The data as they are now, which brings the run's index up to date."""
        return scan_data(self.config(*flags), self._plugins, 8, self.run / "data")

    def train(self) -> dict[str, object]:
        """Begin a run; what its checkpoints say."""
        data = self.scan()
        keep(data.identity, data.indexes, self.run / "data")
        return {"step": 3, "effective_batch": 2, "seed": 42, "data": data.identity.as_json()}

    def resume(self, trainer: dict[str, object], *flags: str) -> Resumption:
        source = self.run / "checkpoints/step-00000003"
        return check_resumable(trainer, self.config(*flags), self.scan(*flags), source)


@pytest.fixture
def project(tmp_path: Path, configure: Callable[..., Config], plugins: Plugins) -> Project:
    return Project(tmp_path, configure, plugins)


def touch(folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, (1, 1))


def replace(folder: Path) -> None:
    for number in (1, 2, 3):
        image(folder / f"{number}.png", 200 + number)


def caption(folder: Path) -> None:
    (folder / "0.txt").write_text("something else")
    (folder / "7.txt").write_text("number 7\nand more")


def resize(folder: Path) -> None:
    image(folder / "4.png", 80, (33, 32))  # in the same bucket


def add(folder: Path) -> None:
    image(folder / "5a.png", 1)
    image(folder / "8.png", 1)


def rename(folder: Path) -> None:
    for suffix in (".png", ".txt"):
        (folder / f"0{suffix}").rename(folder / f"9{suffix}")


def spoil(folder: Path) -> None:
    (folder / "0.png").write_bytes(b"no image")


CHANGES = [
    (touch, (), False),
    (replace, ("3 images have other content, first: 1.png",), False),
    (caption, ("2 captions changed, first: 0.png",), False),
    (resize, ("1 image size changed, first: 4.png",), False),
    (add, ("2 images were added, first: 5a.png",), True),
    (rename, ("1 image was added, first: 9.png", "1 image was removed, first: 0.png"), True),
    (spoil, ("1 image can no longer be used, first: 0.png",), True),
]


@pytest.mark.parametrize(("change", "told", "reordered"), CHANGES, ids=[change.__name__ for change, _, _ in CHANGES])
def test_what_has_changed_in_the_data_is_counted_and_named(
    project: Project, change: Callable[[Path], None], told: tuple[str, ...], reordered: bool
) -> None:
    trainer = project.train()
    change(project.images)
    project.scan()  # the index is brought up to date more than once before the comparison

    assert project.resume(trainer, "--on_changed_data=continue") == Resumption(changes=told, reordered=reordered)
    if told:
        with pytest.raises(CheckpointError, match=f"the data have changed: {'; '.join(told)}\n.*--on_changed_data=continue"):
            project.resume(trainer)
    else:
        assert project.resume(trainer) == Resumption()


def test_all_changes_are_told_at_once(project: Project) -> None:
    trainer = project.train()
    for change in (replace, caption, resize):
        change(project.images)

    assert project.resume(trainer, "--on_changed_data=continue").changes == (
        "1 image size changed, first: 4.png",
        "3 images have other content, first: 1.png",
        "2 captions changed, first: 0.png",
    )


def test_a_change_is_noticed_also_where_the_record_of_the_run_is_gone(project: Project) -> None:
    trainer = project.train()
    shutil.rmtree(project.run / "data/trained")
    assert project.resume(trainer) == Resumption()
    caption(project.images)

    with pytest.raises(CheckpointError, match="images or captions changed; which ones is not recorded here"):
        project.resume(trainer)


def test_other_crops_are_a_change_where_the_order_stays_and_other_buckets_always(project: Project) -> None:
    trainer = project.train()
    with pytest.raises(
        CheckpointError, match="crop_style of dataset images was center, is now corner\n  fix: set crop_style=center, or"
    ):
        project.resume(trainer, "--crop_style=corner")
    with pytest.raises(CheckpointError, match=r"resolution of dataset images was 16\.0, is now 24\.0"):
        project.resume(trainer, "--resolution=24")


@pytest.mark.parametrize(
    ("key", "value"),
    [("flip_probability", 0.5), ("trigger_word", "zwx"), ("caption_shuffle", True), ("caption_filter_list", ["number"])],
)
def test_other_texts_and_mirrored_images_are_a_change(project: Project, tmp_path: Path, key: str, value: object) -> None:
    trainer = project.train()
    entries = tmp_path / "entries.json"
    entry: dict[str, object] = {"id": "images", "instance_data_dir": str(project.images)}
    flags = (f"--data_backend_config={entries}", "--instance_data_dir=")
    entries.write_text(json.dumps([{**entry, "caption_dropout_probability": 0.5}]))
    assert project.resume(trainer, *flags).changes == ()

    entries.write_text(json.dumps([{**entry, key: value}]))
    with pytest.raises(CheckpointError, match=f"{key} of dataset images was not set, is now .*\n  fix: set no {key}, or"):
        project.resume(trainer, *flags)


@pytest.mark.parametrize(
    ("was", "flags", "fix"),
    [
        (4, (), "--gradient_accumulation_steps=2 or --train_batch_size=4 or --num_processes=2"),
        (1, (), "--train_batch_size=1"),
        (6, ("--train_batch_size=4",), "--train_batch_size=6"),
        (3, ("--train_batch_size=1", "--num_processes=2"), "--num_processes=3"),
        (5, ("--train_batch_size=2", "--num_processes=2"), "choose a number of ranks that divides 5"),
        (
            6,
            ("--train_batch_size=4", "--gradient_accumulation_steps=4"),
            "--train_batch_size=1 --gradient_accumulation_steps=6",
        ),
    ],
)
def test_another_effective_batch_is_refused_with_the_values_that_restore_it(
    project: Project, was: int, flags: tuple[str, ...], fix: str
) -> None:
    trainer = {**project.train(), "effective_batch": was}
    with pytest.raises(CheckpointError) as caught:
        project.resume(trainer, *flags, "--allow_dataset_oversubscription")

    assert f"the effective batch was {was}, is now " in str(caught.value)
    assert f"fix: {fix}; or start a new run" in str(caught.value)
    assert "data have changed" not in str(caught.value)


def test_another_seed_is_refused_and_no_digest_is_shown(project: Project) -> None:
    trainer = {**project.train(), "effective_batch": 4}
    with pytest.raises(CheckpointError) as caught:
        project.resume(trainer, "--seed=43")

    assert "the effective batch was 4, is now 2 (1 rank x 2 x 1); the seed was 42, is now 43" in str(caught.value)
    assert "--seed=42" in str(caught.value)
    assert trainer["data"]["order"][:8] not in str(caught.value)  # type: ignore[index]


def test_a_checkpoint_of_an_earlier_version_is_resumed_from(project: Project) -> None:
    data = project.scan()
    trainer = {"step": 3, "effective_batch": 2, "seed": 42, "data": FIRST_DIGEST}
    assert first_digest(data.indexes, data.order, seed=42) == FIRST_DIGEST
    assert "not compared, as the checkpoint is of an earlier version" in project.resume(trainer, "--no_crop").notices[0]
    assert project.resume(trainer, "--crop_style=center", "--crop").changes == ()
    with pytest.raises(CheckpointError, match=r"crop of dataset images was false, .*, is now true\n  fix: set crop=false, or"):
        project.resume(trainer)
    with pytest.raises(CheckpointError, match=r"effective batch was 2, is now 3 \(1 rank x 3 x 1\)\n"):
        project.resume(trainer, "--train_batch_size=3", "--allow_dataset_oversubscription")
    add(project.images)

    with pytest.raises(CheckpointError, match="images were added, removed, renamed or resized"):
        project.resume(trainer)


def test_a_checkpoint_whose_digests_are_of_all_keys_is_resumed_from(project: Project) -> None:
    data = project.scan()
    earlier = Identity.earlier(data.indexes, data.order, data.settings)
    trainer = {"step": 3, "effective_batch": 2, "seed": 42, "data": earlier.as_json()}
    keep(earlier, data.indexes, project.run / "data")
    assert (earlier.version, "version" in earlier.as_json()) == (None, False)
    assert project.resume(trainer) == Resumption()
    add(project.images)

    assert project.resume(trainer, "--on_changed_data=continue").changes == ("2 images were added, first: 5a.png",)


def test_a_run_keeps_the_version_of_its_order(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    data = project.scan()
    earlier = Identity.earlier(data.indexes, data.order, data.settings).as_json()
    trainer = project.train()
    assert project.resume(trainer).version is None
    monkeypatch.setattr("smalti.data.order.LIMIT", 5)  # as if it had been too large for order 1 all along
    assert project.scan().order.version == 2

    assert project.resume(trainer).version == 1
    assert project.resume({**trainer, "data": earlier}).version == 1
    assert project.resume({**trainer, "data": FIRST_DIGEST}, "--no_crop").version == 1
    assert project.resume(project.train()) == Resumption()
    add(project.images)
    assert project.resume(trainer, "--on_changed_data=continue").version is None  # a new order anyway


def test_what_the_data_are_is_worked_out_once_in_a_run(project: Project) -> None:
    data = project.scan()
    assert data.identity is data.identity
    assert data.identity == project.scan().identity


def test_a_checkpoint_of_another_trainer_says_nothing_of_data(project: Project) -> None:
    assert project.resume({"step": 3}) == Resumption()


def test_indexes_are_compared_some_rows_at_a_time(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = project.train()
    for change in (replace, caption, resize, add):
        change(project.images)
    for suffix in (".png", ".txt"):
        (project.images / f"1{suffix}").unlink()
    whole = project.resume(trainer, "--on_changed_data=continue").changes
    for rows in (1, 2, 3):
        monkeypatch.setattr("smalti.data.scan.changes._ROWS", rows)
        assert project.resume(trainer, "--on_changed_data=continue").changes == whole
    assert (len(whole), whole[:2]) == (5, ("2 images were added, first: 5a.png", "1 image was removed, first: 1.png"))


def test_a_run_that_goes_on_after_its_last_dataset_is_refused(project: Project, tmp_path: Path) -> None:
    entry = {"id": "images", "instance_data_dir": str(project.images), "end_step": 3}
    (tmp_path / "data.json").write_text(json.dumps([entry]))
    config = project.config("--max_train_steps=4")
    data = project.scan(f"--data_backend_config={tmp_path}/data.json", "--instance_data_dir=")

    with pytest.raises(
        PreflightError, match="no dataset is trained on after step 3, and the run has 4\n  fix: --max_train_steps=3"
    ):
        total_steps(config, data)
    assert total_steps(project.config("--max_train_steps=3"), data) == 3


def test_what_a_dry_run_does_not_know_of_an_adapter_is_not_compared(tmp_path: Path) -> None:
    kept = {"adapter": {"rank": 4, "base": "3f2a"}}
    check_adapter({"rank": 4, "base": None}, kept, tmp_path)
    for other in ({"rank": 8, "base": None}, {"rank": 4, "base": "77aa"}, None):
        with pytest.raises(CheckpointError, match="another adapter"):
            check_adapter(other, kept, tmp_path)
    with pytest.raises(CheckpointError, match="another adapter"):
        check_adapter({"rank": 4, "base": None}, {}, tmp_path)
