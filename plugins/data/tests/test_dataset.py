"""`smalti dataset`: what it reports, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image

from smalti.cli.arguments import CommandLine
from smalti.data import Loader, scan_data
from smalti.diffusion import SampleNoise
from smalti.errors import ConfigError, PreflightError
from smalti.launch.preflight import Preparation
from smalti.types import World
from smalti_data.dataset import dataset


@pytest.fixture
def config(tmp_path: Path) -> Path:
    folder = tmp_path / "pets"
    folder.mkdir()
    for number in range(10):
        Image.new("RGB", (16, 16)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a pet")
    (folder / "9.txt").unlink()
    path = tmp_path / "data.json"
    path.write_text(json.dumps([{"id": "pets", "instance_data_dir": str(folder)}]))
    return path


def run(*words: object) -> Result:
    return CliRunner().invoke(dataset, [str(word) for word in words])


def test_a_scan_counts_pictures_and_tells_what_is_wrong(config: Path) -> None:
    report = run("scan", "--data_backend_config", config).output

    assert "pets: 9 images, 1 unusable" in report
    assert "9.png: no caption: missing file 9.txt" in report


def test_a_scan_for_machines_is_json(config: Path) -> None:
    report = json.loads(run("scan", "--data-backend-config", config, "--json").output)

    assert report["datasets"][0]["quarantined"] == [{"key": "9.png", "reason": "no caption: missing file 9.txt"}]


@pytest.mark.parametrize("command", ["scan", "check", "buckets"])
def test_progress_is_printed_where_there_is_no_terminal_if_it_is_asked_for(config: Path, command: str) -> None:
    words = (command, "--data_backend_config", config, "--allow_dataset_oversubscription", "--data_error_budget=1", "--json")

    assert run(*words).stderr == ""
    assert run(*words, "--progress").stderr.endswith("pets: 10 of 10\n")


def test_a_scan_writes_into_a_run_directory_only_when_given_one(config: Path, tmp_path: Path) -> None:
    run("scan", "--data_backend_config", config)
    before = sorted(path.name for path in tmp_path.iterdir())
    run("scan", "--data_backend_config", config, "--output_dir", tmp_path / "run")

    assert before == ["data.json", "pets"]
    assert (tmp_path / "run/data/pets.arrow").exists()


def test_a_check_lists_buckets_and_batches(config: Path) -> None:
    words = ("--resolution", 16, "--aspect_bucket_alignment", 8, "--train_batch_size", 2)
    report = run("check", "--data_backend_config", config, *words).output

    assert "16x16" in report
    assert "effective batch 2, 4 batches in the first epoch" in report


def test_a_check_says_once_which_entries_of_caches_do_nothing(config: Path) -> None:
    entries = json.loads(config.read_text())
    entries += [{"id": "te", "dataset_type": "text_embeds"}, {"id": "ie", "dataset_type": "image_embeds"}]
    config.write_text(json.dumps(entries))
    report = run("check", "--data_backend_config", config, "--resolution", 16, "--aspect_bucket_alignment", 8).output

    assert report.count("without effect: te;") == 1


def test_a_check_that_fails_raises_what_the_command_line_turns_into_exit_code_3(config: Path) -> None:
    result = run("check", "--data_backend_config", config, "--train_batch_size", 4, "--num_processes", 8)

    assert isinstance(result.exception, PreflightError)


def test_a_check_with_oversubscription_passes(config: Path) -> None:
    words = ("--train_batch_size", 4, "--num_processes", 8, "--allow-dataset-oversubscription", "--json")
    report = json.loads(run("check", "--data_backend_config", config, *words).output)

    assert (report["effective_batch"], report["buckets"][0]["samples"]) == (32, 36)


def test_a_check_takes_the_words_of_train_and_answers_for_its_run(tmp_path: Path) -> None:
    """The toy family's buckets are multiples of 8, its patch."""
    for number, size in enumerate([(16, 16), (16, 16), (48, 24), (24, 48)]):
        Image.new("RGB", size).save(tmp_path / f"{number}.png")
    words = ("--model_family=toy", "--toy_patch=8", "--resolution=32", "--max_train_steps=10", "--use_cpu")
    (tmp_path / "run.toml").write_text('caption_strategy = "filename"\n')
    report = json.loads(run("check", tmp_path / "run.toml", *words, f"--instance_data_dir={tmp_path}", "--json").output)
    config = CommandLine.parse([str(tmp_path / "run.toml"), *words, f"--instance_data_dir={tmp_path}", "--output_dir=unused"])
    planned = Preparation.of(config.config(), config.plugins, write=False).describe()

    assert [(f"{one['width']}x{one['height']}", one["samples"]) for one in report["buckets"]] == [
        (one["size"], one["samples"]) for one in planned["buckets"]
    ]
    assert len(report["buckets"]) == 3


