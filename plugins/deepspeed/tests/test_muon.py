"""Muon under ZeRO 3 steps as `--optimizer=muon` does elsewhere, and its state goes from one strategy to another."""

import json
from itertools import product
from pathlib import Path

import pytest

from smalti.hookspecs import HookSpecs
from smalti.parallel.state import capture
from smalti_testing import TinyFamily
from smalti_testing.strategies import STRATEGY, _save, _snapshot, run_check
from smalti_testing.strategy_subject import open_family, open_strategy, whole_state
from support.forked_ranks import forked_processes
from support.whole import some

RATE = 1e-4
"""At which the rounding of products in bf16, in which both compute, is within the tolerance of the contract."""
DOCUMENT = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
FLAGS = (f"--deepspeed_config={json.dumps(DOCUMENT)}", "--optimizer=muon", "--plugins=optimizers", f"--learning_rate={RATE}")
OFFLOADED = {"zero_optimization": {**DOCUMENT["zero_optimization"], "offload_param": {"device": "cpu"}}}
NOT_HERE = ("its_state_is_portable", "it_leaves_in_good_order")
"""The first looks for the state of AdamW, the second ends the group of processes."""
CHECKS = [name for name in STRATEGY.checks if name not in NOT_HERE]
KEPT = ("steps_are_those_of_one_process", "the_norm_is_that_of_the_whole_gradient", "discarded_gradients_are_gone")
KEPT += ("a_restored_state_continues_bit_for_bit", "a_checkpoint_comes_back_bit_for_bit", "one_process_reads_its_checkpoints")
KEPT += ("it_goes_on_from_a_checkpoint_of_one_process", "a_rank_that_saves_alone_has_the_full_state")
IN_BF16 = ("weights_that_are_replaced_are_used_at_once", "a_restored_state_continues_bit_for_bit")
IN_BF16 += ("a_checkpoint_comes_back_bit_for_bit",)


@pytest.fixture(scope="module")
def ranks():
    with forked_processes(group=False, imports=["support.zero_ranks"]) as processes:
        yield processes


@pytest.mark.parametrize("check", some(CHECKS, *KEPT))
def test_it_keeps_the_contract_of_a_strategy(ranks, tmp_path, check):
    """Among it: clipping, steps that are left out, and checkpoints from and to one process with smalti's own Muon."""
    run_check(ranks, check, "deepspeed", FLAGS, tmp_path)


@pytest.mark.parametrize("check", IN_BF16)
def test_in_bf16_its_state_comes_back_bit_for_bit(ranks, tmp_path, check):
    run_check(ranks, check, "deepspeed", (*FLAGS, "--mixed_precision=bf16"), tmp_path)


@pytest.mark.parametrize("check", ["steps_are_those_of_one_process", "a_checkpoint_comes_back_bit_for_bit"])
def test_parameters_may_be_offloaded(ranks, tmp_path, check):
    run_check(ranks, check, "deepspeed", (f"--deepspeed_config={json.dumps(OFFLOADED)}", *FLAGS[1:]), tmp_path)


def distance_in_steps(frozen: tuple[str, ...], decay: str, limit: float) -> tuple[float, set[str]]:
    """How far weights are from those of one process after four steps, in learning rates; which have a momentum."""
    subject = open_family("deepspeed", (*FLAGS, f"--adam_weight_decay={decay}"), 2, TinyFamily(frozen=frozen))
    reference = subject.reference()
    for number in range(4):
        subject.step(number, limit=limit)
        reference.step(number, 2, limit)
    state, expected, found = subject.state(), whole_state(capture(reference.model, reference.optimizer)), subject.whole()
    assert expected.keys() == found.keys()
    distance = max(float((expected[name] - found[name]).abs().max()) for name in state.model)
    return distance / RATE, {name for name, kept in state.optimizer_state.items() if "momentum_buffer" in kept}


STEPS = [*product([(), ("words", "leave")], [("0.01", 0.0), ("100", 0.0), ("0.01", 0.05)])]


@pytest.mark.parametrize(("frozen", "settings"), some(STEPS, STEPS[0], STEPS[4], STEPS[5]))
def test_matrices_alone_are_stepped_by_it_as_far_as_by_smaltis_own(ranks, frozen, settings):
    """A step on a matrix of this model is about half a learning rate long; DeepSpeed's own would be one and more."""
    distance, with_momentum = ranks.run(distance_in_steps, frozen, *settings)[0]
    trained = {name: each for name, each in TinyFamily(frozen=frozen).build_model().named_parameters() if each.requires_grad}
    assert with_momentum == {name for name, each in trained.items() if each.dim() == 2}
    assert {each.dim() for each in trained.values()} >= {1, 2, 4}
    assert distance < 0.2


def keep(plugin: str, flags: tuple[str, ...], number: int, folder: Path) -> dict[str, float]:
    """Two steps and a checkpoint; the sums of what is in it."""
    subject = open_strategy(plugin, flags, 2)
    subject.folder = folder
    subject.step(number)
    subject.step(number + 1)
    _save(subject, _snapshot(subject.state(), number))
    return {name: float(tensor.double().sum()) for name, tensor in subject.whole().items()}


def take(plugin: str, flags: tuple[str, ...], number: int, folder: Path) -> dict[str, float]:
    """The same sums in a run of another strategy that has read the checkpoint, and steps afterwards."""
    subject = open_strategy(plugin, flags, 2)
    into = _snapshot(subject.empty(), 0)
    [source] = folder.glob("step-*")
    subject.backend.decide(
        HookSpecs.load_checkpoint, source=source, state=into, parallel=subject.parallel, config=subject.config
    )
    subject.parallel.state.load(into.state)
    sums = {name: float(tensor.double().sum()) for name, tensor in subject.whole().items()}
    subject.step(number + 2)
    return sums


OTHERS = {"ddp": ("ddp", ()), "fsdp2": ("fsdp2", ("--fsdp_enable",))}


@pytest.mark.parametrize("other", OTHERS)
def test_its_state_goes_to_another_strategy_and_back(ranks, tmp_path, other):
    plugin, more = OTHERS[other]
    ways = [("deepspeed", FLAGS), (plugin, (*more, *FLAGS[1:]))]
    for first, second in (ways, reversed(ways)):
        folder = tmp_path / first[0]
        folder.mkdir()
        kept = ranks.run(keep, *first, 80, folder)[0]
        assert ranks.run(take, *second, 80, folder)[0] == kept
        assert any(key.endswith(".momentum_buffer") for key in kept)
