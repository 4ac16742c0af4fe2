"""One rank's run, built and trained by smalti's own code, phase by phase under a ledger."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from smalti import Checkpoint, DistributedPlan, RunState, UserError
from smalti.checkpoint import Saver, Snapshot
from smalti.config import (
    Config,
    DataOptions,
    TrainingOptions,
)
from smalti.data import Bucket, Encoded, Loader
from smalti.models import ModelFamily, Weights
from smalti.parallel import Communicator, FailureDetector, GlooCommunicator, Parallel, ProcessGroupParallel, named_state
from smalti.plugins import Plugins
from smalti.rundir import Ownership
from smalti.training import Context, Run, assemble, begin, periodic_work, train_step
from smalti_plan.rehearsal.fake_tensors import NEEDS_VALUES, needs_values
from smalti_plan.rehearsal.ledger import Counted, Ledger
from smalti_plan.rehearsal.replicas import hook_gradients, replicas_in
from smalti_plan.rehearsal.samples import CAPTION, ExampleTexts, Samples, encoded_latents, one_bucket

_ALIGNMENT = 64
"""Of tensors in the memory that a save is copied to."""


class ShapeWeights:
    """`Weights` with the shapes and types of the model that a family builds first, and any values."""

    def __init__(self, family: ModelFamily) -> None:
        self._family = cast(Any, family)
        self._own = family.build_model
        self._like: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._family.build_model = self._build

    def _build(self) -> nn.Module:
        del self._family.build_model
        model = self._own()
        named = {**dict(model.named_parameters(remove_duplicate=False)), **model.state_dict()}
        self._like = {name: (tensor.shape, tensor.dtype) for name, tensor in named.items()}
        return model

    def names(self) -> Iterator[str]:
        return iter(self._like)

    def get(self, name: str) -> Tensor:
        shape, dtype = self._like[name]
        return torch.empty(shape, dtype=dtype)


@dataclass(kw_only=True)
class Stage:
    """A run under rehearsal. `notes` collects what could not be counted."""

    config: Config
    plugins: Plugins
    plan: DistributedPlan
    parallel: Parallel
    ledger: Ledger
    family: ModelFamily
    bucket: Bucket
    notes: list[str] = field(default_factory=list)
    run: Run = field(init=False)
    samples: Samples = field(init=False)
    saved: int = 0
    pinned: int = 0
    resident: tuple[dict[str, int], int] = field(default_factory=lambda: ({}, 0))
    """What stays between two steps: bytes on the device by kind, and of the host."""
    counted: Counted = field(default_factory=Counted)
    """What a step has sent and computed."""
    weights: Weights | None = None
    """The first weights; None for any values."""

    @property
    def device(self) -> str:
        return self.parallel.world.device

    def encode(self) -> None:
        """Encode as much ahead as the run would, and keep encoders where it would."""
        family, options = self.family, self.config[DataOptions]
        family.to(self.device)
        texts, latents, cached = None, None, family.cacheable
        if cached and not options.text_cache_disable:
            self._encode("encode texts", lambda size: family.encode_captions([CAPTION] * size))
            family.release_encoder("texts")
        if cached and not options.text_cache_disable:
            texts = ExampleTexts({name: row.to("cpu") for name, row in self._example().items()})
        if cached and not options.vae_cache_disable:
            latents = self._encode("encode images", lambda size: encoded_latents(family, self.bucket, size, self.device))
            if latents is None:
                latents = torch.empty(1, *family.latent_shape(self.bucket.width, self.bucket.height))
            family.release_encoder("latents")
        world = self.parallel.world
        self.samples = Samples(
            config=self.config,
            plugins=self.plugins,
            family=family,
            bucket=self.bucket,
            world=world,
            latents=latents,
            texts=texts,
        )

    def build(self) -> None:
        """Model, weights, optimizer and EMA; then the optimizer's state, which a first step would make."""
        config, world = self.config, self.parallel.world
        micro, accumulation = config[DataOptions].train_batch_size, config[TrainingOptions].gradient_accumulation_steps
        data = one_bucket(self.bucket, micro * accumulation * world.data_size)
        texts = self.samples.texts
        if (weights := self.weights) is None:
            weights = ShapeWeights(self.family)
        detector, state = FailureDetector(processes=()), RunState(max_steps=0, check_before_step=True)
        context = Context.of(config, self.plugins, self.plan, self.parallel, detector, state)
        context.periodic = periodic_work(config, self.plugins)
        with self.ledger.counting("load", "parameters"):
            made = assemble(
                context,
                self.family,
                data,
                Encoded(texts=None if texts is None else texts.as_cache()),
                Ownership(context.directory, "", 0.0),
                weights,
            )
            alone = GlooCommunicator(world=world, group=None)
            saver = Saver(write=_write_nothing, communicator=alone, background=alone)
            self.run = run = begin(made, saver, cast(Loader, _NoLoader()))
            run.finish_step = lambda batch, result: None  # type: ignore[method-assign]
            self._mark_state()
        hook_gradients(run.parallel.unwrap(run.model), lambda gradient: self.ledger.mark([gradient], "gradients"))
        gc.freeze()  # the model stays: there is nothing in it to look for
        self._first_state()

    def step(self) -> None:
        """One optimizer step of the run, counted by its parts."""
        run, ledger = self.run, self.ledger
        run.boundary.reach()
        batch = self.samples.batch(run.loss)
        ledger.take_counts()
        with ledger.counting("forward"), self._phases():
            train_step(run, batch)
        if (replicas := replicas_in(run.model)) is not None:
            key = ("all_reduce", "backward", run.world.size, -(-run.world.size // run.world.local_size))
            ledger.counts.traffic[key] += sum(replicas.buckets)
            ledger.counts.messages[key] += len(replicas.buckets)
        run.state.step += 1
        del batch
        gc.collect()
        self._mark_state()
        ledger.begin("between", "temporaries")
        held = dict(ledger.held)
        self.resident = held, held.pop("host", 0)
        self.counted = ledger.take_counts()

    def save(self) -> None:
        """What this rank would write, and the host memory that it is copied to first."""
        with self.ledger.counting("save"):
            run = self.run
            state = run.parallel.state.portable()
            averages = {} if run.ema is None else run.parallel.state.portable_weights(run.ema.shadows)
            tensors = (*state.model.values(), *named_state(state.optimizer_state).values(), *averages.values())
            for tensor in tensors:
                local, share = _written(tensor, run.world.size)
                self.saved += local.nbytes // share
                if local.device.type != "cpu" or self.run.world.device == "cpu":
                    self.pinned += -(-local.nbytes // share // _ALIGNMENT) * _ALIGNMENT

    def periodic(self) -> None:
        """What the run does between steps, as far as it needs memory: one batch of validation images, in one step."""
        for work in self.run.periodic:
            if (rehearsal := work.rehearsal(self.run)) is None:
                continue
            try:
                with self.ledger.counting(work.name):
                    rehearsal()
            except Exception as error:
                if not needs_values(error):  # some samplers look for their place in a list of noise levels
                    raise
                self.ledger.moments.pop(work.name, None)
                self.notes.append(f"{work.name!r} was not counted, because it depends on values: {error}")

    # --- parts ------------------------------------------------------------------------------------------------------

    def _encode(self, phase: str, encode: Callable[[int], Any]) -> Any:
        """Encode one batch, after one sample, which loads the encoder."""
        try:
            with self.ledger.counting(phase):
                with torch.no_grad():
                    encode(1)
                self.ledger.mark_rest("frozen")
                self.ledger.forget(phase)
                with torch.no_grad():
                    return encode(self.config[DataOptions].train_batch_size)
        except (OSError, UserError) as error:
            self.ledger.moments.pop(phase, None)
            self.notes.append(f"'{phase}' was not counted, because files of the model are missing: {error}")
        except NEEDS_VALUES as error:
            self.ledger.moments.pop(phase, None)
            self.notes.append(f"'{phase}' was not counted, because it depends on values: {error}")
        return None

    def _example(self) -> dict[str, Tensor]:
        rows = self.family.example_conditioning(self.bucket.width, self.bucket.height)
        sizes = self.family.encode_size_conditioning([], self.bucket.width, self.bucket.height)
        return {name: row for name, row in rows.items() if name not in sizes}

    def _mark_state(self) -> None:
        run, ledger = self.run, self.ledger
        state = (value for kept in run.optimizer.state.values() for value in kept.values())
        ledger.mark((value for value in state if isinstance(value, Tensor)), "optimizer")
        if run.ema is not None:
            ledger.mark(run.ema.storage, "ema")
        model = run.parallel.unwrap(run.model)
        ledger.mark((*model.parameters(), *model.buffers()), "parameters")

    def _first_state(self) -> None:
        """A step on gradients that nobody has computed; or of a strategy that steps by itself, a whole one."""
        run = self.run
        if type(run.parallel).step is not ProcessGroupParallel.step:
            self.step()
            return
        with self.ledger.counting("first step"):
            trained = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
            run.parallel.step()
        self._mark_state()
        self.ledger.moments.pop("first step", None)

    @contextmanager
    def _phases(self) -> Iterator[None]:
        """Within it, the parts of a step are phases of their own."""
        run, parallel = self.run, cast(Any, self.run.parallel)
        with ExitStack() as undo:
            for owner, name, phase in (
                (run, "loss", "forward"),
                (parallel, "backward", "backward"),
                (run, "clip_gradients", "clip"),
                (parallel, "step", "step"),
                (run.ema, "update", "step"),
            ):
                if owner is not None:
                    undo.enter_context(self._counted(owner, name, phase))
            yield

    @contextmanager
    def _counted(self, owner: Any, name: str, phase: str) -> Iterator[None]:
        own, kept = getattr(owner, name), name in vars(owner)

        def counted(*arguments: Any, **named: Any) -> Any:
            self.ledger.begin(phase, "activations" if phase == "forward" else "temporaries")  # until the next one begins
            made = own(*arguments, **named)
            self.ledger.kind = "temporaries"
            if phase == "backward":
                self.ledger.mark((parameter.grad for parameter in self.run.model.parameters()), "gradients")
            return made

        setattr(owner, name, _Counted(own, counted))
        try:
            yield
        finally:
            if kept:
                setattr(owner, name, own)
            else:
                delattr(owner, name)


@dataclass(frozen=True)
class _Counted:
    """`call` in place of a callable, whose attributes it has."""

    own: Any
    call: Callable[..., Any]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.call(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


class _NoLoader:
    """In the place of the loader: nothing was waited for."""

    waited = 0.0
    budget_exhausted = None


def _write_nothing(snapshot: Snapshot, communicator: Communicator) -> Checkpoint:
    raise AssertionError("a rehearsal writes nothing")


def _written(tensor: Tensor, ranks: int) -> tuple[Tensor, int]:
    """This rank's part of a tensor, and how many ranks share the writing of it."""
    if not isinstance(tensor, DTensor):
        return tensor, ranks
    copies = 1
    for place, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        copies *= size if isinstance(place, Replicate) else 1
    return tensor.to_local(), copies
