"""A run under FSDP 1 is the run that one process would have made, and goes on under FSDP 2; it says that it is deprecated."""

import pytest
from PIL import Image, ImageChops

PROMPTS = ["circle number 1", "circle number 2", "circle number 3"]
OPTIONS = {
    "allow_dataset_oversubscription": True,
    "max_grad_norm": 0.05,
    "max_train_steps": 12,
    "validation_step_interval": 6,
    "validation_prompt": PROMPTS,
    "adam_weight_decay": 0.5,
}
VERSION1 = {"fsdp_enable": True, "fsdp_version": 1, "num_processes": 2, "use_cpu": True, "train_batch_size": 3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, train):
    """Twelve pictures a step, clipped and strongly decayed: by one process, in halves, and in halves to the middle."""
    root = tmp_path_factory.mktemp("version1")
    halved = VERSION1 | {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    found = {
        "one": train(root / "one", **OPTIONS, train_batch_size=12),
        "two": train(root / "two", **OPTIONS, **halved, checkpoint_step_interval=5),
        "half": train(root / "moved", **OPTIONS | {"max_train_steps": 6}, **halved, fsdp_reshard_after_forward=False),
    }
    found["moved"] = train(root / "moved", **OPTIONS, **halved | {"fsdp_version": 2})
    return found


@pytest.mark.parametrize("kind", ["two", "moved"])
def test_losses_are_those_of_one_process(runs, kind):
    assert runs[kind].losses == pytest.approx(runs["one"].losses, rel=1e-5), runs[kind].output


def test_pictures_are_those_of_one_process(runs):
    folders = [runs[kind].directory / "samples" / "00000012" for kind in ("one", "two")]
    names = sorted(path.name for path in folders[1].glob("0*.png"))
    pairs = [[Image.open(folder / name) for folder in folders] for name in names]
    furthest = [max(high for _, high in ImageChops.difference(*pair).getextrema()) for pair in pairs]
    assert [difference <= 1 for difference in furthest] == [True, True, True]


def test_nothing_of_torchs_own_deprecation_is_printed(runs):
    """The launcher says it once, as `smalti plan` and `--dry-run` do."""
    assert "Warning" not in runs["two"].output
