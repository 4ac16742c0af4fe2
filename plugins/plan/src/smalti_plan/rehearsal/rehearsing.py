"""All phases of a rehearsal in their order, and the record of what they have counted. Only in the process of a rehearsal."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from dataclasses import fields
from typing import Literal, cast

import torch

from smalti import DistributedPlan, UserError
from smalti.config import Config
from smalti.data import Bucket
from smalti.models import dry_run
from smalti.parallel import Parallel, in_bf16, pins_memory
from smalti.plugins import Plugins, choose_distributed, find_family
from smalti.training import open_parallel
from smalti_plan.largest_bucket import largest_bucket
from smalti_plan.records import MemoryParts, Operations, PhasePeak, Rehearsal, Traffic
from smalti_plan.rehearsal import attention, cluster, fake_tensors, replicas
from smalti_plan.rehearsal.devices import python_backend
from smalti_plan.rehearsal.known import Known
from smalti_plan.rehearsal.ledger import Counted, Ledger
from smalti_plan.rehearsal.request import Request
from smalti_plan.rehearsal.stage import Stage

_ALLOCATION_UNIT = 512
"""CUDA's caching allocator rounds sizes up to a multiple of this."""


class Rehearsing:
    """Of one request. `phase` is the one that it is in, `notes` what the figures leave out."""

    def __init__(self, request: Request, config: Config, plugins: Plugins, closing: ExitStack) -> None:
        self._request, self._config, self._plugins, self._closing = request, config, plugins, closing
        self.phase = "load"
        self.notes: list[str] = []

    def through(self) -> Rehearsal:
        """Build, train, save and validate. Raises what the run would raise."""
        request, config, plugins = self._request, self._config, self._plugins
        gc.freeze()  # modules that are imported are most of what garbage is looked for in
        cluster.join(request.rank, request.ranks, local=request.local)
        fake_tensors.install()
        attention.install()
        plan = choose_distributed(config, plugins)
        kind = "cpu" if request.kind == "cpu" else _kind()
        if kind == python_backend.KIND and in_bf16(config):  # torch has no autocast for kinds that Python brings
            raise UserError("a run in bf16 is rehearsed with a C++ compiler only, and there is none", fix="install g++")
        pins_memory(kind)  # which fake memory would always be
        mode = fake_tensors.RehearsalMode()
        with dry_run():
            stage = self._opened(open_parallel(plan, config), plan, Known(mode))
            with mode, stage.ledger:
                for self.phase, act in (
                    ("encoding", stage.encode),
                    ("load", stage.build),
                    ("step", stage.step),
                    ("save", stage.save),
                    ("periodic work", stage.periodic),
                ):
                    act()
                return self._record(stage)

    def _opened(self, parallel: Parallel, plan: DistributedPlan, known: Known) -> Stage:
        request, config = self._request, self._config
        kind = torch.device(parallel.world.device).type
        ledger = Ledger(kind, _ALLOCATION_UNIT if kind != "cpu" else 1, known)
        replicas.install(lambda: ledger.counting(ledger.phase, "gradients"))
        family = find_family(config, self._plugins)
        bucket = largest_bucket(config, self._plugins, family.alignment).bucket
        if request.width:
            bucket = Bucket(request.width, request.height)
        return Stage(
            config=config,
            plugins=self._plugins,
            plan=plan,
            parallel=parallel,
            ledger=ledger,
            family=family,
            bucket=bucket,
            notes=self.notes,
        )

    def _record(self, stage: Stage) -> Rehearsal:
        request, run = self._request, stage.run
        resident, host = stage.resident
        modelled = replicas.replicas_in(run.model) is not None
        if modelled:
            self.notes.append("messages between ranks are computed, not rehearsed: torch's DDP needs memory that has values")
        tokens = stage.samples.texts.tokens if stage.samples.texts is not None else 0
        return Rehearsal(
            candidate=request.candidate,
            device=request.device,
            ranks=request.ranks,
            rank=request.rank,
            counted="modelled" if modelled else "rehearsed",
            parameters=run.info.parameters,
            trainable=run.info.trainable,
            width=stage.bucket.width,
            height=stage.bucket.height,
            text_tokens=tokens,
            resident=parts(resident),
            resident_host=host,
            phases=self._peaks(stage),
            traffic=traffic_of(stage.counted),
            operations=operations_of(stage.counted),
            bytes_touched=stage.counted.touched,
            save_bytes=stage.saved,
        )

    def _peaks(self, stage: Stage) -> dict[str, PhasePeak]:
        found = {}
        for name, moment in stage.ledger.moments.items():
            pinned = stage.pinned if name == "save" else 0
            if name:
                found[name] = PhasePeak(device=parts(moment.device), host=moment.host + pinned, pinned=pinned)
        return found


def parts(held: dict[str, int]) -> MemoryParts:
    """Bytes by kind as a record."""
    names = {each.name for each in fields(MemoryParts)}
    assert not (unknown := {name for name, size in held.items() if size} - names), unknown
    return MemoryParts(**{name: size for name, size in held.items() if name in names})


def traffic_of(counted: Counted) -> tuple[Traffic, ...]:
    Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "send"]  # noqa: N806
    return tuple(
        Traffic(
            collective=cast(Collective, name),
            phase=phase,
            ranks=ranks,
            nodes=nodes,
            bytes=size,
            calls=counted.messages[name, phase, ranks, nodes],
        )
        for (name, phase, ranks, nodes), size in counted.traffic.items()
    )


def operations_of(counted: Counted) -> tuple[Operations, ...]:
    Kind = Literal["matmul", "convolution", "attention", "other"]  # noqa: N806
    return tuple(
        Operations(kind=cast(Kind, kind), dtype=dtype, flops=count, calls=counted.calls[kind, dtype])
        for (kind, dtype), count in counted.flops.items()
    )


def _kind() -> str:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return device.type
