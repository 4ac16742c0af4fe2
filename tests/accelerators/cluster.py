"""One rank among many that are not there: collective calls return at once, and every other rank says what this one says."""

import os
from collections import Counter

import torch.distributed as dist
import torch.distributed._tools.fake_collectives
import torch.distributed.device_mesh as device_mesh
import torch.testing._internal.distributed.fake_pg  # noqa: F401 - it registers the backend
from torch._subclasses.fake_tensor import unset_fake_temporarily

groups: list[dict[str, object]] = []
"""What each process group was asked for with, the first one too."""


messages: Counter[str] = Counter()
"""Tensors that went to or came from a single rank, by the kind of device they are on."""


def install() -> None:
    """For the rest of the process; before smalti is imported."""
    first, another, mesh = dist.init_process_group, dist.new_group, device_mesh.init_device_mesh

    def init_process_group(backend=None, **settings):
        groups.append({"backend": backend, **settings})
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        first("fake", store=dist.HashStore(), rank=rank, world_size=size)

    def new_group(ranks=None, timeout=None, backend=None, **settings):
        groups.append({"backend": backend, "ranks": ranks, **settings})
        return another(ranks, timeout=timeout, backend="fake")

    def init_device_mesh(*arguments, **settings):
        with unset_fake_temporarily():  # it counts ranks in a tensor
            return mesh(*arguments, **settings)

    def counted(name: str):
        own = getattr(dist, name)

        def send(tensor, *arguments, **settings):
            messages[tensor.device.type] += 1
            return own(tensor, *arguments, **settings)

        return send

    for name in ("send", "isend", "recv", "irecv"):
        setattr(dist, name, counted(name))
    dist.init_process_group, dist.new_group = init_process_group, new_group
    device_mesh.new_group = new_group
    device_mesh.init_device_mesh = dist.init_device_mesh = init_device_mesh

    from smalti.parallel.gloo import GlooCommunicator

    GlooCommunicator.all_reduce_max = lambda self, code: code
    GlooCommunicator.all_gather_text = lambda self, value: [value] * self.world.size


def stand(rank: int, ranks: int, *, local: int = 8) -> None:
    """Take the place of this rank."""
    places = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": min(local, ranks)}
    os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="nowhere", MASTER_PORT="1")
