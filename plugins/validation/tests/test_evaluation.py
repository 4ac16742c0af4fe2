"""The loss on pictures that are held out: measured the same on any number of ranks, and nothing else changes by it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file, save_file

from smalti.cli.checkpoint import checkpoint
from smalti.config.resolution import resolve
from smalti.diffusion.timesteps import build_timesteps
from smalti.errors import PreflightError
from smalti.hookspecs import hookimpl
from smalti.launch.preflight import Preparation
from smalti.launch.rank import run_rank
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.registry import PluginInfo
from smalti.plugins.schema import schema_of
from smalti_export.command import export as export_checkpoint
from smalti_objectives.timestep_range import TruncatedSampler
from smalti_toy.family import ToyShape, ToyTransformer
from smalti_validation.command import report
from smalti_validation.drift import drift, pixels
from smalti_validation.evaluation import levels_of
from support.forked_ranks import forked_processes

FLAGS = (
    "--model_family=toy",
    "--toy_width=32",
    "--toy_depth=2",
    "--toy_heads=2",
    "--resolution=16",
    "--resolution_type=pixel",
    "--mixed_precision=no",
    "--use_cpu",
    "--checkpoint_step_interval=0",
    "--max_train_steps=4",
    "--validation_batch_size=2",
)
TRAINED = {"id": "trained", "instance_data_dir": "trained", "caption_strategy": "filename"}
HELD_OUT = {"id": "held-out", "instance_data_dir": "held-out", "caption_strategy": "filename", "dataset_type": "eval"}


def configured(directory: Path, datasets: list[dict], *flags: str):
    plugins = load_plugins(Selection(only=("fsdp2", "objectives", "toy", "validation"), without=("console",)))
    places = [{**dataset, "instance_data_dir": str(directory.parent / dataset["instance_data_dir"])} for dataset in datasets]
    file = directory.with_suffix(".json")
    file.write_text(json.dumps(places))
    given = [*FLAGS, f"--output_dir={directory}", f"--data_backend_config={file}", *flags]
    return resolve(schema_of(plugins), given, environment={}), plugins


class Listener:
    """A plugin that keeps what it hears."""

    def __init__(self):
        self.heard = []
        self.metrics = {}

    @hookimpl
    def log_metrics(self, metrics, step):
        self.metrics.setdefault(step, {}).update(metrics)

    @hookimpl
    def on_evaluation(self, state, result):
        self.heard.append((state.step, result))


listener = Listener()


def train(directory: Path, datasets: list[dict], *flags: str) -> list[dict]:
    """The events of a run in this process."""
    config, plugins = configured(directory, datasets, *flags)
    plugins.register(PluginInfo(name="listener", distribution="tests", version="1"), listener)
    assert Preparation.of(config, plugins, write=True).launch() == 0
    return events(directory)


def train_as_rank(directory: Path, datasets: list[dict], *flags: str) -> None:
    run_rank(*configured(directory, datasets, *flags))


def events(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]


def evaluations(told: list[dict]) -> list[dict]:
    return [event for event in told if event["type"] == "eval"]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    files = sorted((directory / "checkpoints" / "step-00000004").glob("*/*.safetensors"))
    return {f"{path.parent.name}/{name}": tensor for path in files for name, tensor in load_file(path).items()}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Eight pictures to train on, nine that are held out, of which one is broken; two shapes of each."""
    root = tmp_path_factory.mktemp("evaluation")
    for name, count in (("trained", 8), ("held-out", 8)):
        (root / name).mkdir()
        for number in range(count):
            size = (32, 32) if number % 3 else (48, 24)
            Image.effect_noise(size, 60 + number).convert("RGB").save(root / name / f"{name} {number}.png")
    whole = (root / "held-out" / "held-out 1.png").read_bytes()
    (root / "held-out" / "torn.png").write_bytes(whole[: len(whole) // 2])
    torch.manual_seed(1)
    first = {name: 0.1 * torch.randn_like(value) for name, value in _toy().state_dict().items()}
    save_file(first, root / "first.safetensors")
    return root


def _toy() -> ToyTransformer:
    return ToyTransformer(ToyShape(width=32, depth=2, heads=2, patch=4))


@pytest.fixture(scope="module")
def evaluated(root) -> list[dict]:
    flags = ("--eval_steps_interval=2", "--use_ema", "--learning_rate=1e-2", "--train_batch_size=2")
    sampled = ("--validation_prompt=a face", "--validation_base_model", "--validation_num_inference_steps=2")
    return train(root / "evaluated", [TRAINED, HELD_OUT], *flags, *sampled)


@pytest.fixture(scope="module")
def plain(root) -> list[dict]:
    return train(root / "plain", [TRAINED], "--use_ema", "--learning_rate=1e-2", "--train_batch_size=2")


@pytest.fixture(scope="module")
def alone_and_together(root) -> tuple[dict, dict]:
    """The last evaluation of weights that do not move, on one rank and, sharded, on two."""
    flags = ("--learning_rate=0", "--sdpa_backend=math", f"--pretrained_model_name_or_path={root / 'first.safetensors'}")
    flags += ("--eval_steps_interval=1", "--keep_best=1", "--eval_patience=2", "--max_train_steps=9")
    alone = train(root / "alone", [TRAINED, HELD_OUT], *flags, "--train_batch_size=2")
    together = (*flags, "--num_processes=2", "--fsdp_enable")
    with forked_processes(group=False) as pair:
        pair.run(train_as_rank, root / "together", [TRAINED, HELD_OUT], *together)
    return evaluations(alone)[-1], evaluations(events(root / "together"))[-1]


def test_the_loss_is_measured_at_its_interval_and_at_the_end(evaluated):
    assert [(event["step"], event["averaged"]) for event in evaluations(evaluated)] == [(2, True), (4, True)]


def test_hook_on_evaluation_gets_what_was_measured(evaluated):
    last = evaluations(evaluated)[-1]
    assert (last["step"], last["loss"]) in [(step, result.loss) for step, result in listener.heard]


def test_trackers_get_the_change_and_the_drift_from_the_model_before_training(root, evaluated):
    change = evaluations(evaluated)[-1]["change"]
    found = dict(listener.metrics[4])
    assert (found["eval_loss/change"], found["eval_loss/change_interval"]) == (change["loss"], change["interval"])
    now, before = (pixels(root / "evaluated" / "samples" / f"{step:08d}" / "00-a-face.png") for step in (4, 0))
    assert (found["drift/mse"], found["drift/ssim"]) == pytest.approx(drift(now, before))
    assert 0 < found["drift/mse"] < 1


def test_the_loss_is_the_mean_over_equally_spaced_timesteps(evaluated):
    last = evaluations(evaluated)[-1]
    assert list(last["by_timestep"]) == ["100", "300", "500", "700", "900"]
    assert last["loss"] == pytest.approx(sum(last["by_timestep"].values()) / 5)


@pytest.mark.parametrize("distribution", ["uniform", "logit_normal", "mode", "beta"])
@pytest.mark.parametrize("shift", [None, 0.3, 1.65, 3.0])
def test_without_a_range_the_same_levels_are_measured_whatever_is_sampled(distribution, shift):
    sampler = build_timesteps(distribution=distribution, sigmoid_mean=1.0, shift=shift)
    assert levels_of(sampler, {64, 4096}) == {100: 0.1, 300: 0.3, 500: 0.5, 700: 0.7, 900: 0.9}
    narrow = TruncatedSampler(sampler=sampler, low=0.875, high=0.877)
    assert list(levels_of(narrow, {64, 4096})) == [875, 876, 877]


def test_of_a_range_the_levels_within_it_are_measured_with_the_same_noise(root):
    flags = ("--learning_rate=0", f"--pretrained_model_name_or_path={root / 'first.safetensors'}", "--train_batch_size=2")
    [whole] = evaluations(train(root / "whole", [TRAINED, HELD_OUT], *flags, "--max_train_steps=1"))
    ranged = (*flags, "--timestep_min=0.4", "--timestep_max=0.6", "--max_train_steps=2", "--resume_from_checkpoint=latest")
    found = evaluations(train(root / "whole", [TRAINED, HELD_OUT], *ranged))[-1]
    assert (found["step"], list(found["by_timestep"])) == (2, ["420", "460", "500", "540", "580"])
    assert found["by_timestep"]["500"] == whole["by_timestep"]["500"]
    assert found["change"] is None  # nothing is compared with other noise levels
    assert "steps 2 to 2" in CliRunner().invoke(report, [str(root / "whole")], catch_exceptions=False).output


def test_a_picture_that_cannot_be_read_does_not_count(evaluated):
    assert [event["samples"] for event in evaluations(evaluated)] == [8, 8]


def test_training_is_the_same_to_the_last_bit_with_and_without_evaluation(root, evaluated, plain):
    losses = [[event["loss"] for event in told if event["type"] == "step"] for told in (evaluated, plain)]
    assert losses[0] == losses[1]
    found, expected = weights(root / "evaluated"), weights(root / "plain")
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


def test_two_ranks_measure_the_same_loss_as_one_to_the_last_bit(alone_and_together):
    alone, together = alone_and_together
    assert alone["loss"] > 0
    assert (together["loss"], together["by_timestep"]) == (alone["loss"], alone["by_timestep"])


@pytest.mark.parametrize("name", ["alone", "together"])
def test_two_ranks_keep_the_best_and_end_as_one_does(root, alone_and_together, name):
    ranking = json.loads((root / name / "checkpoints" / "ranking.json").read_text())
    assert ranking == json.loads((root / "alone" / "checkpoints" / "ranking.json").read_text())
    message = "eval_loss has not improved in 2 evaluations since step 1; --eval_patience=4 continues the run"
    assert ending(root / name) == ("finished", 4, message)
    assert saved(root / name) == ["step-00000001", "step-00000004"]


def test_a_change_is_taken_image_by_image_over_the_same_noise(root, evaluated):
    first, last = (np.load(root / "evaluated" / "evaluations" / f"{step:08d}.npy") for step in (2, 4))
    assert (first["image"] == last["image"]).all()
    differences = (last["losses"] - first["losses"]).mean(axis=1)
    change = evaluations(evaluated)[-1]["change"]
    assert (change["since"], change["loss"]) == (2, pytest.approx(differences.mean(), abs=1e-6))
    assert change["interval"] == pytest.approx(2.365 * differences.std(ddof=1) / 8**0.5, rel=1e-3)
    assert evaluations(evaluated)[0]["change"] is None


def test_what_the_steps_say_of_the_device_is_in_their_events(plain):
    steps = [event for event in plain if event["type"] == "step"]
    assert all(event["peak_memory_mb"] > 10 for event in steps)


def test_pictures_that_are_trained_on_too_are_refused_before_anything_starts(root):
    both = {**HELD_OUT, "instance_data_dir": "trained"}
    with pytest.raises(PreflightError, match="8 images of the eval datasets are also in the training dataset trained"):
        Preparation.of(*configured(root / "both", [TRAINED, both]), write=False)


def test_an_interval_without_anything_to_evaluate_is_told(root):
    preparation = Preparation.of(*configured(root / "none", [TRAINED], "--eval_steps_interval=2"), write=False)
    assert [notice for notice in preparation.notices if notice.startswith("eval_steps_interval without effect")] != []


def test_only_so_many_pictures_are_evaluated_as_are_asked_for(root):
    preparation = Preparation.of(*configured(root / "few", [TRAINED, HELD_OUT], "--num_eval_images=3"), write=False)
    assert preparation.data is not None
    assert preparation.data.held_out is not None
    assert sum(count.total for count in preparation.data.held_out.counts) == 3


def test_masks_and_weights_of_held_out_pictures_count(root):
    flags = ("--learning_rate=0", f"--pretrained_model_name_or_path={root / 'first.safetensors'}", "--max_train_steps=1")
    for name in ("white", "left"):
        (root / name).mkdir()
        for path in (root / "held-out").glob("held-out *.png"):
            with Image.open(path) as picture:
                mask = Image.new("L", picture.size, 255)
            if name == "left":
                mask.paste(0, (mask.width // 2, 0, mask.width, mask.height))
            mask.save(root / name / path.name)
    losses = {}
    for name in ("", "white", "left"):
        keys = {"mask_path": str(root / name), "loss_weight": 0.5} if name else {}
        [found] = evaluations(train(root / f"masked {name}", [TRAINED, {**HELD_OUT, **keys}], *flags, "--train_batch_size=2"))
        losses[name] = found
    assert losses["white"]["loss"] == losses[""]["loss"] / 2
    assert abs(losses["left"]["loss"] - losses["white"]["loss"]) > 1e-4

    assert [losses[name]["factors"] for name in ("", "left")] == [[], ["loss_weight", "mask"]]
    assert losses["left"]["plain"] == losses[""]["by_timestep"]
    told = listener.metrics[1]  # of the last run
    assert told["eval_loss"] == losses[""]["loss"]
    assert told["eval_loss/loss_weight+mask"] == pytest.approx(losses["left"]["loss"])
    assert told["eval_loss/loss_weight+mask/t=500"] == losses["left"]["by_timestep"]["500"]
    output = CliRunner().invoke(report, [str(root / "masked left")], catch_exceptions=False).output
    assert "steps 1 to 1, losses times loss_weight, losses times mask\n" in output


# --- the best checkpoint ------------------------------------------------------------------------------------------------

WORSENING = ("--learning_rate=0.3", "--train_batch_size=2", "--checkpoints_total_limit=1", "--lr_warmup_steps=0")


def saved(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").glob("step-*"))


@pytest.fixture(scope="module")
def kept(root) -> Path:
    """A run that gets worse from step to step, in two launches, of which the second one keeps no checkpoints by itself."""
    flags = (*WORSENING, "--eval_steps_interval=1", "--keep_best=1")
    train(root / "kept", [TRAINED, HELD_OUT], *flags)
    train(root / "kept", [TRAINED, HELD_OUT], *flags, "--max_train_steps=7", "--checkpoint_step_interval=1")
    return root / "kept"


def test_the_best_checkpoint_is_saved_and_stays(kept):
    losses = {event["step"]: event["loss"] for event in evaluations(events(kept))}
    best = min(losses, key=losses.__getitem__)
    assert best < 4
    assert saved(kept) == [f"step-{best:08d}", "step-00000007"]


def test_the_best_checkpoint_is_marked_and_exported(kept, tmp_path):
    best = saved(kept)[0]
    listed = json.loads(CliRunner().invoke(checkpoint, ["ls", str(kept), "--json"]).output)
    assert [Path(each["path"]).name for each in listed if each["best"]] == [best]
    rows = CliRunner().invoke(checkpoint, ["ls", str(kept)]).output.splitlines()
    assert [row.split()[0] for row in rows if row.endswith("  best")] == [best]
    done = CliRunner().invoke(export_checkpoint, [str(kept), f"--to={tmp_path / 'model'}", "--step=best"])
    assert f"toy at step {int(best[5:])}," in done.output


# --- patience -----------------------------------------------------------------------------------------------------------

STILL = ("--learning_rate=0", "--train_batch_size=2", "--eval_steps_interval=1", "--max_train_steps=9")


def ending(directory: Path) -> tuple[str, int, str]:
    last = [event for event in events(directory) if event["type"] == "state"][-1]
    return last["state"], last["step"], last["message"]


def test_a_run_that_improves_no_more_ends_as_a_complete_one_over_all_its_launches(root, caplog, capsys):
    directory = root / "still"
    train(directory, [TRAINED, HELD_OUT], *STILL, "--eval_patience=3", "--max_train_steps=2")
    train(directory, [TRAINED, HELD_OUT], *STILL, "--eval_patience=3")
    message = "eval_loss has not improved in 3 evaluations since step 1; --eval_patience=6 continues the run"
    assert ending(directory) == ("finished", 5, message)
    first, second = capsys.readouterr().err.split(f"smalti: done: {message}\n")
    assert "train longer" in first, "after all of its steps"
    assert "train longer" not in second
    assert "use it" in second
    assert saved(directory)[-1] == "step-00000005"
    train(directory, [TRAINED, HELD_OUT], *STILL, "--eval_patience=3")
    assert ending(directory)[:2] == ("finished", 5)
    assert "in 4 evaluations since step 1; --eval_patience=7 continues the run" in caplog.text
    assert "train longer" not in capsys.readouterr().err
    train(directory, [TRAINED, HELD_OUT], *STILL, "--eval_patience=6", "--max_train_steps=6")
    assert ending(directory) == ("finished", 6, "trained 6 steps")


def test_an_evaluation_that_a_kill_cut_off_is_made_up_for(root):
    directory = root / "cut"
    train(directory, [TRAINED, HELD_OUT], *STILL, "--keep_best=1", "--max_train_steps=2")
    file = directory / "checkpoints" / "ranking.json"
    content = json.loads(file.read_text())
    del content["evaluations"]["2"]
    file.write_text(json.dumps(content | {"steps": [1]}))
    told = train(directory, [TRAINED, HELD_OUT], *STILL, "--keep_best=1", "--max_train_steps=3")
    assert [event["step"] for event in evaluations(told)] == [1, 2, 2, 3]


def test_a_damaged_ranking_ends_nothing_and_removes_nothing(root):
    directory = root / "damaged"
    flags = (*STILL, "--keep_best=1", "--checkpoint_step_interval=1", "--checkpoints_total_limit=1")
    train(directory, [TRAINED, HELD_OUT], *flags, "--max_train_steps=2")
    before = saved(directory)
    (directory / "checkpoints" / "ranking.json").write_text("{")
    told = train(directory, [TRAINED, HELD_OUT], *flags, "--max_train_steps=3")
    warned = [event["message"] for event in told if event["type"] == "warning"]
    assert any("ranking.json is damaged" in message for message in warned)
    assert (saved(directory), before) == (["step-00000001", "step-00000002", "step-00000003"], before)
