"""The plugin as the core calls it."""

import time

import pytest

from smalti import FaultAction, RankInfo, RunState, World
from smalti.config import resolve
from smalti.plugins import load_plugins, schema_of
from smalti_health.plugin import Health


@pytest.fixture(scope="module")
def schema():
    return schema_of(load_plugins())


@pytest.fixture
def start(schema, tmp_path):
    """Starts the plugin on one rank; ends it after the test."""
    started: list[Health] = []

    def run(state: RunState, *flags: str, device: str = "cuda:0") -> Health:
        config = resolve(schema, ("--model_family=toy", "--gpu_health_interval=0.1", *flags), environment={})
        world = World(device=device)
        info = RankInfo(
            id=tmp_path.name,
            directory=tmp_path,
            world=world,
            config=config,
            strategy="ddp",
            plugins=("health smalti-health 1",),
        )
        plugin = Health()
        started.append(plugin)
        plugin.on_rank_start(state, info)
        return plugin

    yield run
    for each in started:
        each.on_rank_end()


def wait_for(state: RunState) -> None:
    until = time.monotonic() + 20
    while not state.has_faults and time.monotonic() < until:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("flags", "expected"), [((), FaultAction.STOP_UNSAVED), (("--gpu_health=warn",), FaultAction.CONTINUE)]
)
def test_a_lost_gpu_is_answered_as_the_option_says(fake, start, tmp_path, flags, expected):
    state = RunState(max_steps=1)
    plugin = start(state, *flags)
    until = time.monotonic() + 20
    while not (tmp_path / "health.node-0.jsonl").exists() and time.monotonic() < until:
        time.sleep(0.01)
    fake.set("count 1", "lost.0 1")
    wait_for(state)
    [fault] = state.take_faults()
    assert fault.kind == "lost"
    assert plugin.on_gpu_fault(fault) is expected


@pytest.mark.parametrize(("flags", "device"), [(("--gpu_health=off",), "cuda:0"), ((), "cpu")])
def test_nothing_is_started_without_a_gpu_or_with_off(fake, start, flags, device):
    assert start(RunState(max_steps=1), *flags, device=device)._watch is None


def test_a_port_without_the_package_is_a_problem(schema, monkeypatch):
    monkeypatch.setattr("smalti_health.plugin.find_spec", lambda name: None)
    config = resolve(schema, ("--model_family=toy", "--gpu_health_port=9400"), environment={})
    [problem] = Health().check_config(config)
    assert "pip install prometheus-client" in str(problem)
