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
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from smalti import Checkpoint, CheckpointError, World
from smalti.checkpoint import Snapshot, load, save
from smalti.hookspecs import HookSpecs
from smalti.parallel import PortableState, capture
from smalti_testing.contract import Contract, expect
from smalti_testing.ranks import RankProcesses, two_processes
from smalti_testing.strategy_subject import SEED, StrategySubject, open_strategy, whole_state


class SingleRank:
    """The part of a `Parallel` that checkpoints need, for one process that asks nobody."""

    world = World()

    def all_gather_text(self, value: str) -> Sequence[str]:
        return [value]


def check_parallel(name: str, *flags: str, ranks: int = 2, seconds: float = 60.0) -> None:
    """Every check of the strategy contract, on `ranks` processes, for the plugin `name` when a run is given these flags.

    The plugin must be installed. `seconds` is how long a check may take. Raises `RankFailed` with the tracebacks of all ranks.
    """
    with two_processes(ranks=ranks, group=False, seconds=seconds) as processes, tempfile.TemporaryDirectory() as folder:
        for check in STRATEGY.checks:
            run_check(processes, check, name, flags, Path(folder))


def run_check(processes: RankProcesses, check: str, name: str, flags: Sequence[str], folder: Path) -> None:
    """One check on all of `processes`, which must have been started without a group."""
    processes.run(on_rank, check, name, tuple(flags), processes.size, folder)


def on_rank(check: str, name: str, flags: tuple[str, ...], ranks: int, folder: Path) -> None:
    """One check on this rank; the others run the same one."""
    subject = open_strategy(name, flags, ranks)
    subject.folder = folder / check
    subject.folder.mkdir(exist_ok=True)
    STRATEGY.run(check, subject)


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
    texts = subject.parallel.all_gather_text(f"{world.rank} {world.size} {world.is_main}")
    expect(list(texts) == [f"{rank} {count} {rank == 0}" for rank in range(count)], f"the ranks say {list(texts)}")
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
    """The loss is reported to the user, and a step is skipped on all ranks when it is not finite on any.

    Sum, then divide; a maximum or a mean over some ranks would let ranks go separate ways.
    """
    world = subject.parallel.world
    value = torch.tensor(float(world.rank + 1), device=world.device)
    found = float(subject.parallel.mean(value))
    expect(math.isclose(found, (world.size + 1) / 2, rel_tol=1e-6), f"the mean of 1 to {world.size} is {found}")
    expect(float(value) == world.rank + 1, "mean() has changed its argument")
    for wrong in (math.nan, math.inf):
        last = world.rank == world.size - 1
        mean = float(subject.parallel.mean(torch.tensor(wrong if last else 1.0, device=world.device)))
        expect(not math.isfinite(mean), f"{wrong} on one rank is {mean} on rank {world.rank}")


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
        found = subject.parallel.all_reduce_max(code)
        expect(isinstance(found, int) and found == wanted, f"all_reduce_max() returned {found!r} instead of {wanted}")


@STRATEGY.check
def texts_are_shared_as_they_are(subject: StrategySubject) -> None:
    """One text from each rank in their order: empty ones, long ones, of different length, in any script."""
    world = subject.parallel.world
    for text in ("", "größer 日本 \n\t" * (world.rank + 1), "x" * 100_000 * (world.rank + 1)):
        mine = f"{world.rank}{text}"
        found = subject.parallel.all_gather_text(mine)
        expect([each[:1] for each in found] == [str(rank) for rank in range(world.size)], "all_gather_text() has another order")
        expect(found[world.rank] == mine, "all_gather_text() has changed a text")


@STRATEGY.check
def a_barrier_waits_for_everyone(subject: StrategySubject) -> None:
    """Files that one rank has written before the barrier are there for every rank after it."""
    mark = subject.folder / f"mark-{time.time_ns()}"
    name = subject.parallel.all_gather_text(mark.name)[0]
    if subject.parallel.world.is_main:
        time.sleep(0.3)
        (subject.folder / name).touch()
    subject.parallel.barrier()
    expect((subject.folder / name).exists(), "a rank left the barrier before another rank had entered it")


