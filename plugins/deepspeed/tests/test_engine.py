"""ZeRO trains what replicas train, whatever is cut and wherever it lies; and keeps no more than its part of it."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from smalti.parallel.state import capture
from smalti.training.optim.ema import Ema
from smalti.training.optim.optimizers import decouple_decay, matrices, parameter_groups
from smalti_deepspeed.formats import FORMATS
from smalti_migrate.checkpoints.convert import convert
from smalti_testing import RankFailed, TinyFamily, strategy_subject
from smalti_testing.strategies import run_check
from smalti_testing.strategy_subject import Reference, open_family, open_strategy, whole_state
from support.forked_ranks import forked_processes
from support.whole import some

STEPS = 20
ALL_CUT = {"stage3_param_persistence_threshold": 0}
ON_HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


def zero(stage: int, **settings: object) -> tuple[str, ...]:
    document = {"zero_optimization": {"stage": stage, **settings}}
    return (f"--deepspeed_config={json.dumps(document)}",)


KINDS = {
    "1": zero(1),
    "2": zero(2),
    "3": zero(3, **ALL_CUT),
    "3 with small parameters whole": zero(3),
    "3 offloaded": zero(3, **ALL_CUT, **ON_HOST),
}
IN_BF16 = "--mixed_precision=bf16"


def losses(plugin: str, flags: tuple[str, ...]) -> list[float]:
    """The mean loss of all ranks before each of the first steps, with clipping."""
    subject = open_strategy(plugin, flags, 2)
    found = []
    for number in range(STEPS):
        mine = subject.look(number)
        found.append(sum(float(text) for text in subject.parallel.all_gather_text(repr(mine))) / 2)
        subject.step(number, limit=0.05)
    return found


@pytest.fixture(scope="module")
def ranks():
    with forked_processes(group=False, imports=["support.zero_ranks"]) as processes:
        yield processes


@pytest.fixture(scope="module")
def replicas(ranks):
    """By precision."""
    return {precision: ranks.run(losses, "ddp", (f"--mixed_precision={precision}",))[0] for precision in ("no", "bf16")}


# --- losses ---------------------------------------------------------------------------------------------------------


def furthest(found: list[float], wanted: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(one - other) / other for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_losses_in_fp32_are_those_of_replicas(ranks, replicas, kind):
    found = ranks.run(losses, "deepspeed", KINDS[kind])[0]
    assert furthest(found, replicas["no"]) < 1e-5


@pytest.mark.parametrize("kind", some(KINDS, "2", "3"))
def test_losses_in_bf16_are_those_of_replicas(ranks, replicas, kind):
    found = ranks.run(losses, "deepspeed", (*KINDS[kind], IN_BF16))[0]
    assert furthest(found, replicas["bf16"]) < 3e-3


def types_of_gradients(flags: tuple[str, ...]) -> tuple[torch.dtype, torch.dtype]:
    """In which they are averaged, and added up."""
    zero = open_strategy("deepspeed", flags, 2).model.optimizer
    return zero.communication_data_type, zero.gradient_accumulation_dtype


SAID = [
    {},
    {"communication_data_type": "auto"},
    {"data_types": {"grad_accum_dtype": "auto"}},
    {"data_types": {"buffer_dtype": "fp32"}},
]


@pytest.mark.parametrize(
    ("stage", "said"), some([*product([2, 3], SAID)], (2, SAID[0]), (3, SAID[1]), (2, SAID[2]), (3, SAID[3]))
)
def test_in_bf16_gradients_are_averaged_and_added_up_in_fp32_unless_another_type_is_named(ranks, stage, said):
    flags = (f"--deepspeed_config={json.dumps({'zero_optimization': {'stage': stage}, **said})}", IN_BF16)
    assert set(ranks.run(types_of_gradients, flags)) == {(torch.float32, torch.float32)}


def alone(flags: tuple[str, ...], sizes: tuple[int, ...], *, own: bool) -> tuple[list[bool], dict[str, torch.Tensor]]:
    """Whether fp32 sums are on the device before each step of so many backward passes; the state after all.

    With `own`, DeepSpeed decides about them by itself.
    """
    subject = open_family("deepspeed", flags, 1, TinyFamily())
    zero, found = subject.model.optimizer, []
    if own:
        del zero._use_compact_grad_partition_buffer
    for number, passes in enumerate(sizes):
        for micro in range(passes):
            with subject.parallel.accumulate(last=micro == passes - 1):
                with subject.parallel.autocast():
                    loss = strategy_subject._loss(subject.family, subject.model, number, 0, micro)
                subject.parallel.backward(loss / passes)
        subject.parallel.clip_gradients(0.05)
        found.append(any(each is not None for each in zero.averaged_gradients.values()))
        subject.parallel.step()
    return found, subject.whole()


def alone_twice(flags: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[list[bool], list[bool], bool]:
    """Where sums are on the device, where DeepSpeed would have them, and whether all else is equal."""
    (found, state), (before, expected) = (alone(flags, sizes, own=own) for own in (False, True))
    equal = state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)
    return found, before, equal


def test_one_rank_adds_up_offloaded_gradients_on_its_device_only_over_several_backward_passes():
    flags = (*zero(2, offload_optimizer={"device": "cpu"}), IN_BF16)
    with forked_processes(ranks=1, group=False, imports=["support.zero_ranks"]) as one:
        assert one.run(alone_twice, flags, (1, 2, 1)) == [([False, True, False], [True] * 3, True)]


# --- state ----------------------------------------------------------------------------------------------------------

CHECKS = (
    "it_fills_the_model_with_the_first_weights",
    "weights_that_are_replaced_are_used_at_once",
    "its_state_is_portable",
    "a_restored_state_continues_bit_for_bit",
    "a_checkpoint_comes_back_bit_for_bit",
)
"""What the contract asks of any precision."""


IN_ALL_WAYS = "a_checkpoint_comes_back_bit_for_bit"
STATES = [*product(["2", "3", "3 offloaded"], CHECKS)]


@pytest.mark.parametrize(
    ("kind", "check"), some(STATES, *(case for case in STATES if case[0] == "3" or case[1] == IN_ALL_WAYS))
)
def test_in_bf16_the_state_is_kept_in_fp32_and_bit_for_bit(ranks, tmp_path, kind, check):
    run_check(ranks, check, "deepspeed", (*KINDS[kind], IN_BF16), tmp_path)


@pytest.mark.parametrize("check", CHECKS)
def test_the_state_of_deepspeeds_own_adam_is_portable(ranks, tmp_path, check):
    run_check(ranks, check, "deepspeed", KINDS["3 offloaded"], tmp_path)


def held(flags: tuple[str, ...]) -> tuple[int, int, int]:
    """Elements of masters, of the first moment, and of the average on this rank."""
    subject = open_strategy("deepspeed", flags, 2)
    subject.step(90)
    masters = subject.parallel.state.master_weights()
    moments = (state["exp_avg"] for state in subject.optimizer.state.values())
    average = Ema(masters, 0.5).shadows.values()
    first, second, third = (sum(each.numel() for each in tensors) for tensors in (masters.values(), moments, average))
    return first, second, third


@pytest.mark.parametrize("kind", some(KINDS, "2", "3 offloaded"))
def test_a_rank_keeps_half_of_masters_moments_and_average(ranks, kind):
    whole = sum(parameter.numel() for parameter in TinyFamily().build_model().parameters())
    found = ranks.run(held, KINDS[kind])
    assert found[0][0] + found[1][0] == whole
    assert all(abs(size - whole / 2) < 40 for sizes in found for size in sizes)


# --- frozen parameters ----------------------------------------------------------------------------------------------

FROZEN = ("words", "blocks.0.mix", "leave")


def train_partly(flags: tuple[str, ...]) -> set[str]:
    """Three steps beside one process that makes them too; the names of what is in a checkpoint."""
    subject = open_strategy("deepspeed", flags, 2, FROZEN)
    reference = subject.reference()
    for number in range(3):
        subject.step(number)
        reference.step(number, 2, 0.0)
    subject.follows(reference, "beside frozen parameters")
    state = subject.state()
    return {*state.model, *state.optimizer_state}


@pytest.mark.parametrize("kind", some(KINDS, "2", "3"))
def test_frozen_parameters_take_part_and_are_not_in_checkpoints(ranks, kind):
    names = {name for name, _ in TinyFamily().build_model().named_parameters()}
    assert ranks.run(train_partly, KINDS[kind])[0] == {name for name in names if not name.startswith(FROZEN)}


# --- shared parameters, and compiled blocks -------------------------------------------------------------------------


class Sharing(TinyFamily):
    """Two blocks with one layer and, by itself, one weight."""

    def build_model(self):
        model = super().build_model()
        model.blocks[1].shift = model.blocks[0].shift
        model.blocks[1].mix.weight = model.blocks[0].mix.weight
        return model


def train_as_one_process(family: TinyFamily | None, flags: tuple[str, ...]) -> set[str]:
    """Three steps beside one process that makes them too; the names of the weights."""
    subject = open_family("deepspeed", flags, 2, family) if family else open_strategy("deepspeed", flags, 2)
    reference = subject.reference()
    for number in range(3):
        subject.step(number)
        reference.step(number, 2, 0.0)
    subject.follows(reference, "after three steps")
    return set(subject.state().model)


@pytest.mark.parametrize("kind", some(["1", "2", "3"], "2", "3"))
def test_parameters_that_are_shared_are_trained_and_kept_once(ranks, kind):
    names = {name for name, _ in Sharing().build_model().named_parameters()}
    assert ranks.run(train_as_one_process, Sharing(), KINDS[kind])[0] == names


class Scaled(TinyFamily):
    """Its prediction is multiplied by a number that trains."""

    def build_model(self):
        model = super().build_model()
        model.scale = torch.nn.Parameter(torch.ones(()))
        model.register_forward_hook(scale)
        return model


def scale(model, _, prediction):
    return prediction * model.scale


@pytest.mark.parametrize("kind", some(["1", "2", "3"], "2", "3"))
def test_a_parameter_without_dimensions_is_trained_and_kept(ranks, kind):
    assert "scale" in ranks.run(train_as_one_process, Scaled(), KINDS[kind])[0]


@pytest.mark.parametrize("kind", some(["2", "3"], "3"))
def test_compiled_blocks_are_trained_as_by_one_process(ranks, kind):
    assert ranks.run(train_as_one_process, None, (*KINDS[kind], "--dynamo_backend=aot_eager"))[0]


# --- optimizers -----------------------------------------------------------------------------------------------------

SETTINGS = {"lr": 0.01, "eps": 1e-3}


class Lion(torch.optim.Optimizer):
    """As the paper has it (https://arxiv.org/abs/2302.06675), but that DeepSpeed takes the sign of zero for one."""

    def __init__(self, groups, lr: float, eps: float) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                state["step"] = state.get("step", torch.tensor(0.0)) + 1
                average = state.setdefault("exp_avg", torch.zeros_like(weight))
                sign = torch.copysign(torch.ones(()), torch.lerp(average, weight.grad, 0.1))
                weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * sign)
                average.lerp_(weight.grad, 0.01)


