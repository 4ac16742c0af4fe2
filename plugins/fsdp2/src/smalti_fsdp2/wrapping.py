"""What is gathered together: which modules become groups of their own under the root, by the wrap policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import cast

from torch import nn

from smalti import Block, UserError
from smalti_fsdp2.options import FsdpOptions

Policy = Callable[[nn.Module], bool]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One group of parameters: gathered before its module computes, and freed after if `reshard`."""

    path: str
    reshard: bool


def units(model: nn.Module, blocks: Sequence[Block], options: FsdpOptions) -> list[Unit]:
    """The groups in forward order, without the root, which takes what is left.

    Raises UserError when the policy finds nothing where it should, or names a callable that is not there.
    """
    policy = options.fsdp_auto_wrap_policy
    keep = not options.fsdp_reshard_after_forward
    if policy == "NO_WRAP":
        return []
    if policy == "TRANSFORMER_BASED_WRAP":
        if not blocks:
            raise UserError(
                "no repeated blocks were found in the model, so FSDP would gather all of it at once",
                fix="name their classes with --fsdp_transformer_layer_cls_to_wrap, or --fsdp_auto_wrap_policy=SIZE_BASED_WRAP",
            )
        return [Unit(path=block.path, reshard=block.reshard and not keep) for block in blocks]
    if policy == "SIZE_BASED_WRAP":
        paths = _by_size(model, options.fsdp_min_num_params)
    else:
        paths = [path for path, module in model.named_modules() if path and load_policy(policy)(module)]
    # The last one is needed again at once when backward begins.
    return [Unit(path=path, reshard=path != paths[-1] and not keep) for path in paths]


def load_policy(name: str) -> Policy:
    """The callable "module.name": called with each module of the model, it answers whether that is a group."""
    module, _, attribute = name.replace(":", ".").rpartition(".")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"fsdp_auto_wrap_policy={name} cannot be imported: {error}",
            fix="give module.callable as it can be imported here, with PYTHONPATH if need be",
        ) from error
    if not callable(found):
        raise UserError(f"fsdp_auto_wrap_policy={name} is a {type(found).__name__}", fix="name a callable that takes a module")
    return cast(Policy, found)


def _by_size(model: nn.Module, least: int) -> list[str]:
    """The innermost modules that hold at least `least` parameters not yet in a group, in forward order.

    Containers compute nothing of their own, so what they hold goes to the module above them.
    """
    found: list[str] = []

    def walk(module: nn.Module, path: str) -> int:
        """The parameters of the module that are in no group yet."""
        left = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        left += sum(walk(child, f"{path}.{name}" if path else name) for name, child in module.named_children())
        if path and left >= least and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            found.append(path)
            return 0
        return left

    walk(model, "")
    order = {path: place for place, (path, _) in enumerate(model.named_modules())}
    return sorted(found, key=order.__getitem__)


def modules(model: nn.Module, chosen: Sequence[Unit]) -> Iterator[tuple[Unit, nn.Module]]:
    """The units with their modules, innermost first, as sharding needs them."""
    for unit in sorted(chosen, key=lambda unit: -unit.path.count(".")):
        yield unit, model.get_submodule(unit.path)
