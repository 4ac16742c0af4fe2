"""The contract of a distribution strategy: a plugin that claims a run and gives it a `Parallel`. Checks run on real ranks.

The strategy is opened as a run opens it: options, plan, `Parallel`, wrapped model, optimizer, `bind`. It trains `TinyFamily` on
the CPU, and next to it an ordinary model and optimizer in one process are fed all ranks' samples at once. Both must stay the
same. That second model starts from the strategy's portable state each time, so the checks do not depend on their order.

Shapes: B samples of one micro-batch, (B, 3, H, W).
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from smalti.checkpoint.portable import capture, restore
from smalti.checkpoint.reader import load
from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.writer import save
from smalti.config import Config, resolve, schema_of
from smalti.hookspecs import HookSpecs
from smalti.models.weights import materialise
from smalti.parallel import Parallel, PortableState
from smalti.plugins import BUILT_IN, Plugins, Selection, load_plugins
from smalti.run import build_model, build_optimizer, open_parallel
from smalti.strategy import choose_distributed
from smalti.testing.contract import Contract, expect
from smalti.testing.ranks import Ranks, two_processes
from smalti.testing.tiny import TinyFamily
from smalti.types import Checkpoint, DistributedPlan, World

FLAGS = ("--mixed_precision=no", "--use_cpu", "--learning_rate=0.01", "--adam_epsilon=1e-3", "--accelerate_config=none")
"""A large epsilon, because Adam makes a whole step of a rounding error in a gradient that is nearly zero."""
MICRO, BATCH = 2, 2
"""Micro-batches of a step, and samples in each."""
SEED = 3


class Alone:
    """The part of a `Parallel` that checkpoints need, for one process that asks nobody."""

    world = World()

    def share(self, value: str) -> Sequence[str]:
        return [value]


@dataclass
class Reference:
    """An ordinary model and its optimizer, in one process."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    family: TinyFamily

    def step(self, number: int, ranks: int, limit: float) -> float:
        """One optimizer step on the samples of all ranks together; the norm of its gradient."""
        losses = [_loss(self.family, self.model, number, rank, micro) for rank in range(ranks) for micro in range(MICRO)]
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)


@dataclass
class StrategySubject:
    """One rank's view of a strategy that is open. `folder` is seen by all ranks; each check takes another part of it."""

    name: str
    config: Config
    plugins: Plugins
    plan: DistributedPlan
    parallel: Parallel
    backend: HookSpecs
    family: TinyFamily
    model: nn.Module
    optimizer: torch.optim.Optimizer
    first: dict[str, Tensor]
    """The whole weights right after wrapping."""
    folder: Path = field(default_factory=Path)

    def state(self) -> PortableState:
        return self.parallel.portable_state(self.model, self.optimizer)

    def whole(self) -> dict[str, Tensor]:
        """Weights and moments as whole tensors on the CPU, copied. *Collective*."""
        return whole_state(self.state())

    def reference(self) -> Reference:
        """An ordinary model and optimizer in the state in which the strategy is. *Collective*."""
        state, reference = self.state(), self.fresh_reference()
        moments = {
            name: {moment: whole_tensor(tensor) for moment, tensor in found.items()} for name, found in state.moments.items()
        }
        plain = PortableState(
            model={name: whole_tensor(tensor) for name, tensor in state.model.items()},
            moments=moments,
            settings=state.settings,
            optimizer=type(reference.optimizer).__name__,
        )
        restore(reference.model, reference.optimizer, plain)
        return reference

    def fresh_reference(self, seed: int = SEED) -> Reference:
        model = materialise(build_model(self.config, self.plugins, self.family)[0], self.family.weights(seed), "cpu")
        alone = load_plugins(Selection(without=("all",)))
        optimizer = build_optimizer(self.config, alone, _Unwrapped(), model)  # type: ignore[arg-type]
        return Reference(model, optimizer, self.family)

    def step(self, number: int, *, limit: float = 0.0) -> float:
        """One optimizer step on this rank's samples, as the loop makes it; the norm of its gradient. *Collective*."""
        self.accumulate(number)
        norm = float(self.parallel.clip_gradients(limit))
        self.parallel.step()
        return norm

    def accumulate(self, number: int) -> None:
        """The gradients of one step."""
        for micro in range(MICRO):
            with self.parallel.accumulate(last=micro == MICRO - 1):
                with self.parallel.autocast():
                    loss = _loss(self.family, self.model, number, self.parallel.world.rank, micro) / MICRO
                self.parallel.backward(loss)

    def follows(self, reference: Reference, told: str) -> None:
        """Expect the strategy's state to be the reference's, but for rounding. *Collective*."""
        wanted, found = whole_state(capture(reference.model, reference.optimizer)), self.whole()
        odd = sorted(found.keys() ^ wanted.keys())
        expect(not odd, f"{told}: the state has too many or too few of {odd[:3]}")
        for name, tensor in wanted.items():
            worst = float((tensor.double() - found[name].double()).abs().max()) if tensor.numel() else 0.0
            expect(worst <= 2e-5, f"{told}: {name} is {worst:.1e} away from what one process has")