def adagrad(groups, **settings) -> torch.optim.Optimizer:
    return decouple_decay(torch.optim.Adagrad(groups, **settings))


OPTIMIZERS = {
    "Adam": ({}, torch.optim.AdamW),  # which is what DeepSpeed makes of it, unless it is told otherwise
    "Adam with decay in its gradient": ({"adam_w_mode": False}, torch.optim.Adam),
    "Adagrad": ({}, adagrad),
    "Adagrad offloaded": ({}, adagrad),
    "Lion offloaded": ({"betas": [0.9, 0.99]}, Lion),
}
"""Settings in the JSON, and what is computed. AdamW is what all of the contract is checked with."""
DECAY = 1.0
"""So large that a decay which is added to the gradient shows: Adagrad divides most of it away."""
KEPT = ("Adagrad", "Adagrad offloaded", "Lion offloaded")


def step_beside_torch(kind: str, flags: tuple[str, ...]) -> float:
    """Three steps at rates that change; the largest difference of weights and moments to those of torch's optimizer."""
    subject = open_strategy("deepspeed", (*flags, f"--adam_weight_decay={DECAY}"), 2)
    model = subject.family.build_model()
    model.load_state_dict(subject.first)
    groups = parameter_groups(model, DECAY, matrices(model))
    reference = Reference(model, OPTIMIZERS[kind][1](groups, **SETTINGS), subject.family)
    for number in range(3):
        for group in (*subject.optimizer.param_groups, *reference.optimizer.param_groups):
            group["lr"] = 0.01 * (number + 1)
        subject.step(number)
        reference.step(number, 2, 0.0)
    expected, found = whole_state(capture(model, reference.optimizer)), subject.whole()
    assert expected.keys() <= found.keys()  # DeepSpeed's Lion keeps Adam's second moment, which it never looks at
    return max(float((expected[name] - found[name]).abs().max()) for name in expected)


