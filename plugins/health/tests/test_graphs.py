"""A run whose blocks are not compiled as it was asked for says so, once for each reason."""

import logging

import pytest
import torch
from torch._dynamo.utils import counters

from smalti.config.resolution import resolve
from smalti.plugins.discovery import load_plugins
from smalti.plugins.schema import schema_of
from smalti.types import RankInfo, RunState, StepResult, World
from smalti_health.graphs import GraphWatch
from smalti_health.hangs.plugin import Hangs

COMPILING = ["--dynamo_backend=eager"]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def compiled(function):
    return torch.compile(function, backend="eager")


def warnings(caplog):
    found = [record.getMessage() for record in caplog.records if record.name == "smalti_health.graphs"]
    caplog.clear()
    return found


@torch.compiler.disable
def own(tokens):
    return tokens + 1


def broken(tokens):
    return own(tokens.sin()).cos()


def test_a_model_of_whole_graphs_is_no_news(caplog):
    compiled(torch.sin)(torch.ones(2))
    GraphWatch("inductor").look()
    assert warnings(caplog) == []


def test_a_model_of_which_nothing_is_compiled_is_told_once(caplog):
    watch = GraphWatch("inductor")
    own(torch.ones(2))
    watch.look()
    watch.look()
    [warning] = warnings(caplog)
    assert warning.startswith("--dynamo_backend=inductor has compiled nothing in the first step")
    assert "fix: TORCH_LOGS=graph_breaks" in warning


def test_a_break_is_told_with_its_reason_once(caplog):
    watch = GraphWatch("inductor")
    for length in (2, 3):
        compiled(broken)(torch.ones(length))
        watch.look()
    [warning] = warnings(caplog)
    assert warning.startswith("torch.compile has broken a block into several graphs: Skip calling `torch.compiler.disable()`d")


def test_shapes_that_are_not_compiled_any_more_are_told_once(caplog, monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 1)
    watch = GraphWatch("inductor")
    sine = compiled(lambda tokens: tokens.sin())
    for length in (2, 3, 4):
        sine(torch.ones(length))
        watch.look()
    [warning] = warnings(caplog)
    assert warning.startswith("torch.compile has made as many graphs of a block as it may")


@pytest.mark.parametrize(("flags", "rank", "count"), [(COMPILING, 0, 1), (COMPILING, 1, 0), ([], 0, 0)])
def test_the_main_rank_of_a_run_that_compiles_looks_after_each_step(caplog, tmp_path, flags, rank, count):
    caplog.set_level(logging.WARNING)
    world = World(rank=rank, size=2, local_rank=rank, local_size=2)
    config = resolve(schema_of(load_plugins()), ("--model_family=toy", *flags), environment={})
    info = RankInfo(id="", directory=tmp_path, world=world, config=config, strategy="", plugins=())
    plugin = Hangs()
    plugin.on_rank_start(RunState(max_steps=1), info)
    try:
        plugin.on_step_end(StepResult(step=1, loss=0.0, grad_norm=0.0, learning_rate=0.0, samples=1, seconds=1.0))
    finally:
        plugin.on_rank_end()
    assert len(warnings(caplog)) == count
