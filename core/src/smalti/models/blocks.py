"""Finding a model's repeated units from its structure alone: no weights, no memory, no forward pass.

Classes are meant by their bare names, as in the options that name them. Importing this module imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smalti.types import Block

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class BlockClass:
    """A class that a model repeats, or that its family names. Counted recursively; parameters that are shared count once.

    `parameters` is what all of its `occurrences` hold together and `share` that part of the model, from 0 to 1; `smallest` and
    `largest` are what one of them holds. `first` and `last` are the paths of two of them. `named`: the family chose it;
    `nested`: it occurs only inside suggested blocks, so that it is no unit of its own.
    """

    class_name: str
    occurrences: int
    parameters: int
    share: float
    smallest: int
    largest: int
    first: str
    last: str
    named: bool
    nested: bool


@dataclass(frozen=True, kw_only=True)
class Structure:
    """What a model is made of. Parameters and buffers are counted in elements.

    `classes` come with most parameters first. `suggested` are the classes of the `blocks` that a run takes when nobody names
    any; the largest of these holds `largest_block` parameters, and `outside` are in none of them. `no_split_modules` is the
    model's own word, as models of transformers and diffusers have it, and `modules` the names of all classes in the model.
    """

    parameters: int
    buffers: int
    classes: tuple[BlockClass, ...]
    suggested: tuple[str, ...]
    blocks: int
    largest_block: int
    outside: int
    no_split_modules: tuple[str, ...]
    modules: tuple[str, ...]


def find_blocks(model: nn.Module, class_names: Sequence[str] = ()) -> list[Block]:
    """The repeated blocks, outermost first and in the order in which the model holds them.

    With `class_names`, every module of those classes; without, the classes that occur more than once inside `ModuleList` and
    `Sequential`. A block inside another block is not listed. The last one is marked not to reshard: backward needs it at once.
    """
    wanted = set(class_names) or repeated_classes(model)
    found = [
        Block(path=path, class_name=type(module).__name__, parameters=count_parameters([module]))
        for path, module in _outermost(model, wanted)
    ]
    if found:
        last = found[-1]
        found[-1] = Block(path=last.path, class_name=last.class_name, parameters=last.parameters, reshard=False)
    return found


CONTAINERS = frozenset(("ModuleList", "ModuleDict", "Sequential"))
"""Classes of torch that hold parts of a model and do nothing themselves."""


def repeated_classes(model: nn.Module) -> set[str]:
    """Classes of which some container holds at least two, apart from plain layers and containers."""
    from torch import nn

    found = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            counts = Counter(type(child).__name__ for child in module if next(child.children(), None) is not None)
            found |= {name for name, count in counts.items() if count > 1}
    return found - CONTAINERS


def _outermost(module: nn.Module, wanted: set[str], prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if type(child).__name__ in wanted:
            yield path, child
        else:
            yield from _outermost(child, wanted, path)


def count_parameters(modules: Iterable[nn.Module]) -> int:
    """The parameters that these modules hold together."""
    return sum({parameter: parameter.numel() for module in modules for parameter in module.parameters()}.values())
