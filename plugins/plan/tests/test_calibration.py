"""Real steps narrow the ranges of times, are kept, and leave nothing behind."""

from dataclasses import replace

import pytest
from PIL import Image

from smalti import World
from smalti.errors import UserError
from smalti_plan.calibration import calibrate, calibration_of, fitted
from smalti_plan.choices import choices
from smalti_plan.formulas.time import FAST, SLOW
from smalti_plan.rates import Rates, measure_rates
from support.forked_popen import ForkedPopen
from support.planned import H100, MODEL, RUN, WHOLE, sharded

CPU = replace(H100, name="cpu", title="a processor", kind="cpu")
FP32 = replace(RUN, products="fp32", effective_batch=1)
RATES = Rates(links={"all-gather": 1e9}, memory=1e10, dispatch=1e-5)


def planned(strategy, calibration=None):
    """The ways without recomputation on one rank."""
    ends = (FAST, SLOW) if calibration is None else calibration.efficiencies(CPU, "fp32")
    found = choices(MODEL, FP32, [strategy], CPU, World(size=1, local_size=1, device="cpu"), ends)
    return [each for each in found if each.candidate.recompute == "none"]


[CHOICE] = planned(WHOLE)


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    """Caches of its own, and processes that are forked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("subprocess.Popen", ForkedPopen)


def test_measured_steps_set_the_middle_of_the_range_and_are_kept(tmp_path):
    for number in range(4):
        (tmp_path / "images").mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "images" / f"{number}.png")
    arguments = [
        *("--model_family=toy", "--toy_width=12", "--toy_depth=1", "--resolution=8", "--use_cpu", "--mixed_precision=no"),
        *(f"--instance_data_dir={tmp_path / 'images'}", "--caption_strategy=filename", f"--output_dir={tmp_path / 'own'}"),
    ]
    found = calibrate(arguments, CHOICE, MODEL, FP32, CPU)
    assert calibration_of(CPU, "fp32", 1) == found
    assert calibration_of(CPU, "bf16", 1) is None
    assert 0 < found.seconds < 60
    assert not (tmp_path / "own").exists()
    [narrowed] = planned(WHOLE, found)
    assert narrowed.seconds == pytest.approx(found.seconds)
    assert narrowed.slowest.seconds / narrowed.fastest.seconds < CHOICE.slowest.seconds / CHOICE.fastest.seconds


def test_each_kind_of_work_has_a_rate_of_its_own():
    """Slow links make what sends slower, and change nothing of what does not."""
    slow, fast = (fitted(CHOICE, MODEL, FP32, CPU, replace(RATES, links={"all-gather": links}), 60.0) for links in (1e8, 1e10))
    for calibration in (slow, fast):
        assert planned(WHOLE, calibration)[0].seconds == pytest.approx(60.0)
    assert planned(sharded(2), slow)[0].seconds > 2 * planned(sharded(2), fast)[0].seconds


def test_rates_are_those_of_ranks_that_work_at_the_same_time():
    both, alone = (measure_rates(ranks, "cpu", "cpu") for ranks in (2, 1))
    assert both.links.keys() == {"all-gather", "reduce-scatter", "all-reduce"}
    assert alone.links == {}
    assert all(1e6 < rate < 1e12 for rate in both.links.values())
    assert 1e7 < both.memory < 1e13
    assert 1e-7 < both.dispatch < 1e-3


def test_a_run_that_does_not_train_is_reported_with_the_end_of_its_output():
    with pytest.raises(UserError, match="Unknown model_family 'nothing'"):
        calibrate(["--model_family=nothing"], CHOICE, MODEL, FP32, CPU)
    assert calibration_of(CPU, "fp32", 1) is None
