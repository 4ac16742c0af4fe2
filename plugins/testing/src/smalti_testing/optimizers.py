"""The contract of an optimizer that a plugin registers: what the loop, checkpoints and strategies rely on. Runs on the CPU.

It is built as a run builds it, by its name, for the model of `TinyFamily`. Gradients are random numbers made from the number of
the step, so that the same steps can be repeated.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from smalti import OptimizerEntry
from smalti.checkpoint import Snapshot, load, save
from smalti.config import Config, OptimizerOptions, resolve
from smalti.hookspecs import HookSpecs
from smalti.models import materialise
from smalti.parallel import PortableState, capture, restore
from smalti.plugins import BUILT_IN, Plugins, Selection, find_optimizer, load_plugins, schema_of
from smalti.training import build_registered, matrices, parameter_groups
from smalti_testing.contract import Contract, expect
from smalti_testing.ranks import RankProcesses, two_processes
from smalti_testing.strategies import SingleRank
from smalti_testing.tiny import TinyFamily

FLAGS = ("--learning_rate=0.01", "--adam_weight_decay=0.1", "--accelerate_config=none")
_STEPS = 3
_TOLERANCE = 1e-5
_SHARDED_TOLERANCE = 0.05
"""Relative to a step: Muon multiplies in bf16, and sums of rounded products depend on how they are divided."""


@dataclass
class Training:
    """A model and the optimizer under test, over all of its parameters."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, number: int) -> None:
        """One step with the gradients of this number."""
        random = torch.Generator().manual_seed(number)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=random) if parameter.requires_grad else None
        self.optimizer.step()

    def steps(self, *numbers: int) -> None:
        for number in numbers:
            self.step(number)

    def parameters(self) -> dict[str, Tensor]:
        """Copies of the parameters, by name."""
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def state(self) -> dict[str, Tensor]:
        """Copies of the parameters and of what the optimizer keeps."""
        found = capture(self.model, self.optimizer)
        kept = {f"{name}.{key}": each.clone() for name, held in found.optimizer_state.items() for key, each in held.items()}
        return {**self.parameters(), **kept}


@dataclass(frozen=True)
class OptimizerSubject:
    """One optimizer by the name of its plugin and its own. `flags` are given to every run, `folder` is empty.

    `ranks` are two processes with a process group, for the check of sharded parameters; None: it starts them.
    """

    plugin: str
    optimizer: str
    flags: tuple[str, ...] = ()
    folder: Path = field(default_factory=Path)
    ranks: RankProcesses | None = None

    @cached_property
    def plugins(self) -> Plugins:
        alone = self.plugin in BUILT_IN
        return load_plugins(Selection(without=("all",)) if alone else Selection(only=(self.plugin,)))

    @cached_property
    def registry(self) -> list[OptimizerEntry]:
        return self.plugins.gather(HookSpecs.register_optimizers)

    @property
    def entry(self) -> OptimizerEntry:
        return find_optimizer(self.optimizer, self.registry)

    @cached_property
    def config(self) -> Config:
        arguments = [*FLAGS, f"--optimizer={self.optimizer}", *self.flags]
        return resolve(schema_of(self.plugins), arguments, environment={})

    def training(self, *, seed: int = 3, frozen: tuple[str, ...] = ()) -> Training:
        """A new model and optimizer; the submodules `frozen` do not train."""
        family = TinyFamily(frozen=frozen)
        model = materialise(family.build_model(), family.weights(seed), "cpu").train()
        return Training(model, self.build(model, matrices(model)))

    def build(self, model: nn.Module, decayed: frozenset[str]) -> torch.optim.Optimizer:
        """As a run builds it."""
        groups = parameter_groups(model, self.config[OptimizerOptions].adam_weight_decay, decayed)
        return build_registered(groups, self.config, self.registry)


def check_optimizer(plugin: str, optimizer: str, *flags: str) -> None:
    """Every check of the optimizer contract, for what `--optimizer=OPTIMIZER` means when `plugin` is installed."""
    with tempfile.TemporaryDirectory() as folder:
        OPTIMIZER.run_all(OptimizerSubject(plugin, optimizer, flags, Path(folder)))


