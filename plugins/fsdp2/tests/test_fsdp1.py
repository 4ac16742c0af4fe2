"""FSDP 1 keeps the contract of a distribution strategy; and what goes beyond it: one group at a time, odd parameters, bf16."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from smalti import Block
from smalti.config.resolution import resolve
from smalti.models.weights import without_weights
from smalti.plugins.discovery import load_plugins
from smalti.plugins.schema import schema_of
from smalti.training.optim.optimizers import matrices, parameter_groups
from smalti_fsdp2.checks import problems
from smalti_fsdp2.fsdp1 import Fsdp1Parallel
from smalti_testing.strategies import STRATEGY, run_check
from smalti_testing.strategy_subject import FLAGS, open_strategy, whole_state
from support.forked_ranks import forked_processes
from support.whole import some

VERSION1 = ("--fsdp_enable", "--fsdp_version=1")


KEPT = ("it_fills_the_model_with_the_first_weights", "steps_are_those_of_one_process", "discarded_gradients_are_gone")
KEPT += ("a_restored_state_continues_bit_for_bit", "a_checkpoint_comes_back_bit_for_bit", "one_process_reads_its_checkpoints")


@pytest.fixture(scope="module")
def one():
    with forked_processes(ranks=1, group=False) as rank:
        yield rank


@pytest.fixture(scope="module")
def two():
    with forked_processes(group=False) as ranks:
        yield ranks


@pytest.mark.parametrize("check", some(STRATEGY.checks, *KEPT[:2]))
def test_one_rank_keeps_the_contract(one, tmp_path, check):
    run_check(one, check, "fsdp2", VERSION1, tmp_path)


@pytest.mark.parametrize("check", some(STRATEGY.checks, *KEPT))
def test_two_ranks_keep_the_contract(two, tmp_path, check):
    run_check(two, check, "fsdp2", VERSION1, tmp_path)


# --- a model with everything that is unusual ------------------------------------------------------------------------


class OddBlock(nn.Module):
    """A trained and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5, bias=False).requires_grad_(False)

    def forward(self, inputs):
        return inputs + torch.tanh(self.frozen(self.inner(inputs)))


class OddModel(nn.Module):
    """Blocks, a parameter that takes no part, one that is used twice, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OddBlock() for _ in range(3))
        self.spare = nn.Parameter(torch.ones(3, 3))
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("shift", torch.tensor(0.25), persistent=False)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return self.second(self.first(inputs)) * self.scale + self.shift


@dataclass
class Watched:
    """First weights that note what is asked for, and how many numbers of the model were in memory each time."""

    model: nn.Module
    tensors: dict[str, torch.Tensor]
    asked: list[str] = field(default_factory=list)
    present: list[int] = field(default_factory=list)

    def names(self):
        return iter(self.tensors)

    def get(self, name):
        storages = [parameter.untyped_storage() for parameter in self.model.parameters() if not parameter.is_meta]
        self.asked.append(name)
        self.present.append(sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()) // 4)
        return self.tensors[name].clone()


@dataclass
class Odd:
    """The odd model, sharded on this rank, and the same as it is in one process."""

    parallel: Fsdp1Parallel
    model: nn.Module
    optimizer: torch.optim.Optimizer
    weights: Watched
    plain: OddModel

    def state(self):
        return self.parallel.state.portable()

    def step(self, number, micro=1, limit=0.0):
        """A step on this rank's samples, all micro-batches alike; the norm of the gradient."""
        for count in range(micro):
            with self.parallel.accumulate(last=count == micro - 1):
                with self.parallel.autocast():
                    loss = self.model(samples(number, self.parallel.world.rank)).float().square().mean()
                self.parallel.backward(loss)
        norm = float(self.parallel.clip_gradients(limit))
        self.parallel.step()
        return norm


def all_tensors(model):
    """Parameters, frozen ones too, and persistent buffers; what is shared once."""
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not any(tensor is other for other in found.values()):
            found[name] = tensor
    return found


def samples(number, rank):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + rank))


def open_odd(*flags) -> Odd:
    config = resolve(schema_of(load_plugins()), [*FLAGS, *VERSION1, "--num_processes=2", *flags], environment={})
    parallel = Fsdp1Parallel(config)
    torch.manual_seed(3)
    plain = OddModel()
    plain.scale.fill_(0.75)
    with without_weights():
        bare = OddModel()
    weights = Watched(bare, plain.state_dict())
    blocks = [Block(path=f"blocks.{number}", class_name="OddBlock", parameters=55) for number in range(3)]
    decayed = matrices(bare)
    model = parallel.wrap(bare, blocks, weights)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1, decayed), lr=0.01, eps=1e-3)
    return Odd(parallel, *parallel.setup(model, optimizer), weights, plain)


@pytest.fixture(scope="module")
def pair():
    with forked_processes(group=False) as processes:
        yield processes


def filled(*flags):
    """What was asked for, the most that was in memory, and whether the weights are right."""
    odd = open_odd(*flags)
    found = whole_state(odd.state())
    right = all(torch.equal(found[name], tensor) for name, tensor in all_tensors(odd.plain).items())
    return odd.weights.asked, max(odd.weights.present), right and found.keys() == all_tensors(odd.plain).keys()


def test_no_more_than_one_group_is_whole_while_the_model_is_filled(pair):
    whole = sum(parameter.numel() for parameter in OddModel().parameters())
    assert [most < 0.7 * whole for _, most, _ in pair.run(filled)] == [True, True]


