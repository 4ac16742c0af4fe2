"""The blocks of a model: those of named classes, and a description of all that repeats.

Classes are meant by their bare names, as in the options that name them. Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, cast

from smalti import Block, Problem, UserError, did_you_mean
from smalti.models import CONTAINERS, BlockClass, Structure, count_parameters, find_blocks, repeated_classes

if TYPE_CHECKING:
    from torch import nn


def blocks_named(model: nn.Module, class_names: Sequence[str]) -> list[Block]:
    """`find_blocks` for classes that somebody typed. Raises UserError for one that the model does not have."""
    problems = unknown_classes(class_names, _classes_in(model))
    if problems:
        raise UserError("\n    ".join(problem.message for problem in problems), fix=problems[0].fix)
    return find_blocks(model, class_names)


def unknown_classes(class_names: Iterable[str], known: Collection[str]) -> list[Problem]:
    """A problem for each name that is none of the `known` classes of a model, with the nearest ones."""
    problems = []
    for name in class_names:
        if name not in known:
            fix = f"{did_you_mean(name, known, count=2)} the model is made of {', '.join(sorted(known))}".lstrip()
            problems.append(Problem(message=f"the model has no part of a class {name!r}", fix=fix))
    return problems


def describe_blocks(model: nn.Module, class_names: Sequence[str] = ()) -> Structure:
    """Count a model, whose parameters may be on the meta device; `class_names` are those that its family names, if it does."""
    blocks = find_blocks(model, class_names)
    chosen = [model.get_submodule(block.path) for block in blocks]
    inner = {id(part) for block in chosen for part in block.modules() if part is not block}
    total = count_parameters([model])
    listed = repeated_classes(model) | set(class_names)
    found: dict[str, dict[str, nn.Module]] = {}
    for path, module in model.named_modules():
        if path and type(module).__name__ in listed:
            found.setdefault(type(module).__name__, {})[path] = module
    classes = [_describe(name, parts, total, name in class_names, inner) for name, parts in found.items()]
    buffers = {id(buffer): buffer.numel() for buffer in model.buffers()}
    return Structure(
        parameters=total,
        buffers=sum(buffers.values()),
        classes=tuple(sorted(classes, key=lambda each: (-each.parameters, each.class_name))),
        suggested=tuple(dict.fromkeys(block.class_name for block in blocks)),
        blocks=len(blocks),
        largest_block=max((block.parameters for block in blocks), default=0),
        outside=total - count_parameters(chosen),
        no_split_modules=tuple(cast("Iterable[str]", getattr(model, "_no_split_modules", None) or ())),
        modules=tuple(sorted(_classes_in(model))),
    )


def _describe(name: str, parts: dict[str, nn.Module], total: int, named: bool, inner: set[int]) -> BlockClass:
    sizes = [count_parameters([part]) for part in parts.values()]
    parameters = count_parameters(parts.values())
    paths = list(parts)
    return BlockClass(
        class_name=name,
        occurrences=len(parts),
        parameters=parameters,
        share=parameters / total if total else 0.0,
        smallest=min(sizes),
        largest=max(sizes),
        first=paths[0],
        last=paths[-1],
        named=named,
        nested=all(id(part) in inner for part in parts.values()),
    )


def _classes_in(model: nn.Module) -> set[str]:
    """The classes of all parts of the model, without the model itself and plain containers."""
    return {type(part).__name__ for part in model.modules() if part is not model} - CONTAINERS
