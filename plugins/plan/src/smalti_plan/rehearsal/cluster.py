"""One rank among many that are not there: collective calls return at once, and every other rank says what this one says."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives
import torch.distributed.device_mesh as device_mesh
import torch.testing._internal.distributed.fake_pg
from torch._subclasses.fake_tensor import unset_fake_temporarily

from smalti.parallel import GlooCommunicator
from smalti_plan.rehearsal.devices import python_backend


def join(rank: int, ranks: int, *, local: int) -> None:
    """Take the place of this rank, `local` of them on each node, for the rest of the process.

    A single rank has no launcher, and finds none of its variables.
    """
    in_python = torch._C._get_privateuse1_backend_name() == python_backend.KIND
    place = 0 if in_python else rank % local  # the backend in Python has no current device but the first
    places = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": place, "LOCAL_WORLD_SIZE": min(local, ranks)}
    for name, value in places.items():
        os.environ.pop(name, None)
        if ranks > 1:
            os.environ[name] = str(value)
    if ranks > 1:
        os.environ.update(MASTER_ADDR="nowhere", MASTER_PORT="1")
    distributed: Any = dist
    first, another, mesh = dist.init_process_group, dist.new_group, device_mesh.init_device_mesh

    def init_process_group(*_: object, **__: object) -> None:
        first("fake", store=distributed.HashStore(), rank=rank, world_size=ranks)

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **_: object) -> Any:
        return another(ranks, timeout=timeout, backend="fake")

    def init_device_mesh(*arguments: Any, **settings: Any) -> Any:
        with unset_fake_temporarily():  # it counts ranks in a tensor
            return mesh(*arguments, **settings)

    if in_python:
        for known in (dist.Backend.backend_capability["fake"], dist.Backend.default_device_backend_map):
            _know(known, python_backend.KIND)
    distributed.init_process_group, distributed.new_group = init_process_group, new_group
    distributed.init_device_mesh = init_device_mesh
    meshes: Any = device_mesh
    meshes.new_group, meshes.init_device_mesh = new_group, init_device_mesh
    gloo: Any = GlooCommunicator
    gloo.all_reduce_max = lambda self, code: code
    gloo.all_gather_text = lambda self, value: [value] * self.world.size


def _know(known: Any, kind: str) -> None:
    """Let the made-up backend serve a kind of device that torch has no backend for."""
    if isinstance(known, dict):
        known.setdefault(kind, "fake")
    elif kind not in known:
        known.append(kind)
