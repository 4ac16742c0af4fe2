"""One process or DDP, with the frozen weights of blocks in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from smalti import Block
from smalti.models import Weights, materialise
from smalti.training import DdpParallel
from smalti_memory.host_memory import host_memory
from smalti_memory.options import MemoryOptions
from smalti_memory.streaming import BlockStream


class StreamedParallel(DdpParallel):
    """Parameters that train are replicated, as with DDP; each rank keeps all frozen weights in its host's memory."""

    def with_weights(self, model: nn.Module, blocks: Sequence[Block], weights: Weights) -> nn.Module:
        """Block by block, so that the device never holds more than one of those that are streamed."""
        self.stream = BlockStream(self.world.device, host_memory(self.config, self.world))
        streamed = self._streamed(model, blocks)
        for path, module in streamed.items():
            self.stream.add(materialise(module, _Part(weights, f"{path}."), self.world.device))
        with _left_out(model, streamed):
            materialise(model, weights, self.world.device)
        self.stream.start()
        # DDP would send them to the other ranks, from the device.
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
            model, [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        )
        return model

    def _streamed(self, model: nn.Module, blocks: Sequence[Block]) -> dict[str, nn.Module]:
        """By path, the blocks that do not stay on the device: the last ones do, as they are needed first on the way back.

        A block within another belongs to that one, and one that shares a parameter with the rest of the model stays.
        """
        paths = [block.path for block in blocks]
        outer = [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]
        names: dict[nn.Parameter, set[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, set()).add(next((path for path in outer if name.startswith(f"{path}.")), ""))
        shared = {path for owners in names.values() if len(owners) > 1 for path in owners}
        found = {path: model.get_submodule(path) for path in outer if path not in shared}
        room = self.config[MemoryOptions].resident_gib * 2**30
        for path, module in reversed(list(found.items())):
            room -= sum(parameter.nbytes for parameter in module.parameters() if not parameter.requires_grad)
            if room < 0:
                break
            del found[path]
        return found


class _Part:
    """The weights of one module of a model."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._weights, self._prefix = weights, prefix

    def names(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._weights.names() if name.startswith(self._prefix))

    def get(self, name: str) -> Tensor:
        return self._weights.get(self._prefix + name)


@contextmanager
def _left_out(model: nn.Module, modules: dict[str, nn.Module]) -> Iterator[None]:
    """Within it the model has an empty module at each of these paths."""
    parents = {path: model.get_submodule(path.rpartition(".")[0]) for path in modules}
    try:
        for path, parent in parents.items():
            parent._modules[path.rpartition(".")[2]] = nn.Module()
        yield
    finally:
        for path, parent in parents.items():
            parent._modules[path.rpartition(".")[2]] = modules[path]