@pytest.mark.parametrize("flags", [(), ("--fsdp_cpu_ram_efficient_loading",)])
def test_every_parameter_and_buffer_gets_its_first_value_under_its_own_name(pair, flags):
    assert [right for *_, right in pair.run(filled, *flags)] == [True, True]


def test_only_rank_0_reads_parameters_where_that_is_asked_for(pair):
    (first, *_), (second, *_) = pair.run(filled, "--fsdp_cpu_ram_efficient_loading")
    assert (set(second), len(first)) == ({"scale"}, len(all_tensors(OddModel())))


def trained():
    """The largest difference from one process after two steps, and the parameters that differ though they are frozen."""
    odd = open_odd()
    groups = parameter_groups(odd.plain, 0.1, matrices(odd.plain))
    optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-3)
    for number in range(2):
        odd.step(number, limit=1.0)
        torch.stack([odd.plain(samples(number, rank)).square().mean() for rank in range(2)]).mean().backward()
        nn.utils.clip_grad_norm_(odd.plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    found, wanted = whole_state(odd.state()), all_tensors(odd.plain)
    return {name: float((found[name] - tensor.detach()).abs().max()) for name, tensor in wanted.items() if name != "spare"}


def test_frozen_and_shared_parameters_are_trained_as_in_one_process(pair):
    assert max(pair.run(trained)[0].values()) < 1e-6


def put_back():
    """Names that differ after going back and on again, and whether the run still holds the optimizer's groups."""
    odd = open_odd()
    odd.step(0)
    state, groups = odd.state(), odd.optimizer.param_groups
    odd.step(1)
    wanted = whole_state(odd.state())
    odd.parallel.state.load(state)
    odd.step(1)
    found = whole_state(odd.state())
    return [name for name in wanted if not torch.equal(wanted[name], found[name])], odd.optimizer.param_groups is groups


def test_the_state_is_a_copy_that_goes_on_bit_for_bit(pair):
    assert [different for different, _ in pair.run(put_back)] == [[], []]


def test_the_optimizers_groups_stay_the_ones_that_the_run_holds(pair):
    assert [same for _, same in pair.run(put_back)] == [True, True]


def without_moments():
    """The moments that are left after a state of a run that had not stepped yet was put back."""
    odd = open_odd()
    first = odd.state()
    odd.step(0)
    odd.parallel.state.load(first)
    return odd.state().optimizer_state


def test_a_state_from_before_the_first_step_leaves_no_moments(pair):
    assert pair.run(without_moments) == [{}, {}]


def changed_in_place():
    """How far the model's answer is from that with halved weights, after its weights were halved in place."""
    odd = open_odd("--no_fsdp_reshard_after_forward")
    with torch.no_grad():
        odd.model(samples(0, 0))
        for model in (odd.model, odd.plain):
            for parameter in model.parameters():
                parameter.mul_(0.5)
        odd.parallel.state.invalidate_gathered()
        return float((odd.model(samples(0, 0)) - odd.plain(samples(0, 0))).abs().max())


def test_after_a_refresh_the_model_computes_with_weights_that_were_changed_in_place(pair):
    assert max(pair.run(changed_in_place)) < 1e-6


def growth():
    """The norm of the gradient of 48 equal micro-batches over that of one."""
    odd = open_odd("--mixed_precision=bf16")
    one = odd.step(0)
    odd.parallel.state.load(open_odd().state())
    return odd.step(0, micro=48) / one


def test_in_bf16_gradients_of_micro_batches_are_added_up_in_fp32(pair):
    assert pair.run(growth) == pytest.approx([48, 48], rel=1e-4)


def losses_in_bf16():
    found = []
    for version in (1, 2):
        subject = open_strategy("fsdp2", ("--fsdp_enable", f"--fsdp_version={version}", "--mixed_precision=bf16"), 2)
        subject.parallel.state.invalidate_gathered()
        found.append(subject.step(0))
    return found


def test_bf16_means_the_same_in_both_versions(pair):
    first, second = pair.run(losses_in_bf16)[0]
    assert first == pytest.approx(second, rel=1e-3)


def test_two_copies_of_the_model_are_kept_in_step_and_saved_as_one(tmp_path):
    checks = ["steps_are_those_of_one_process", "a_checkpoint_comes_back_bit_for_bit", "one_process_reads_its_checkpoints"]
    with forked_processes(ranks=4, group=False) as four:
        for check in checks:
            run_check(four, check, "fsdp2", (*VERSION1, "--fsdp_shard_size=2"), tmp_path)


# --- what it does not do --------------------------------------------------------------------------------------------


def refused(*flags):
    config = resolve(schema_of(load_plugins()), [*VERSION1, *flags], environment={})
    return [problem.where for problem in problems(config)]


@pytest.mark.parametrize(
    "flags",
    [
        ["--use_ema"],
        ["--fsdp_output_dtype=bf16"],
        ["--fsdp_forward_prefetch=2"],
        ["--fsdp_backward_prefetch=2"],
        ["--fsdp_shard_size=1", "--num_processes=2"],
        ["--gradient_accumulation_steps=2", "--fsdp_cpu_offload", "--mixed_precision=bf16"],
        ["--context_parallel_size=2", "--num_processes=2"],
    ],
    ids=lambda flags: flags[0],
)
def test_what_only_version_2_does_is_refused_before_launch(flags):
    assert [flags[0].split("=")[0] in where for where in refused(*flags)] == [True]


def test_nothing_else_is_refused():
    assert refused("--num_processes=4", "--fsdp_shard_size=2", "--gradient_accumulation_steps=2") == []