def of_optimizer(kind: str, stage: int) -> tuple[str, ...]:
    optimizer = {"type": kind.split()[0], "params": OPTIMIZERS[kind][0]}
    offload = {"offload_optimizer": {"device": "cpu"}} if kind.endswith("offloaded") else {}
    document = {"zero_optimization": {"stage": stage, **ALL_CUT, **offload}, "optimizer": optimizer}
    return (f"--deepspeed_config={json.dumps(document)}", "--plugins=optimizers")


STEPPED = [*product(OPTIMIZERS, [1, 2, 3])]
ALTERNATELY = [("Adam", 2), ("Adam with decay in its gradient", 3), ("Adagrad", 2)]
"""Those for which DeepSpeed compiles nothing more than its Adam."""


@pytest.mark.parametrize(("kind", "stage"), some(STEPPED, *ALTERNATELY))
def test_an_optimizer_steps_as_one_of_torch_does(ranks, kind, stage):
    assert max(ranks.run(step_beside_torch, kind, of_optimizer(kind, stage))) < 1e-6


def step_beside_one_process(flags: tuple[str, ...]) -> None:
    subject = open_strategy("deepspeed", flags, 2)
    reference = subject.reference()
    for number in range(3):
        subject.step(number)
        reference.step(number, 2, 0.0)
    subject.follows(reference, "after three steps")