@STRATEGY.check
def steps_are_those_of_one_process(subject: StrategySubject) -> None:
    """Three steps of several micro-batches on every rank change weights and state as one process with all samples would.

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
        texts = subject.parallel.all_gather_text(repr(found))
        expect(len(set(texts)) == 1, f"the ranks have the norms {texts}")
    subject.follows(reference, "after clipped steps")


@STRATEGY.check
def values_are_clipped_one_by_one(subject: StrategySubject) -> None:
    """With `--grad_clip_method=value` each element of the averaged gradient is clamped, and the norm is that of before.

    `ProcessGroupParallel` does it for gradients in `parameter.grad`. Where they are elsewhere, `clip_gradient_values` is yours.
    """
    reference = subject.reference()
    for number, limit in ((13, 1e-3), (14, 1e3)):
        found = subject.step(number, limit=limit, by_value=True)
        wanted = reference.step(number, subject.parallel.world.size, limit, by_value=True)
        expect(math.isclose(found, wanted, rel_tol=1e-3), f"the norm is {found:.6g}, in one process {wanted:.6g}")
    subject.follows(reference, "after steps with clipped values")
    subject.step(15, limit=1e-2)
    reference.step(15, subject.parallel.world.size, 1e-2)
    subject.follows(reference, "after a step that is clipped by its norm again")


@STRATEGY.check
def discarded_gradients_are_gone(subject: StrategySubject) -> None:
    """A step whose gradient is not finite on one rank is left out on all: it may reach neither the next step nor any weight.

    The norm has to tell every rank.
    """
    before, reference, world = subject.whole(), subject.reference(), subject.parallel.world
    subject.accumulate(20, factor=math.nan if world.rank == world.size - 1 else 1.0)
    norm = float(subject.parallel.clip_gradients(1.0))
    expect(
        not math.isfinite(norm), f"with a gradient that is not a number on one rank, the norm is {norm} on rank {world.rank}"
    )
    subject.parallel.zero_grad()
    _equal(before, subject.whole(), "zero_grad() has changed")
    subject.step(21)
    reference.step(21, subject.parallel.world.size, 0.0)
    subject.follows(reference, "a step after a discarded one")


@STRATEGY.check
def weights_that_are_replaced_are_used_at_once(subject: StrategySubject) -> None:
    """Validation images are generated with the EMA in place of the trained weights, which are copied back afterwards.

    `state.invalidate_gathered` is called each time: the next forward pass must not use what was gathered or converted before.
    """
    parameters = [_local(each.detach()) for each in subject.parallel.state.master_weights().values()]
    kept = [each.clone() for each in parameters]
    before = subject.look(25)
    for parameter in parameters:
        parameter.mul_(0.5)
    subject.parallel.state.invalidate_gathered()
    halved = subject.look(25)
    for parameter, value in zip(parameters, kept, strict=True):
        parameter.copy_(value)
    subject.parallel.state.invalidate_gathered()
    expect(halved != before, "half the weights give the same loss as the whole ones")
    expect(subject.look(25) == before, "weights that were restored give another loss")


@STRATEGY.check
def its_state_is_portable(subject: StrategySubject) -> None:
    """What any other strategy, or none, can read: fp32 tensors by the family's names, hyper-parameters as plain JSON.

    A plain tensor is whole, and the same on every rank; whatever is sharded is a DTensor. `smalti.parallel.state` has the
    pieces from which to build this.
    """
    subject.step(30)
    state = subject.state()
    trained = {name for name, each in subject.parallel.unwrap(subject.model).named_parameters() if each.requires_grad}
    expect(set(state.optimizer_state) == trained, f"there is optimizer state of {sorted(state.optimizer_state)[:5]}")
    for name, found in state.optimizer_state.items():
        expect({"exp_avg", "exp_avg_sq", "step"} <= set(found), f"{name} has the optimizer state {sorted(found)}")
        for key in ("exp_avg", "exp_avg_sq"):
            shapes = tuple(found[key].shape), tuple(state.model[name].shape)
            expect(shapes[0] == shapes[1], f"{key} of {name} is {shapes[0]}, the parameter {shapes[1]}")
    wrong = [name for name, tensor in state.model.items() if tensor.dtype != torch.float32]
    expect(not wrong, f"not in fp32: {wrong[:5]}")
    json.dumps(state.param_groups, allow_nan=False)
    expect(state.optimizer == "AdamW", f"the optimizer is called {state.optimizer!r}")
    sums = {name: float(tensor.double().sum()) for name, tensor in subject.whole().items()}
    texts = subject.parallel.all_gather_text(json.dumps(sums))
    expect(len(set(texts)) == 1, "the ranks have different whole tensors")


@STRATEGY.check
def a_restored_state_continues_bit_for_bit(subject: StrategySubject) -> None:
    """Take the state, train, restore it, train the same again: not one bit may differ, or resuming is not exact.

    Look for what is not in the state: a step count, a copy of the weights in another precision, a gradient that remained.
    """
    subject.step(39)
    kept = _cloned(subject.state())
    for number in (40, 41):
        subject.step(number, limit=1.0)
    wanted = subject.whole()
    subject.parallel.state.load(kept)
    for number in (40, 41):
        subject.step(number, limit=1.0)
    _equal(wanted, subject.whole(), "after the same steps again, different:")


def _save(subject: StrategySubject, snapshot: Snapshot) -> Checkpoint:
    where, parallel, config = subject.folder, subject.parallel, subject.config
    written = subject.backend.decide(HookSpecs.save_checkpoint, state=snapshot, target=where, parallel=parallel, config=config)
    assert written is not None, "the core's own answer comes last"
    return written


@STRATEGY.check
def a_checkpoint_comes_back_bit_for_bit(subject: StrategySubject) -> None:
    """What `save_checkpoint` writes on all ranks together, `load_checkpoint` reads back, into the same state."""
    subject.step(49)
    snapshot = _snapshot(subject.state(), 50)
    written = _save(subject, snapshot)
    texts = subject.parallel.all_gather_text(str(written.path))
    expect(len(set(texts)) == 1, f"the ranks have written to {texts}")
    wanted = subject.whole()
    subject.step(50)
    into = _snapshot(subject.empty(), 0)
    subject.backend.decide(
        HookSpecs.load_checkpoint, source=written.path, state=into, parallel=subject.parallel, config=subject.config
    )
    subject.parallel.state.load(into.state)
    _equal(wanted, subject.whole(), "after loading, different:")


@STRATEGY.check
def optimizer_state_that_cannot_be_is_refused_on_all_ranks(subject: StrategySubject) -> None:
    """Somebody has edited a checkpoint: one of the means of squares is negative, or a parameter group has no settings.

    `load_checkpoint` raises a CheckpointError on every rank, also on those that do not hold the number: they would wait.
    """
    kept, reference = _cloned(subject.state()), subject.fresh_reference(seed=9)
    reference.step(52, subject.parallel.world.size, 0.0)
    negative, empty = (_cloned(capture(reference.model, reference.optimizer)) for _ in range(2))
    *_, last = (found["exp_avg_sq"] for found in negative.optimizer_state.values() if "exp_avg_sq" in found)
    last.view(-1)[-1] = -1
    empty.param_groups = [{} for _ in empty.param_groups]
    for step, state, reason in ((52, negative, "in the optimizer state is negative"), (53, empty, "has no settings")):
        if subject.parallel.world.is_main:
            save(subject.folder, _snapshot(state, step), SingleRank())  # type: ignore[arg-type]
        subject.parallel.barrier()
        [path] = subject.folder.glob(f"step-*{step}")
        into, error = _snapshot(subject.empty(), 0), ""
        try:
            subject.backend.decide(
                HookSpecs.load_checkpoint, source=path, state=into, parallel=subject.parallel, config=subject.config
            )
        except CheckpointError as refused:
            error = refused.message
        expect(reason in error, f"it was read, or another reason was given: {error or 'none'}")
    subject.parallel.state.load(kept)  # a refused checkpoint may have been read into the state


@STRATEGY.check
def a_rank_that_saves_alone_has_the_full_state(subject: StrategySubject) -> None:
    """When the other ranks are lost, one saves without them, if `local_communicator` returns a communicator.

    Return None if a rank holds only a part of the state. Otherwise `state.portable` waits for nobody and returns no DTensors.
    """
    subject.step(54)
    alone, wanted, world = subject.parallel.local_communicator(), subject.whole(), subject.parallel.world
    texts = subject.parallel.all_gather_text("alone" if alone is not None else "together")
    expect(len(set(texts)) == 1, f"local_communicator() gave the ranks {list(texts)}")
    if alone is None:
        return
    expect(
        alone.world.size == 1 and alone.world.is_main, f"alone, a rank is still rank {alone.world.rank} of {alone.world.size}"
    )
    if world.rank == world.size - 1:
        done = save(subject.folder, _snapshot(subject.state(), 55), alone)
        reference = subject.fresh_reference(seed=8)
        into = _snapshot(capture(reference.model, reference.optimizer), 0)
        load(done.path, into, SingleRank())  # type: ignore[arg-type]
        _equal(wanted, whole_state(into.state), "in what one rank saved, different:")
    subject.parallel.barrier()


@STRATEGY.check
def one_process_reads_its_checkpoints(subject: StrategySubject) -> None:
    """A run on many ranks is continued on one, or exported: the checkpoint holds whole tensors under the family's names."""
    subject.step(59)
    snapshot = _snapshot(subject.state(), 60)
    written = _save(subject, snapshot)
    wanted, reference = subject.whole(), subject.fresh_reference(seed=8)
    into = _snapshot(capture(reference.model, reference.optimizer), 0)
    load(written.path, into, SingleRank())  # type: ignore[arg-type]
    _equal(wanted, whole_state(into.state), "in the checkpoint, different:")


