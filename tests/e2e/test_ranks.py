"""Two processes under torch's launcher do what one does: one launch, many questions."""

import math
import shutil

import pytest

from smalti_validation.png import image_settings

OPTIONS = {
    "max_train_steps": 8,
    "train_batch_size": 4,
    "use_ema": True,
    "validation_step_interval": 4,
    "validation_resolution": "16x16,8x12",
    "validation_negative_prompt": "circle number 9",
}
LIBRARY = """
square = "circle number 4"
[wide]
prompt = "circle number 5"
resolution = "24x8"
seed = 7
"""
PROMPTS = ["circle number 1", "circle number 2", "circle number 3"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, train, launch):
    """The same training with eight pictures on one rank, four on each of two ranks, and twice four on one rank."""
    root = tmp_path_factory.mktemp("ranks")
    (root / "prompts.toml").write_text(LIBRARY)
    prompts = {"validation_prompt": PROMPTS, "validation_prompt_library": root / "prompts.toml"}
    one = train(root / "one", **{**OPTIONS, "train_batch_size": 8}, **prompts)
    (root / "temporary").mkdir()
    own = {"TMPDIR": str(root / "temporary"), "PROBE_MODULES": "1"}
    two = launch(root / "two", **OPTIONS, num_processes=2, **prompts, variables=own, executed=True)  # see what it imports
    accumulated = train(root / "accumulated", **OPTIONS, gradient_accumulation_steps=2, **prompts)
    return {"one": one, "two": two, "accumulated": accumulated}


@pytest.mark.parametrize("other", ["two", "accumulated"])
def test_losses_do_not_depend_on_how_a_batch_is_split(runs, other):
    assert runs[other].losses == pytest.approx(runs["one"].losses, rel=1e-5)


@pytest.mark.parametrize("other", ["two", "accumulated"])
@pytest.mark.parametrize("group", ["model", "ema"])
def test_weights_do_not_depend_on_how_a_batch_is_split(runs, other, group):
    expected, found = runs["one"].tensors(8, group), runs[other].tensors(8, group)
    worst = max(float((expected[name] - found[name]).abs().max()) for name in expected)
    assert worst < 2e-5


def test_every_prompt_has_an_image_at_each_of_its_sizes_on_two_ranks(runs):
    from PIL import Image

    folder = runs["two"].directory / "samples" / "00000004"
    sizes = {}
    for path in (path for path in folder.glob("*.png") if path.name != "grid.png"):
        with Image.open(path) as image:
            sizes[path.stem] = "{}x{}".format(*image.size)
    assert sizes.pop("wide") == "24x8"
    assert sorted(sizes.values()) == ["16x16"] * 4 + ["8x12"] * 4
    assert all(name.endswith(size) for name, size in sizes.items())


def test_an_image_names_its_prompts_and_seed(runs):
    found = {path.stem: image_settings(path) for path in (runs["two"].directory / "samples" / "00000004").glob("*.png")}
    keys = ("prompt", "negative_prompt", "seed")
    assert [found["wide"][key] for key in keys] == ["circle number 5", "circle number 9", "7"]
    assert [found["00-circle-number-1-16x16"][key] for key in keys] == ["circle number 1", "circle number 9", "42"]
    assert found["square-8x12"]["seed"] == "42"


def test_pictures_do_not_depend_on_the_number_of_ranks(runs):
    from PIL import Image, ImageChops

    names = [path.name for path in (runs["one"].directory / "samples" / "00000008").glob("*.png") if path.name != "grid.png"]
    assert len(names) == 9
    for name in names:
        pair = [Image.open(runs[run].directory / "samples" / "00000008" / name) for run in ("one", "two")]
        assert max(high for _, high in ImageChops.difference(*pair).getextrema()) <= 1


def test_a_checkpoint_of_two_ranks_goes_on_with_one(runs, train, tmp_path):
    one, two = (shutil.copytree(runs[name].directory, tmp_path / name) for name in ("one", "two"))
    options = {**OPTIONS, "max_train_steps": 10, "train_batch_size": 8, "validation_step_interval": 0}
    assert train(two, **options).losses[-2:] == pytest.approx(train(one, **options).losses[-2:], rel=1e-4)


def test_a_launch_leaves_no_temporary_files(runs):
    left = (path.name for path in (runs["two"].directory.parent / "temporary").iterdir())
    assert [name for name in left if not name.startswith("torchinductor_")] == []  # which is torch's cache


def test_a_rank_imports_by_its_first_step_only_what_that_step_needs(runs):
    later = {"matplotlib", "pyarrow.compute", "diffusers", "transformers", "peft", "deepspeed", "rich", "tomlkit"}
    found = runs["two"].calls("modules")
    assert {call["rank"]: later & set(call["names"]) for call in found} == {0: set(), 1: set()}


def test_hook_configure_distributed_is_asked_in_the_launcher_and_on_every_rank(runs):
    calls = runs["two"].calls("configure_distributed")
    assert len({call["process"] for call in calls}) == 3
    assert {call["rank"] for call in calls} == {0, 1}


def test_both_ranks_take_every_step_and_end_together(runs):
    two = runs["two"]
    assert [[call["step"] for call in two.calls("on_step_end", rank)] for rank in (0, 1)] == [list(range(1, 9))] * 2
    assert [call["reason"] for call in two.calls("on_train_end")] == ["COMPLETED", "COMPLETED"]


def test_a_loss_that_is_not_finite_on_one_rank_stops_both_before_any_weight_changes(tmp_path, train):
    run = train(tmp_path / "nan", **OPTIONS, num_processes=2, spoil="nan:1:3")
    assert run.code == 1
    assert "not finite in step 3" in run.output
    assert [[call["step"] for call in run.calls("on_step_end", rank)] for rank in (0, 1)] == [[1, 2, 2]] * 2


def test_skipping_leaves_a_broken_step_out_on_all_ranks(tmp_path, train):
    run = train(tmp_path / "skip", **OPTIONS, num_processes=2, spoil="nan:0:3", nonfinite_loss="skip")
    # The probe spoils the step until it is done, so the limit of steps in a row ends the run.
    assert run.code == 1
    assert "10 steps in a row" in run.output
    assert all(map(math.isfinite, run.losses[:2]))