OPTIMIZER: Contract[OptimizerSubject] = Contract("optimizer")


@OPTIMIZER.check
def it_steps_every_parameter_that_trains_and_no_other(subject: OptimizerSubject) -> None:
    """The groups hold (name, parameter) pairs of what trains. The optimizer keeps all of them, each in one group.

    Pass the groups to `torch.optim.Optimizer.__init__` as they are, and go through `param_groups` in `step`.
    """
    training = subject.training(frozen=("enter",))
    before = training.parameters()
    training.step(1)
    for name, parameter in training.model.named_parameters():
        moved = not torch.equal(parameter, before[name])
        expect(moved == parameter.requires_grad, f"{name} was {'stepped' if moved else 'not stepped'}")
        expect(bool(torch.isfinite(parameter).all()), f"{name} is not finite after a step")
    held = [id(parameter) for group in training.optimizer.param_groups for parameter in group["params"]]
    trained = [id(parameter) for parameter in training.model.parameters() if parameter.requires_grad]
    expect(sorted(held) == sorted(trained), "param_groups are not the parameters that train, each once")


@OPTIMIZER.check
def its_steps_go_downhill(subject: OptimizerSubject) -> None:
    """A hundred steps on a loss with one minimum make it smaller. If it grows, look at the sign of the update."""
    training = subject.training()
    for group in training.optimizer.param_groups:
        group["weight_decay"] = 0.0
    goal = {name: each + 1 for name, each in training.parameters().items()}
    for _ in range(100):
        for name, parameter in training.model.named_parameters():
            parameter.grad = parameter.detach() - goal[name]
        training.optimizer.step()
    for name, parameter in training.model.named_parameters():
        far = float((parameter.detach() - goal[name]).norm() / parameter.numel() ** 0.5)
        expect(far < 1, f"{name} is {far:.3g} away from the minimum after a hundred steps, and began 1 away")


@OPTIMIZER.check
def it_takes_the_learning_rate_of_each_step(subject: OptimizerSubject) -> None:
    """The schedule sets `group["lr"]` before each step; at a rate of 0 nothing moves, weight decay included.

    Read the rate from the group in `step`; a rate that is kept elsewhere stays at its first value.
    """
    training = subject.training()
    training.step(1)
    before = training.parameters()
    for group in training.optimizer.param_groups:
        group["lr"] = 0.0
    training.step(2)
    _same(before, training.parameters(), 'a step with group["lr"] = 0 has changed')


@OPTIMIZER.check
def it_decays_the_weights_of_the_groups_that_say_so(subject: OptimizerSubject) -> None:
    """Matrices are in a group with the `weight_decay` of the run, norms and biases in one with 0.

    Read it from the group in `step`. One that has no weight decay says so in `accepts`; then nothing may shrink.
    """
    training = subject.training()
    before, decays = training.parameters(), "weight_decay" in subject.entry.accepts
    for parameter in training.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    training.optimizer.step()
    decayed = matrices(training.model)
    for name, parameter in training.model.named_parameters():
        one, other = (float(each.double().norm()) for each in (before[name], parameter.detach()))
        if decays and name in decayed:
            expect(other < one, f"{name} has weight_decay 0.1 and did not shrink in a step without a gradient")
        else:
            expect(one == other, f"{name} has no weight decay and changed in a step without a gradient")


@OPTIMIZER.check
def parameters_without_a_gradient_stay(subject: OptimizerSubject) -> None:
    """A part of the model that a step has not used has `grad` None: it is left as it is, also by weight decay."""
    training = subject.training()
    before = training.parameters()
    for name, parameter in training.model.named_parameters():
        parameter.grad = torch.ones_like(parameter) if name.startswith("leave") else None
    training.optimizer.step()
    after = training.parameters()
    unused = [name for name in before if not name.startswith("leave")]
    _same({name: before[name] for name in unused}, {name: after[name] for name in unused}, "without a gradient, changed:")