@STRATEGY.check
def it_goes_on_from_a_checkpoint_of_one_process(subject: StrategySubject) -> None:
    """A run that was started on one rank, or with another strategy, goes on with this one.

    Loading gives each rank its part of every tensor; optimizer state that did not exist is created in its parameter's shape.
    """
    reference = subject.fresh_reference(seed=9)
    reference.step(70, subject.parallel.world.size, 0.0)
    if subject.parallel.world.is_main:
        save(subject.folder, _snapshot(capture(reference.model, reference.optimizer), 70), SingleRank())  # type: ignore[arg-type]
    subject.parallel.barrier()
    into = _snapshot(subject.empty(), 0)
    [path] = subject.folder.glob("step-*")
    subject.backend.decide(HookSpecs.load_checkpoint, source=path, state=into, parallel=subject.parallel, config=subject.config)
    subject.parallel.state.load(into.state)
    subject.follows(reference, "after loading")
    subject.step(71)
    reference.step(71, subject.parallel.world.size, 0.0)
    subject.follows(reference, "a step after loading")


@STRATEGY.check
def it_leaves_in_good_order(subject: StrategySubject) -> None:
    """`close` is the last call; a process that ends inside the group can take the others with it."""
    subject.parallel.barrier()
    subject.parallel.close()
    expect(not torch.distributed.is_initialized(), "the process group is still there")
    open_strategy.cache_clear()


# --- what the checks are made of ------------------------------------------------------------------------------------


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _snapshot(state: PortableState, step: int) -> Snapshot:
    return Snapshot(step=step, state=state, trainer={"step": step}, plugins=(f"smalti {version('smalti')}",))


def _cloned(state: PortableState) -> PortableState:
    """A state that no longer sees the live tensors; shards stay shards."""
    return PortableState(
        model={name: tensor.detach().clone() for name, tensor in state.model.items()},
        optimizer_state={
            name: {key: each.detach().clone() for key, each in found.items()} for name, found in state.optimizer_state.items()
        },
        param_groups=state.param_groups,
        optimizer=state.optimizer,
    )


def _equal(wanted: dict[str, Tensor], found: dict[str, Tensor], context: str) -> None:
    expect(wanted.keys() == found.keys(), f"{context} the names {sorted(wanted.keys() ^ found.keys())[:5]}")
    different = [name for name in wanted if not torch.equal(wanted[name], found[name])]
    expect(not different, f"{context} {', '.join(different[:5])}")