class _Unwrapped:
    """What building an optimizer asks of a `Parallel`, for a model that nothing has wrapped."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model


def check_parallel(name: str, *flags: str, ranks: int = 2, seconds: float = 60.0) -> None:
    """Every check of the strategy contract, on `ranks` processes, for the plugin `name` when a run is given these flags.

    The plugin must be installed. `seconds` is how long a check may take. Raises `RankFailed` with the tracebacks of all ranks.
    """
    with two_processes(ranks=ranks, group=False, seconds=seconds) as processes, tempfile.TemporaryDirectory() as folder:
        for check in STRATEGY.checks:
            run_check(processes, check, name, flags, Path(folder))


def run_check(processes: Ranks, check: str, name: str, flags: Sequence[str], folder: Path) -> None:
    """One check on all of `processes`, which must have been started without a group."""
    processes.run(on_rank, check, name, tuple(flags), processes.size, folder)


def on_rank(check: str, name: str, flags: tuple[str, ...], ranks: int, folder: Path) -> None:
    """One check on this rank; the others run the same one."""
    subject = open_strategy(name, flags, ranks)
    subject.folder = folder / check
    subject.folder.mkdir(exist_ok=True)
    STRATEGY.run(check, subject)


@cache
def open_strategy(name: str, flags: tuple[str, ...], ranks: int) -> StrategySubject:
    """The strategy as a run opens it, once in each process."""
    plugins = load_plugins(Selection(without=("all",)) if name in BUILT_IN else Selection(only=(name,)))
    config = resolve(schema_of(plugins), [*FLAGS, f"--num_processes={ranks}", *flags], environment={})
    plan = choose_distributed(config, plugins)
    parallel = open_parallel(plan, config)
    family = TinyFamily()
    family.to(parallel.world.device)
    bare, blocks = build_model(config, plugins, family)
    backend = plugins.backend(plan)
    model = backend.wrap_model(model=bare, blocks=blocks, parallel=parallel, weights=family.weights(SEED))
    expect(model is not None, f"wrap_model of {plan.name!r} gave no model: it is the chosen backend, so it must")
    assert model is not None
    model, optimizer = parallel.bind(model, build_optimizer(config, plugins, parallel, model))
    model.train()
    first = {name: whole_tensor(tensor) for name, tensor in parallel.portable_state(model, optimizer).model.items()}
    return StrategySubject(name, config, plugins, plan, parallel, backend, family, model, optimizer, first)


STRATEGY: Contract[StrategySubject] = Contract("strategy")


@STRATEGY.check
def its_flags_choose_it(subject: StrategySubject) -> None:
    """With these flags, `configure_distributed` claims the run under the plugin's own name, with a title for people.

    Another plan was chosen: the flags do not switch this one on, or its plan carries another name.
    """
    expect(subject.plan.name == subject.name, f"{subject.plan.title!r} of {subject.plan.name!r} was chosen")
    expect(bool(subject.plan.title), "the plan has no title")


@STRATEGY.check
def its_world_is_the_launchers(subject: StrategySubject) -> None:
    """Ranks, sizes and the device come from the launcher's environment; every rank is there once and one of them is main."""
    world, count = subject.parallel.world, int(subject.config.value("num_processes"))  # type: ignore[call-overload]
    told = subject.parallel.share(f"{world.rank} {world.size} {world.is_main}")
    expect(list(told) == [f"{rank} {count} {rank == 0}" for rank in range(count)], f"the ranks say {list(told)}")
    torch.device(world.device)