OWN = [*product([2, 3], [("lion", "1e-6"), ("sgd", "0.01")])]


@pytest.mark.parametrize(("stage", "own"), some(OWN, OWN[0], OWN[3]))
def test_smaltis_own_optimizers_step_shards_and_their_state_is_portable(ranks, stage, own):
    """Lion at a rate at which a sign that rounding has changed is within the tolerance."""
    name, rate = own
    flags = ("--plugins=optimizers", f"--optimizer={name}", f"--learning_rate={rate}")
    ranks.run(step_beside_one_process, (*zero(stage), *flags))


def name_of_optimizer(flags: tuple[str, ...]) -> str:
    kind = type(open_strategy("deepspeed", flags, 2).optimizer)
    return f"{kind.__module__}.{kind.__name__}"


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_offloaded_to_nowhere_is_stepped_by_torch(ranks, stage):
    flags = zero(stage, offload_optimizer={"device": "none"}, offload_param={"device": "none"})
    assert set(ranks.run(name_of_optimizer, flags)) == {"torch.optim.adamw.AdamW"}


def test_a_setting_that_an_optimizer_does_not_take_is_told_by_name(ranks):
    document = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"bias_correction": True}}}
    with pytest.raises(RankFailed, match="has no setting 'bias_correction'"):
        ranks.run(name_of_optimizer, (f"--deepspeed_config={json.dumps(document)}",))


def name_in_checkpoints(flags: tuple[str, ...]) -> str:
    return open_strategy("deepspeed", flags, 2).state().optimizer


@pytest.mark.parametrize("offload", [{}, {"offload_optimizer": {"device": "cpu"}}])
@pytest.mark.parametrize(("decoupled", "name"), [(True, "AdamW"), (False, "Adam")])
def test_adam_has_one_name_in_checkpoints_wherever_it_steps(ranks, offload, decoupled, name):
    optimizer = {"type": "Adam", "params": {"adam_w_mode": decoupled}}
    document = {"zero_optimization": {"stage": 2, **offload}, "optimizer": optimizer}
    assert set(ranks.run(name_in_checkpoints, (f"--deepspeed_config={json.dumps(document)}",))) == {name}


MOMENTS = [*product(KEPT, [2, 3])]


@pytest.mark.parametrize(("kind", "stage"), some(MOMENTS, ("Adagrad", 3)))
def test_its_moments_come_back_bit_for_bit(ranks, tmp_path, kind, stage):
    run_check(ranks, "a_checkpoint_comes_back_bit_for_bit", "deepspeed", of_optimizer(kind, stage), tmp_path)


# --- checkpoints of DeepSpeed's own ---------------------------------------------------------------------------------


def save_as_deepspeed(flags: tuple[str, ...], folder: Path) -> bool:
    """DeepSpeed saves, and beside it what it should be; whether DeepSpeed's own tool reads the same weights."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    subject = open_strategy("deepspeed", flags, 2, FROZEN)
    subject.step(60)
    subject.model.save_checkpoint(folder / "theirs")
    expected = subject.whole()
    if subject.parallel.world.rank:
        return True
    save_file(expected, folder / "expected.safetensors")
    read = get_fp32_state_dict_from_zero_checkpoint(str(folder / "theirs"))
    return all(torch.equal(read[name], expected[name]) for name in expected.keys() & read.keys())


@pytest.mark.parametrize("kind", some(["1", "2", "3 offloaded"], "2", "3 offloaded"))
def test_checkpoints_that_deepspeed_wrote_are_converted_bit_for_bit(ranks, tmp_path, kind):
    assert ranks.run(save_as_deepspeed, KINDS[kind], tmp_path) == [True, True]
    convert(tmp_path / "theirs", tmp_path / "ours", FORMATS)
    expected, found = load_file(tmp_path / "expected.safetensors"), {}
    for group in ("model", "optimizer"):
        for path in (tmp_path / "ours" / group).glob("*.safetensors"):
            found |= load_file(path)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert {name for name in found.keys() - expected.keys() if not name.startswith(FROZEN)} == set()