@OPTIMIZER.check
def the_same_gradients_make_the_same_steps(subject: OptimizerSubject) -> None:
    """Replicas stay equal because each of them steps for itself, with the same gradients.

    Draw no random numbers; if the mathematics needs them, make them from the number of the step.
    """
    one, other = subject.training(), subject.training()
    one.steps(*range(_STEPS))
    torch.manual_seed(99)
    other.steps(*range(_STEPS))
    _same(one.state(), other.state(), "the second time, different:")


@OPTIMIZER.check
def its_state_fits_into_a_checkpoint(subject: OptimizerSubject) -> None:
    """A checkpoint holds tensors by parameter and name; what is no tensor, in state or groups, becomes JSON.

    Numbers, texts, lists and None are fine; an object of yours is not. `state[parameter]` has no dots in its keys.
    """
    training = subject.training()
    training.steps(*range(_STEPS))
    state = capture(training.model, training.optimizer)
    json.dumps(state.param_groups, allow_nan=False)
    unknown = state.optimizer_state.keys() - dict(training.model.named_parameters()).keys()
    expect(not unknown, f"there is state of {', '.join(sorted(unknown)[:3])}, which the model does not have")


@OPTIMIZER.check
def a_resumed_run_goes_on_bit_for_bit(subject: OptimizerSubject) -> None:
    """Save, build everything again, load, train the same: not one bit may differ from the run that was not interrupted.

    What a step depends on belongs into `self.state[parameter]` or into the group: a counter or a buffer in an attribute of the
    optimizer itself is lost.
    """
    training = subject.training()
    training.steps(*range(_STEPS))
    resumed = _resumed(training, subject)
    _same(training.state(), resumed.state(), "after loading, different:")
    for each in (training, resumed):
        each.steps(*range(_STEPS, 2 * _STEPS))
    _same(training.state(), resumed.state(), "a few steps after resuming, different:")


@OPTIMIZER.check
def hyper_parameters_of_the_groups_come_back(subject: OptimizerSubject) -> None:
    """What a group says when it is saved, it says after resuming, in the same type: rates, decays, whatever is yours."""
    training = subject.training()
    for number, group in enumerate(training.optimizer.param_groups):
        group["lr"], group["weight_decay"] = 0.001 * (number + 1), 0.01 * (number + 1)
    training.step(1)
    resumed = _resumed(training, subject)
    for one, other in zip(_settings(training), _settings(resumed), strict=True):
        expect(one == other, f"a group had {one}, and has {other} after resuming")


@OPTIMIZER.check
def flat_parts_of_parameters_are_stepped_like_the_whole(subject: OptimizerSubject) -> None:
    """Some strategies give an optimizer flat slices of parameters. `flat=False` in the entry keeps it from those.

    It works on slices if it treats each number by itself: no norm, mean or shape of a whole parameter.
    """
    if not subject.entry.flat:
        return
    whole = subject.training()
    parts, decayed = _sliced(whole.model)
    optimizer = subject.build(parts, decayed)
    for number in range(_STEPS):
        whole.step(number)
        for name, gradient in ((name, each.grad) for name, each in whole.model.named_parameters()):
            assert gradient is not None
            for part, piece in zip(_parts(parts, name), _halves(gradient), strict=True):
                part.grad = piece.clone()
        optimizer.step()
    for name, parameter in whole.model.named_parameters():
        joined = torch.cat([part.detach() for part in _parts(parts, name)]).view_as(parameter)
        apart = float((joined - parameter.detach()).abs().max())
        expect(apart < _TOLERANCE, f"{name} is {apart:.1e} away when it is stepped in two slices; flat=False says so")


@OPTIMIZER.check
def sharded_parameters_are_stepped_like_the_whole(subject: OptimizerSubject) -> None:
    """FSDP2 shards parameters, gradients and state by rows, as DTensors. `shards=False` in the entry says that it does not.

    A norm or mean of a whole parameter has to be summed over ranks: compute it with DTensors, or reduce it over their mesh.
    """
    if not subject.entry.shards:
        return
    with two_processes() if subject.ranks is None else nullcontext(subject.ranks) as ranks:
        found = ranks.run(deviation_of_shards, subject.plugin, subject.optimizer, subject.flags)
    for name, apart in found[0].items():
        message = f"the steps of {name} differ by {apart:.1%} when two ranks have a half of it each; shards=False says so"
        expect(apart < _SHARDED_TOLERANCE, message)