@STRATEGY.check
def it_fills_the_model_with_the_first_weights(subject: StrategySubject) -> None:
    """`wrap_model` gets a model on the meta device and gives one with the tensors of `weights`, on this rank's device.

    The names in `unwrap(model)` and in the portable state are the family's; a wrapper's prefix has to come off.
    """
    wanted = subject.family.weights(SEED)
    expect(set(subject.first) == set(wanted.names()), f"the state has the names {sorted(subject.first)[:5]}")
    for name, tensor in subject.first.items():
        expect(torch.equal(tensor, wanted.get(name)), f"{name} is not what weights.get() gave")
    names = {name for name, _ in subject.parallel.unwrap(subject.model).named_parameters()}
    expect(names == set(subject.first), f"unwrap() leaves the names {sorted(names)[:5]}")


@STRATEGY.check
def the_mean_is_over_ranks_and_keeps_what_is_not_finite(subject: StrategySubject) -> None:
    """The loss is told to the user, and a step is skipped on all ranks when it is not finite on any.

    Sum, then divide; a maximum or a mean over some ranks would let ranks go separate ways.
    """
    world = subject.parallel.world
    value = torch.tensor(float(world.rank + 1), device=world.device)
    found = float(subject.parallel.mean(value))
    expect(math.isclose(found, (world.size + 1) / 2, rel_tol=1e-6), f"the mean of 1 to {world.size} is {found}")
    expect(float(value) == world.rank + 1, "mean() has changed its argument")
    for wrong in (math.nan, math.inf):
        last = world.rank == world.size - 1
        told = float(subject.parallel.mean(torch.tensor(wrong if last else 1.0, device=world.device)))
        expect(not math.isfinite(told), f"{wrong} on one rank is {told} on rank {world.rank}")


@STRATEGY.check
def gather_gives_every_ranks_tensor_in_order(subject: StrategySubject) -> None:
    """One tensor from each rank, on every rank, in the order of ranks, for any shape and dtype."""
    world = subject.parallel.world
    for shape, dtype in (((), torch.float32), ((2, 3), torch.float32), ((4,), torch.int64)):
        found = subject.parallel.gather(torch.full(shape, world.rank, dtype=dtype, device=world.device))
        expect([int(each.flatten()[0]) for each in found] == list(range(world.size)), f"gather() of {shape} gave {found}")
        expect(all(each.shape == shape and each.dtype == dtype for each in found), f"gather() of {shape} gave {found}")


@STRATEGY.check
def the_largest_code_is_agreed_on(subject: StrategySubject) -> None:
    """Stops are agreed on with this: a rank that hears another answer leaves alone, and the others hang.

    Codes go up to 2**40; they must not pass through a floating-point number.
    """
    world = subject.parallel.world
    for code, wanted in ((world.rank, world.size - 1), (-world.rank, 0), (2**40 + 1 - world.rank, 2**40 + 1), (0, 0)):
        found = subject.parallel.agree(code)
        expect(isinstance(found, int) and found == wanted, f"agree() gave {found!r} instead of {wanted}")


@STRATEGY.check
def texts_are_shared_as_they_are(subject: StrategySubject) -> None:
    """One text from each rank in their order: empty ones, long ones, of different length, in any script."""
    world = subject.parallel.world
    for text in ("", "größer 日本 \n\t" * (world.rank + 1), "x" * 100_000 * (world.rank + 1)):
        mine = f"{world.rank}{text}"
        found = subject.parallel.share(mine)
        expect([each[:1] for each in found] == [str(rank) for rank in range(world.size)], "share() has another order")
        expect(found[world.rank] == mine, "share() has changed a text")


@STRATEGY.check
def a_barrier_waits_for_everyone(subject: StrategySubject) -> None:
    """Files that one rank has written before the barrier are there for every rank after it."""
    mark = subject.folder / f"mark-{time.time_ns()}"
    name = subject.parallel.share(mark.name)[0]
    if subject.parallel.world.is_main:
        time.sleep(0.3)
        (subject.folder / name).touch()
    subject.parallel.barrier()
    expect((subject.folder / name).exists(), "a rank came out of the barrier before another had gone in")


@STRATEGY.check
def steps_are_those_of_one_process(subject: StrategySubject) -> None:
    """Three steps of several micro-batches on every rank change weights and moments as one process with all samples would.

    Gradients are averaged over ranks (not summed), added over micro-batches, and cleared by `step`. If this fails and the check
    of the norm does not, look at what happens between gradients and weights.
    """
    reference = subject.reference()
    for number in range(3):
        subject.step(number)
        reference.step(number, subject.parallel.world.size, 0.0)
    subject.follows(reference, "after three steps")


