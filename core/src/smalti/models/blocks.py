"""Finding a model's repeated units from its structure alone: no weights, no memory, no forward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from smalti.types import Block


def find_blocks(model: nn.Module, class_names: Sequence[str] = ()) -> list[Block]:
    """The repeated blocks, outermost first and in the order in which the model holds them.

    With `class_names`, every module of those classes; without, the classes that occur more than once inside `ModuleList` and
    `Sequential`. A block inside another block is not listed. The last one is marked not to reshard: backward needs it at once.
    """
    wanted = set(class_names) or _repeated_classes(model)
    found = [
        Block(path=path, class_name=type(module).__name__, parameters=_count(module))
        for path, module in _outermost(model, wanted)
    ]
    if found:
        last = found[-1]
        found[-1] = Block(path=last.path, class_name=last.class_name, parameters=last.parameters, reshard=False)
    return found


def _repeated_classes(model: nn.Module) -> set[str]:
    """Classes of which some container holds at least two, apart from plain layers and containers."""
    found = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            counts = Counter(type(child).__name__ for child in module if next(child.children(), None) is not None)
            found |= {name for name, count in counts.items() if count > 1}
    return found - {"ModuleList", "Sequential"}


def _outermost(module: nn.Module, wanted: set[str], prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if type(child).__name__ in wanted:
            yield path, child
        else:
            yield from _outermost(child, wanted, path)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