def deviation_of_shards(plugin: str, optimizer: str, flags: tuple[str, ...]) -> dict[str, float]:
    """By parameter, how much steps of shards differ from those of the whole parameter, relative to the steps. *Collective*.

    Gradients grow from row to row, so that a mean over the rows of one rank is another than that over all.
    """
    subject = OptimizerSubject(plugin, optimizer, flags)
    whole, parts = subject.training(), subject.training().model
    mesh, before = init_device_mesh("cpu", (dist.get_world_size(),)), whole.parameters()
    for module in parts.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    sharded, random = subject.build(parts, matrices(whole.model)), torch.Generator().manual_seed(0)
    for _ in range(_STEPS):
        for one, part in zip(whole.model.parameters(), parts.parameters(), strict=True):
            growing = torch.logspace(0, 1, len(one)).view(-1, *[1] * (one.dim() - 1))
            one.grad = torch.randn(one.shape, generator=random) * growing
            part.grad = distribute_tensor(one.grad, mesh, [Shard(0)])
        whole.optimizer.step()
        sharded.step()
    found = {}
    for (name, one), part in zip(whole.model.named_parameters(), parts.parameters(), strict=True):
        apart, moved = (one - cast(DTensor, part).full_tensor()).abs().max(), (one - before[name]).abs().max()
        found[name] = float(apart / moved)
    return found


def _resumed(training: Training, subject: OptimizerSubject) -> Training:
    """Another model and optimizer, from a checkpoint of this one."""
    folder = Path(tempfile.mkdtemp(dir=subject.folder))
    written = save(folder, _snapshot(capture(training.model, training.optimizer)), SingleRank())  # type: ignore[arg-type]
    fresh = subject.training(seed=8)
    into = _snapshot(capture(fresh.model, fresh.optimizer))
    load(written.path, into, SingleRank())  # type: ignore[arg-type]
    restore(fresh.model, fresh.optimizer, into.state)
    return fresh


def _snapshot(state: PortableState) -> Snapshot:
    return Snapshot(step=1, state=state, trainer={"step": 1}, plugins=(f"smalti {version('smalti')}",))


def _settings(training: Training) -> list[dict[str, str]]:
    """The hyper-parameters of each group, with their types."""
    left_out = ("params", "param_names")
    groups = training.optimizer.param_groups
    return [{key: repr(value) for key, value in group.items() if key not in left_out} for group in groups]


def _sliced(model: nn.Module) -> tuple[nn.Module, frozenset[str]]:
    """A module that has each parameter in two flat pieces, and the names of those that decay."""
    parts = nn.Module()
    for name, parameter in model.named_parameters():
        pieces = [nn.Parameter(piece.clone()) for piece in _halves(parameter.detach())]
        parts.register_module(name.replace(".", "_"), nn.ParameterList(pieces))
    whole = {name.replace(".", "_") for name in matrices(model)}
    return parts, frozenset(name for name, _ in parts.named_parameters() if name.partition(".")[0] in whole)


def _parts(parts: nn.Module, name: str) -> list[nn.Parameter]:
    return list(parts.get_submodule(name.replace(".", "_")).parameters())


def _halves(tensor: Tensor) -> tuple[Tensor, Tensor]:
    flat = tensor.flatten()
    middle = len(flat) // 2
    return flat[:middle], flat[middle:]


def _same(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], context: str) -> None:
    expect(wanted.keys() == found.keys(), f"{context} the names {sorted(wanted.keys() ^ found.keys())[:5]}")
    different = [name for name in wanted if not torch.equal(wanted[name], found[name])]
    expect(not different, f"{context} {', '.join(different[:5])}")