@STRATEGY.check
def the_norm_is_that_of_the_whole_gradient(subject: StrategySubject) -> None:
    """The same number on every rank: over all parameters of all ranks, after averaging, before clipping.

    Clipping scales everything by limit / norm; a limit of 0 changes nothing.
    """
    reference = subject.reference()
    for number, limit in ((10, 0.0), (11, 1e-3), (12, 1e3)):
        found, wanted = subject.step(number, limit=limit), reference.step(number, subject.parallel.world.size, limit)
        expect(math.isclose(found, wanted, rel_tol=1e-3), f"the norm is {found:.6g}, in one process {wanted:.6g}")
        told = subject.parallel.share(repr(found))
        expect(len(set(told)) == 1, f"the ranks have the norms {told}")
    subject.follows(reference, "after clipped steps")


@STRATEGY.check
def discarded_gradients_are_gone(subject: StrategySubject) -> None:
    """A step whose loss is not finite is left out: nothing of its gradients may reach the next one, nor any weight."""
    before, reference = subject.whole(), subject.reference()
    subject.accumulate(20)
    subject.parallel.clip_gradients(1.0)
    subject.parallel.discard()
    _equal(before, subject.whole(), "discard() has changed")
    subject.step(21)
    reference.step(21, subject.parallel.world.size, 0.0)
    subject.follows(reference, "a step after a discarded one")


@STRATEGY.check
def its_state_is_portable(subject: StrategySubject) -> None:
    """What any other strategy, or none, can read: fp32 tensors by the family's names, hyper-parameters as plain JSON.

    A plain tensor is whole, and the same on every rank; whatever is sharded is a DTensor. `smalti.checkpoint.portable` has the
    pieces from which to build this.
    """
    subject.step(30)
    state = subject.state()
    trained = {name for name, each in subject.parallel.unwrap(subject.model).named_parameters() if each.requires_grad}
    expect(set(state.moments) == trained, f"there are moments of {sorted(state.moments)[:5]}")
    for name, moments in state.moments.items():
        expect({"exp_avg", "exp_avg_sq", "step"} <= set(moments), f"{name} has the moments {sorted(moments)}")
        for moment in ("exp_avg", "exp_avg_sq"):
            shapes = tuple(moments[moment].shape), tuple(state.model[name].shape)
            expect(shapes[0] == shapes[1], f"{moment} of {name} is {shapes[0]}, the parameter {shapes[1]}")
    wrong = [name for name, tensor in state.model.items() if tensor.dtype != torch.float32]
    expect(not wrong, f"not in fp32: {wrong[:5]}")
    json.dumps(state.settings, allow_nan=False)
    expect(state.optimizer == "AdamW", f"the optimizer is called {state.optimizer!r}")
    sums = {name: float(tensor.double().sum()) for name, tensor in subject.whole().items()}
    told = subject.parallel.share(json.dumps(sums))
    expect(len(set(told)) == 1, "the ranks have different whole tensors")


@STRATEGY.check
def a_state_that_is_put_back_goes_on_bit_for_bit(subject: StrategySubject) -> None:
    """Take the state, train, put it back, train the same: not one bit may differ, or resuming is not exact.

    Look for what is not in the state: a step count, a copy of the weights in another precision, a gradient that was left.
    """
    subject.step(39)
    kept = _cloned(subject.state())
    for number in (40, 41):
        subject.step(number, limit=1.0)
    wanted = subject.whole()
    subject.parallel.load_portable_state(subject.model, subject.optimizer, kept)
    for number in (40, 41):
        subject.step(number, limit=1.0)
    _equal(wanted, subject.whole(), "after the same steps again, different:")


def _save(subject: StrategySubject, snapshot: Snapshot) -> Checkpoint:
    where, parallel, config = subject.folder, subject.parallel, subject.config
    written = subject.backend.save_checkpoint(state=snapshot, target=where, parallel=parallel, config=config)
    assert written is not None, "the core's own answer comes last"
    return written


@STRATEGY.check
def a_checkpoint_comes_back_bit_for_bit(subject: StrategySubject) -> None:
    """What `save_checkpoint` writes on all ranks together, `load_checkpoint` reads back, into the same state."""
    subject.step(49)
    snapshot = _snapshot(subject.state(), 50)
    written = _save(subject, snapshot)
    told = subject.parallel.share(str(written.path))
    expect(len(set(told)) == 1, f"the ranks have written to {told}")
    wanted = subject.whole()
    subject.step(50)
    into = _snapshot(subject.state(), 0)
    subject.backend.load_checkpoint(source=written.path, state=into, parallel=subject.parallel)
    subject.parallel.load_portable_state(subject.model, subject.optimizer, into.state)
    _equal(wanted, subject.whole(), "after loading, different:")