def test_a_check_without_a_family_says_what_it_takes_for_granted(config: Path) -> None:
    report = run("check", "--data_backend_config", config).output

    assert "note: --model_family is not given: assuming bucket sizes in multiples of 64" in report


def test_a_check_counts_images_without_a_caption(config: Path, tmp_path: Path) -> None:
    (tmp_path / "pets/8.png").write_bytes(b"no image")
    words = ("--data_backend_config", config, "--resolution", 16, "--aspect_bucket_alignment", 8, "--data_error_budget", 5)

    assert "2 unusable images, 1 of them without a caption" in run("check", *words).output
    assert json.loads(run("check", *words, "--json").output)["without_caption"] == 1


def test_buckets_are_shown_with_what_they_need_to_fill_a_batch(config: Path, tmp_path: Path) -> None:
    Image.new("RGB", (32, 16)).save(tmp_path / "pets/wide.png")
    (tmp_path / "pets/wide.txt").write_text("a wide pet")
    words = ("--data_backend_config", config, "--resolution", 16, "--aspect_bucket_alignment", 8, "--train_batch_size", 4)
    report = json.loads(run("buckets", *words, "--json").output)
    found = [[one[key] for key in ("width", "images", "batches_per_epoch", "smallest_repeats")] for one in report["buckets"]]
    shown = run("buckets", *words).output

    assert found == [[16, 9, 2.25, 0], [24, 1, 0.25, 3]]
    assert any("24x8 (1 sample) to 16x16" in notice for notice in report["notices"])
    assert "1 of them cannot fill a batch" in shown
    assert "a run ends here: " in run("buckets", *words, "--short_buckets=error").output


@pytest.mark.parametrize("cached", [True, False])
def test_the_order_is_what_a_run_sees(config: Path, tmp_path: Path, cached: bool) -> None:
    for number in range(9):
        (tmp_path / f"pets/{number}.txt").write_text(f"{number}, a, b, c, d\nanother {number}")
    keys = {"caption_shuffle": True, "flip_probability": 0.5, "caption_weights": [3, 1]}
    config.write_text(json.dumps([{"id": "pets", "instance_data_dir": str(tmp_path / "pets"), **keys}]))
    words = ["--data_backend_config", config, "--resolution", 16, "--aspect_bucket_alignment", 8, "--num_processes", 2]
    words += ["--train_batch_size", 2, "--gradient_accumulation_steps", 2, "--caption_dropout_probability", 0.3]
    words += [] if cached else ["--text_cache_disable"]
    report = json.loads(run("order", *words, "--batches=4", "--position=3", "--json").output)["batches"]
    line = CommandLine.parse(list(map(str, words)))
    data = scan_data(line.config(), line.plugins, 8, None)
    texts = Rows() if cached else None
    seen: dict[int, tuple[str, str, int, int]] = {}
    for rank in range(2):
        world = World(rank=rank, size=2)
        with Loader(data, world=world, micro_batch=2, accumulation=2, position=3, texts=texts) as loader:
            for batch in islice(loader, 4):
                for place, micro in enumerate(batch.micro):
                    for number, key, caption in zip(micro.numbers, micro.keys, micro.captions, strict=True):
                        seen[number] = (key, caption, rank, place)

    rows = [row for batch in report for row in batch["samples"]]
    assert {row["number"]: (row["key"], row["caption"], row["rank"], row["micro_batch"]) for row in rows} == seen
    chance = SampleNoise(data.order.seed).column([row["number"] for row in rows], 1)
    assert [row["caption_dropped"] for row in rows] == (chance < 0.3).tolist()
    assert {row["flipped"] for row in rows} == {row["caption_dropped"] for row in rows} == {True, False}
    assert all(f"{row['key']}: {row['caption']}" in run("order", *words, "--position=3").output for row in rows[:8])


class Rows:
    """Cached texts that have a row for every text."""

    def rows(self, texts: Sequence[str], *, negative: bool = False) -> dict[str, torch.Tensor]:
        return {"row": torch.zeros(len(texts), 1)}


def test_nothing_to_look_at_is_an_error() -> None:
    assert "no dataset given" in str(run("scan").exception)


def test_problems_of_the_file_are_reported(config: Path) -> None:
    config.write_text('[{"id": "pets", "colour": 1}]')
    result = run("scan", "--data_backend_config", config)

    assert isinstance(result.exception, ConfigError)
