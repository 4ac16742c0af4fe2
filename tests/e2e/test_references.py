"""What {env:NAME} stands for is used, and is found nowhere in the run directory."""

import pytest

TOKEN = "hush-hush-4711"
OPTIONS = {
    "max_train_steps": 2,
    "train_batch_size": 4,
    "num_processes": 2,
    "validation_prompt": ["circle of {env:TOKEN}", "circle number 1"],
    "tracker_project_name": "{env:TOKEN}",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory, train):
    return train(tmp_path_factory.mktemp("references") / "run", variables={"TOKEN": TOKEN}, **OPTIONS)


def test_no_file_and_no_name_in_the_run_directory_holds_it(run):
    assert run.code == 0, run.output
    files = [path for path in run.directory.rglob("*") if path.is_file()]
    assert [path for path in files if TOKEN in str(path) or TOKEN.encode() in path.read_bytes()] == []
    assert TOKEN not in run.output
    assert "{env:TOKEN}" in (run.directory / "config.toml").read_text()
    assert run.events("sample")[0]["images"][0]["prompt"] == "circle of {env:TOKEN}"


def test_it_is_what_the_image_is_of(run, train, tmp_path):
    plain = {**OPTIONS, "tracker_project_name": "x", "validation_prompt": [f"circle of {TOKEN}", "circle number 1"]}
    other = train(tmp_path / "plain", **plain)
    images = [sorted((each.directory / "samples").glob("*/00-*.png"))[0] for each in (run, other)]
    from PIL import Image

    pixels = []
    for path in images:
        with Image.open(path) as image:
            pixels.append(image.tobytes())
    assert pixels[0] == pixels[1]


def test_the_configuration_of_the_run_needs_the_variable_again(run, train):
    again = train(run.directory, config=run.directory / "config.toml", max_train_steps=3)
    assert (again.code, "{env:TOKEN}: this environment variable is not set" in again.output) == (2, True)