@STRATEGY.check
def one_process_reads_its_checkpoints(subject: StrategySubject) -> None:
    """A run on many ranks is continued on one, or exported: the checkpoint holds whole tensors under the family's names."""
    subject.step(59)
    snapshot = _snapshot(subject.state(), 60)
    written = _save(subject, snapshot)
    wanted, reference = subject.whole(), subject.fresh_reference(seed=8)
    into = _snapshot(capture(reference.model, reference.optimizer), 0)
    load(written.path, into, Alone())  # type: ignore[arg-type]
    _equal(wanted, whole_state(into.state), "in the checkpoint, different:")


@STRATEGY.check
def it_goes_on_from_a_checkpoint_of_one_process(subject: StrategySubject) -> None:
    """A run that was started on one rank, or with another strategy, goes on with this one.

    Loading gives each rank its share of every tensor; moments that did not exist yet are made in the shape of their parameter.
    """
    reference = subject.fresh_reference(seed=9)
    reference.step(70, subject.parallel.world.size, 0.0)
    if subject.parallel.world.is_main:
        save(subject.folder, _snapshot(capture(reference.model, reference.optimizer), 70), Alone())  # type: ignore[arg-type]
    subject.parallel.barrier()
    into = _snapshot(subject.state(), 0)
    [path] = subject.folder.glob("step-*")
    subject.backend.load_checkpoint(source=path, state=into, parallel=subject.parallel)
    subject.parallel.load_portable_state(subject.model, subject.optimizer, into.state)
    subject.follows(reference, "after loading")
    subject.step(71)
    reference.step(71, subject.parallel.world.size, 0.0)
    subject.follows(reference, "a step after loading")


@STRATEGY.check
def it_leaves_in_good_order(subject: StrategySubject) -> None:
    """`close` is the last call, also after an error; a process that ends inside the group can take the others with it."""
    subject.parallel.barrier()
    subject.parallel.close()
    expect(not torch.distributed.is_initialized(), "the process group is still there")
    open_strategy.cache_clear()


# --- what the checks are made of ------------------------------------------------------------------------------------


def _loss(family: TinyFamily, model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
    """The loss of one micro-batch; its samples are a function of step, rank and number."""
    random = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    clean, noise = torch.randn(2, BATCH, 3, 4, 6, generator=random)
    times = torch.rand(BATCH, generator=random) * 1000
    device = next(model.parameters()).device
    conditioning = family.encode_captions([f"picture {step} {rank} {micro} {number}" for number in range(BATCH)])
    conditioning = {name: tensor.to(device) for name, tensor in conditioning.items()}
    prediction = family.forward(model, (clean + noise).to(device), times.to(device), conditioning)
    return F.mse_loss(prediction, clean.to(device))


def _snapshot(state: PortableState, step: int) -> Snapshot:
    return Snapshot(step=step, state=state, trainer={"step": step}, plugins=(f"smalti {version('smalti')}",))


def whole_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor on the CPU, separate from the live one. *Collective* for what is sharded."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu().clone()


def whole_state(state: PortableState) -> dict[str, Tensor]:
    found = {name: whole_tensor(tensor) for name, tensor in state.model.items()}
    for name, moments in state.moments.items():
        found |= {f"{name}.{moment}": whole_tensor(tensor) for moment, tensor in moments.items()}
    return found


def _cloned(state: PortableState) -> PortableState:
    """A state that no longer sees the live tensors; shards stay shards."""
    return PortableState(
        model={name: tensor.detach().clone() for name, tensor in state.model.items()},
        moments={name: {key: each.detach().clone() for key, each in found.items()} for name, found in state.moments.items()},
        settings=state.settings,
        optimizer=state.optimizer,
    )


def _equal(wanted: dict[str, Tensor], found: dict[str, Tensor], told: str) -> None:
    expect(wanted.keys() == found.keys(), f"{told} the names {sorted(wanted.keys() ^ found.keys())[:5]}")
    different = [name for name in wanted if not torch.equal(wanted[name], found[name])]
    expect(not different, f"{told} {', '.join(different[:5])}")
