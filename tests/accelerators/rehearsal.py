"""One rank of a run on a fake device: built, trained, saved, judged and resumed by smalti's own code.

The functions here run in processes that are forked from `python -m accelerators`; importing this module imports no torch.
"""

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(kw_only=True)
class Phase:
    """What was seen in one part of a run.

    `waits` counts by function how often the host waited for the device, and by the kind of entry in the trace, how often the
    loop's thread did for all that was asked in this part. `switches` are devices other than the rank's own that
    became current. `staging` are the sizes of host memory that the saver's thread has pinned, in bytes. `tf32` counts the
    products of matrices that may and that may not be computed in TF32. `kernels` are operations on devices, `touched` the bytes
    that they read and write. `copies` counts copies by function, `gathers` messages in which sharded weights are gathered.
    """

    waits: Counter = field(default_factory=Counter)
    switches: list[int] = field(default_factory=list)
    staging: list[int] = field(default_factory=list)
    tf32: Counter = field(default_factory=Counter)
    kernels: int = 0
    touched: int = 0
    copies: Counter = field(default_factory=Counter)
    gathers: int = 0


@dataclass(kw_only=True)
class Rehearsal:
    """What came of it. `state` tells where the optimizer keeps what: (name of the moment, device) pairs."""

    phases: dict[str, Phase] = field(default_factory=dict)
    races: list[str] = field(default_factory=list)
    groups: list[dict] = field(default_factory=list)
    messages: Counter = field(default_factory=Counter)
    """Tensors that went to or came from a single rank, by the kind of device they are on."""
    parameters: set[str] = field(default_factory=set)
    averages: set[str] = field(default_factory=set)
    state: set[tuple[str, str]] = field(default_factory=set)
    resumed_state: set[tuple[str, str]] = field(default_factory=set)
    built: tuple[int, int] = (0, 0)
    """Bytes of pinned host memory before the first step, rounded up as torch does, and of parameters in host memory."""
    staged: int = 0
    """Bytes that a save copied to the host."""
    held: list[int] = field(default_factory=list)
    """Bytes that tensors hold on the device after each micro-batch, in order."""

    @property
    def switches(self) -> dict[str, list[int]]:
        return {name: phase.switches for name, phase in self.phases.items() if phase.switches}

    def waits(self, name: str) -> dict[str, int]:
        return dict(self.phases[name].waits)


def rehearse(words: Sequence[str], *, rank: int = 1, ranks: int = 8, saves: bool = True, samples: bool = True) -> Rehearsal:
    """Run `smalti train WORDS` as this rank of that many: steps, saves beside more steps, evaluation, sampling, resuming."""
    import torch

    from accelerators import cluster
    from accelerators.watching import Watch

    cluster.stand(rank, ranks)
    kind = torch.accelerator.current_accelerator().type
    os.environ["DS_ACCELERATOR"] = kind
    if kind != "cuda":  # Accelerate knows others by the packages that bring them
        os.environ["ACCELERATE_TORCH_DEVICE"] = f"{kind}:{rank}"
    seen, watch = Rehearsal(), Watch()
    with ExitStack() as closing:
        run = built(words, watch, closing)
        seen.built = _pinned(watch), sum(_bytes(each) for each in run.model.parameters() if each.device.type == "cpu")
        with watch:
            _go_through(run, seen, watch, saves=saves, samples=samples)
    seen.groups = [{name: str(value) for name, value in group.items()} for group in cluster.groups]
    seen.messages = cluster.messages
    return _judged(seen, watch)


def encoded(words: Sequence[str], pipelines: Path, name: str, folder: Path) -> None:
    """Make the tiny pipeline of this name in `folder`, and encode for real, on the CPU, what `smalti train WORDS` would encode.

    `pipelines` is the file that makes it.
    """
    import importlib.util
    import sys

    from smalti.cli.arguments import CommandLine
    from smalti.data.encoded import encode_ahead
    from smalti.data.from_options import scan_data
    from smalti.data.prepared import PreparedData
    from smalti.parallel.gloo import GlooCommunicator
    from smalti.plugins.lookup import find_family
    from smalti.rundir import Phases
    from smalti.training.periodic import periodic_work
    from smalti.types import World

    sys.path.insert(0, str(pipelines.parent))
    spec = importlib.util.spec_from_file_location("tiny", pipelines)
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    getattr(tiny, name)(folder)
    command_line = CommandLine.parse([*words, "--use_cpu"])
    config, plugins = command_line.config(), command_line.plugins
    family = find_family(config, plugins)
    family.to("cpu")
    data: PreparedData = scan_data(config, plugins, family.alignment, None)
    communicator = GlooCommunicator(world=World(), group=None)
    work = periodic_work(config, plugins)
    texts, negative = ([text for each in work for text in getattr(each, kind)] for kind in ("texts", "negative_texts"))
    encode_ahead(config, plugins, family, data, communicator, folder, Phases(), texts, negative)


