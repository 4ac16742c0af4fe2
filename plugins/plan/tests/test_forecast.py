"""What a launch says about its memory: nothing if it fits, else what would; and the comparison at its end."""

import re
from dataclasses import replace

import pytest

from smalti import World
from smalti.config import resolve
from smalti.plugins import Selection, choose_distributed, load_plugins, schema_of
from smalti.rundir import RunDirectory, acquire, read_events
from smalti_plan.choices import choices
from smalti_plan.forecast import Forecast
from smalti_plan.plugin import Plan
from support.planned import H100, MODEL, RUN, WHOLE, sharded

TOY = ("--model_family=toy", "--output_dir=out", "--resolution=32", "--train_batch_size=1", "--max_train_steps=1", "--use_cpu")
WORLD = World(size=8, local_size=8, device="cuda")


def forecast(strategies, gib, name):
    device = replace(H100, memory=int(gib * 2**30))
    found = choices(MODEL, RUN, strategies, device, WORLD)
    own = next(each for each in found if each.strategy.name == name and each.candidate.recompute == "none")
    return Forecast(device=device, own=own, best=found[0])


def test_a_run_that_fits_is_launched_without_a_word():
    assert forecast([WHOLE], 1000, "whole").notices == []


def test_one_that_does_not_fit_is_warned_of_with_what_would():
    [notice] = forecast([WHOLE, sharded(8)], 40, "whole").notices
    assert "it does not fit into memory: this run needs about " in notice
    assert "has 40.0 GiB; this would fit: --train_batch_size=" in notice


def test_where_nothing_fits_no_flags_are_promised():
    [notice] = forecast([WHOLE], 10, "whole").notices
    assert notice.endswith("smalti plan shows other ways to train")


def test_the_largest_peak_of_this_attempt_is_compared(tmp_path):
    directory = RunDirectory(tmp_path)
    for peaks in ((9000.0,), (1024.0, 2048.0, None)):
        with acquire(directory) as writer:
            for step, peak in enumerate(peaks):
                writer.events.append("step", step=step, peak_memory_mb=peak)
            writer.end_launch(0, "done")
    measured, line = forecast([WHOLE], 1000, "whole").compared(directory)
    assert measured == 2 * 2**30
    assert line.startswith("2.0 GiB in tensors at the peak; ")


def test_nothing_is_compared_where_nothing_was_measured(tmp_path):
    assert forecast([WHOLE], 1000, "whole").compared(RunDirectory(tmp_path)) is None


@pytest.fixture
def launched(tmp_path):
    """launched("--flag", ...) -> the lines of a launch on CPUs, before and after it, and the events of the kind "memory"."""

    def give(*flags):
        plugins, plugin, directory = load_plugins(Selection(only=("plan", "toy"))), Plan(), RunDirectory(tmp_path)
        config = resolve(schema_of(plugins), ("--plugins=plan,toy", *TOY, *flags), environment={})
        before = plugin.notices_before_launch(config, choose_distributed(config, plugins), "cpu")
        with acquire(directory) as writer:
            writer.events.append("step", step=1, peak_memory_mb=1024.0)
            after = plugin.on_launch_end(directory, writer.events)
            assert plugin.on_launch_end(directory, writer.events) == [], "of a launch whose forecast is not known"
        return before, after, [event for event in read_events(directory.events_file) if event.kind == "memory"]

    return give


@pytest.mark.parametrize("choice", ["auto", "off"])
def test_no_forecast_is_made_on_a_cpu_unless_it_is_asked_for(launched, choice):
    assert launched(f"--memory_forecast={choice}") == ([], [], [])


def test_the_forecast_of_a_launch_is_compared_when_it_ends_and_kept_as_an_event(launched):
    before, [line], [event] = launched("--memory_forecast=on")
    assert before == []
    assert re.fullmatch(
        r"memory       1\.0 GiB in tensors at the peak; \d\.\d to \d\.\d GiB were expected, with allowances", line
    )
    assert (event.number("measured"), event.text("fit")) == (2**30, "fits")
