"""Pictures that turn out to be broken while training: a few are put up with, too many end the run in good order."""

import json
import shutil

import pytest


@pytest.fixture
def torn(pictures, tmp_path):
    """The data set with some pictures cut off after their header, which a scan of headers cannot see."""

    def tear(count: int):
        folder = shutil.copytree(pictures, tmp_path / "torn")
        for path in sorted(folder.glob("*.png"))[:count]:
            path.write_bytes(path.read_bytes()[:60])
        return folder

    return tear


def test_more_broken_pictures_than_the_budget_end_the_run_saved(torn, tmp_path, train):
    folder = torn(12)
    run = train(tmp_path / "run", instance_data_dir=folder, max_train_steps=200, train_batch_size=4, data_error_budget=3)
    assert run.code == 1
    assert "data_error_budget" in run.output
    assert list((tmp_path / "run" / "checkpoints").glob("step-*/manifest.json"))
    assert len(list(folder.glob("*.png"))) == 24


def test_broken_pictures_within_the_budget_are_listed_and_replaced(torn, tmp_path, train):
    options = {"max_train_steps": 20, "train_batch_size": 4, "data_error_budget": 5, "num_processes": 2}
    run = train(tmp_path / "run", instance_data_dir=torn(2), **options)
    assert run.code == 0, run.output
    lists = (tmp_path / "run" / "data").glob("loading.rank-*.quarantine.jsonl")
    found = {json.loads(line)["key"] for path in lists for line in path.read_text().splitlines()}
    assert found == {"00.png", "01.png"}