def built(words, watch, closing):
    import torch

    import smalti.training.build_run
    import smalti.training.resume
    from smalti.cli.arguments import CommandLine
    from smalti.data.from_options import scan_data
    from smalti.parallel.accelerator import pins_memory
    from smalti.parallel.failure_detection import FailureDetector
    from smalti.parallel.state import FlatRange
    from smalti.plugins.lookup import choose_distributed
    from smalti.rundir import Ownership
    from smalti.training.run import Context
    from smalti_cache.encoder import Encoder

    FlatRange.of = classmethod(_real_span)
    # Rank 0 is not there to look for these.
    smalti.training.resume.chosen_checkpoint = lambda run, choice: None
    smalti.training.build_run.ownership_of = lambda context: Ownership(context.directory, "", None)
    smalti.training.build_run.run_on_main_rank = lambda ranks, scanned: str(True)
    Encoder._refresh = lambda self, stores: [store.refresh() for store in stores]
    smalti.training.build_run.load_data = scan_data
    command_line = CommandLine.parse(list(words))
    config, plugins = command_line.config(), command_line.plugins
    plan = choose_distributed(config, plugins)
    parallel = smalti.training.build_run.open_parallel(plan, config)
    if plan.name == "deepspeed":
        _trust_other_ranks()
    if config.values()["model_family"] != "toy":
        _load_for_real()
    pins_memory(torch.device(parallel.world.device).type)  # which fake memory would always be
    with watch:
        checks = config.values()["check_before_step"]
        detector, state = FailureDetector(processes=()), smalti.RunState(max_steps=0, check_before_step=checks)
        context = Context.of(config, plugins, plan, parallel, detector, state)
        return smalti.training.build_run.build(context, closing)


def _pinned(watch) -> int:
    """Bytes of host memory that were pinned so far. Of fake tensors, torch's allocator would take powers of two."""
    from smalti_plan.rehearsal.devices import fake_cuda
    from smalti_plan.rehearsal.devices.fake_cuda import Kind

    own = sum(1 << (size - 1).bit_length() for _, size in watch.pinned)
    return own + sum(entry.value for entry in fake_cuda.trace() if entry.kind is Kind.PIN)


def _load_for_real() -> None:
    """Parts of pipelines are read from files that no fake tensor could read; they are fake once they go to the device."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    from smalti_diffusers.families import padding
    from smalti_diffusers.sources.components import Components

    own = Components.load

    def load(self, *arguments):
        with unset_fake_temporarily():
            return own(self, *arguments)

    Components.load = load
    # Masks of captions: a length that is asked of the device is waited for, and none that the host has.
    padding.has_values = lambda mask: mask.device.type not in ("cpu", "meta")


def _trust_other_ranks() -> None:
    """DeepSpeed compares lists of numbers with what other ranks send, which have no values here."""
    import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator

    coordinator.assert_ints_same_as_other_ranks = lambda numbers: None


def _real_span(cls, elements, whole, begin):
    """What files are read into has memory; no fake tensor can be of a class of its own."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        span = torch.zeros(len(elements), dtype=elements.dtype).as_subclass(cls)
    span.whole, span.begin = whole, begin
    return span


def _go_through(run, seen, watch, *, saves: bool, samples: bool) -> None:
    import torch

    import smalti.checkpoint.planning
    from smalti.checkpoint.async_saver import Saver
    from smalti.parallel.gloo import GlooCommunicator
    from smalti.training.checkpointing import poll_save, save
    from smalti.training.trainer import agree, train_step
    from smalti.types import Checkpoint, World

    def write(snapshot, communicator):
        tensors = [tensor for tensor in snapshot.tensors().values() if not tensor.is_meta]
        seen.staged = sum(_bytes(tensor) for tensor in tensors)
        return Checkpoint(step=snapshot.step, path=run.checkpoints.root, size=1, seconds=0.0)

    def step():
        train_step(run, next(run.batches))

    around = run.parallel.accumulate

    @contextmanager
    def accumulate(last: bool) -> Iterator[None]:
        with around(last):
            yield
        seen.held.append(watch.held())

    run.parallel.accumulate = accumulate
    if run.ema is not None and run.ema._copies is not None:
        _average_late(run.ema)
    # Like running statistics, which a forward pass may change: each save has to copy it first.
    run.parallel.unwrap(run.model).register_buffer("statistics", torch.zeros(4, device=run.world.device))
    home = torch.device(run.world.device).index
    alone = GlooCommunicator(world=World(device=run.world.device), group=None)  # this rank writes all that it holds
    smalti.checkpoint.planning.check_complete = lambda held, tensors: (
        None
    )  # of what the other ranks would hold, nothing is there
    run.saver = Saver(write=write, communicator=run.parallel, background=alone)
    for name in ("first step", "second step", "third step"):  # whose loss the next may read
        with phase(seen, name, watch, home):
            step()
    with phase(seen, "agree", watch, home):
        agree(run)
        run.settle()
    seen.parameters = {str(parameter.device) for parameter in run.model.parameters()}
    seen.averages = {str(tensor.device) for tensor in run.ema.shadows.values()} if run.ema is not None else set()
    seen.state = _places(run.optimizer)
    if saves:
        with phase(seen, "save", watch, home):
            save(run, last=False)
            run.saver.wait()  # so that no step makes the host wait meanwhile, which would order what is not
            poll_save(run, finish=True)
        with phase(seen, "save beside a step", watch, home):
            save(run, last=False)
            step()
            run.settle()
            run.saver.wait()
            poll_save(run, finish=True)
    periodic = {work.name: work for work in run.periodic}
    if run.data.held_out is not None:
        with phase(seen, "evaluate", watch, home):
            periodic["evaluation"].run(run)
    if samples:
        with phase(seen, "sample", watch, home):
            periodic["validation"].run(run)
    with phase(seen, "discard", watch, home):
        run.parallel.zero_grad()
    with phase(seen, "resume", watch, home):
        _resume(run)
        step()
    seen.resumed_state = _places(run.optimizer)


def _average_late(ema) -> None:
    """Let the thread of the average begin when somebody waits for it, as on a host that is busy."""
    begin, wait, submit = threading.Event(), ema.wait, ema._thread.submit

    def late(act, *arguments):
        begin.clear()
        return submit(lambda: (begin.wait(), act(*arguments)))

    def waited(seconds=None):
        begin.set()
        return wait(seconds)

    ema._thread.submit, ema.wait = late, waited


def _resume(run) -> None:
    """Load what a checkpoint of this run would give, as far as places, shapes and types go."""
    from smalti.checkpoint.format.safetensors_layout import StoredTensor
    from smalti.checkpoint.planning import NAMES
    from smalti.checkpoint.reader import _allocated_state
    from smalti.parallel.state import named_state, shape_of
    from smalti.training.checkpointing import empty_snapshot, take_snapshot

    saved, blank = take_snapshot(run), empty_snapshot(run)
    stored = {
        name: StoredTensor(shape=shape_of(tensor), dtype=NAMES[tensor.dtype], chunks=1)
        for name, tensor in named_state(saved.state.optimizer_state).items()
    }
    blank.state.optimizer_state, blank.state.param_groups = _allocated_state(blank.state, stored), saved.state.param_groups
    run.parallel.state.load(blank.state)
    if run.ema is not None:
        run.parallel.state.copy_from(blank.ema, run.ema.shadows)


@contextmanager
def phase(seen: Rehearsal, name: str, watch, home: int) -> Iterator[None]:
    from smalti_plan.rehearsal.devices import fake_cuda
    from smalti_plan.rehearsal.devices.fake_cuda import Kind

    here = fake_cuda.this_thread()
    operations, pinned, begin = len(watch.operations), len(watch.pinned), fake_cuda.trace_length()
    yield
    trace = fake_cuda.trace(begin)
    seen_here = watch.operations[operations:]
    pins = [*watch.pinned[pinned:], *((entry.thread, entry.value) for entry in trace if entry.kind is Kind.PIN)]
    recorded = {entry.value for entry in trace if entry.kind is Kind.RECORD}
    syncs = [
        entry.kind.name
        for entry in trace
        if entry.thread == here
        and (entry.kind in (Kind.SYNC_STREAM, Kind.SYNC_DEVICE) or (entry.kind is Kind.SYNC_EVENT and entry.value in recorded))
    ]
    seen.phases[name] = Phase(
        waits=Counter([*(operation.where for operation in seen_here if operation.waits), *syncs]),
        switches=[entry.device for entry in trace if entry.kind is Kind.SET_DEVICE and entry.device != home],
        tf32=Counter(operation.tf32 for operation in seen_here if operation.name in ("mm", "addmm", "bmm")),
        kernels=sum(operation.device is not None for operation in seen_here),
        touched=sum(operation.touched for operation in seen_here if operation.device is not None),
        copies=Counter(operation.where for operation in seen_here if operation.name == "copy_"),
        gathers=sum("allgather" in operation.name for operation in seen_here if operation.device is not None),
        staging=[size for thread, size in pins if watch.threads.get(thread, "").startswith("smalti-save")],
    )


def _judged(seen: Rehearsal, watch) -> Rehearsal:
    from accelerators.ordering import races
    from smalti_plan.rehearsal.devices import fake_cuda

    seen.races = races(fake_cuda.trace(), watch.operations)
    return seen


def _places(optimizer) -> set[tuple[str, str]]:
    found = [(key, value) for state in optimizer.state.values() for key, value in state.items()]
    return {(key, str(value.device) if hasattr(value, "device") else type(value).__name__) for key, value in found}


def _bytes(tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.nbytes
