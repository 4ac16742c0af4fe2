"""Model and optimizer state in the form that every strategy reads: tensors by parameter name.

`capture` and `restore` are for models that hold their parameters, as plain tensors or DTensors; the other functions are for
strategies that build their own. Names are those of the plain model, whatever compiles, checkpoints or replicates it.

Switches that choose between implementations of the same mathematics (fused, foreach ...) belong to the run; they are not saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from smalti.errors import CheckpointError

_WRAPPERS = frozenset(("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"))
"""Names that torch.compile and the wrappers for activation checkpointing and FSDP 1 put into parameter names."""
_SWITCHES = frozenset(("params", "param_names", "foreach", "fused", "capturable", "differentiable"))
_VALUES = "values"
"""Key in a parameter group: state per parameter that is not a tensor."""


@dataclass(kw_only=True)
class PortableState:
    """Model and optimizer state in the form that every strategy reads, whichever wrote it.

    All keys are parameter names of the unwrapped model. Values are plain tensors or DTensors: each rank holds its shard of a
    DTensor, and the same plain tensor as every other rank. `FlatRange`s are for loading only. Frozen parameters are left out.

    `optimizer_state` maps a parameter's name to its state: "exp_avg", "exp_avg_sq", "step" ... -> tensor. `param_groups` are
    the hyper-parameters of each parameter group, JSON-able, without parameters. `optimizer` is the optimizer's class name.

    `allocate` takes the name of a parameter, a key of its state and a dtype, and returns the tensor into which that state is
    read from a checkpoint; None: a new tensor like the parameter. It is called only for state that has the parameter's shape,
    that a checkpoint has and that `optimizer_state` lacks.
    """

    model: dict[str, Tensor]
    optimizer_state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    param_groups: list[dict[str, object]] = field(default_factory=list)
    optimizer: str = ""
    allocate: Callable[[str, str, torch.dtype], Tensor] | None = None


class FlatRange(Tensor):
    """This rank's range of a flattened tensor, (n,): any range, also an empty one.

    For strategies that shard flat tensors. Checkpoints are read straight into it. `whole` is the shape of the full tensor,
    `begin` the flat index of the first element.
    """

    whole: torch.Size
    begin: int
    # What is computed from it is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, elements: Tensor, whole: torch.Size, begin: int) -> Self:
        """The same memory, which must be the host's and in one piece: (n,)."""
        span = elements.detach().as_subclass(cls)
        span.whole, span.begin = whole, begin
        return span

    @classmethod
    def empty(cls, length: int, whole: torch.Size, begin: int, dtype: torch.dtype = torch.float32) -> Self:
        """With any values."""
        return cls.of(torch.empty(length, dtype=dtype), whole, begin)


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Of the whole tensor of which a rank may hold a part."""
    return tuple(tensor.whole if isinstance(tensor, FlatRange) else tensor.shape)


def named_state(values: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Optimizer state by flat names, "PARAMETER.KEY", as checkpoints hold it."""
    return {f"{name}.{key}": tensor for name, state in values.items() for key, tensor in state.items()}


class ModelState:
    """`TrainingState` of a model whose parameters, plain tensors or DTensors, are the fp32 weights that the optimizer steps."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def portable(self) -> PortableState:
        return capture(self.model, self.optimizer)

    def empty(self) -> PortableState:
        return self.portable()

    def load(self, state: PortableState) -> None:
        restore(self.model, self.optimizer, state)

    def master_weights(self) -> dict[str, Tensor]:
        return {name: parameter for name, parameter in named_parameters(self.model).items() if parameter.requires_grad}

    def portable_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(weights)

    def empty_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.portable_weights(weights)

    @torch.no_grad()
    def copy_from(self, portable: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        for name, tensor in weights.items():
            if tensor is not portable[name]:
                tensor.copy_(portable[name])

    def invalidate_gathered(self) -> None:
        """Nothing is derived from the weights."""


def capture(model: nn.Module, optimizer: torch.optim.Optimizer) -> PortableState:
    """The state as it is. Refers to the live tensors; what changes after is seen through it."""
    parameters = named_parameters(model)
    return PortableState(
        model=model_tensors(model),
        optimizer_state=optimizer_state_of(optimizer, parameters),
        param_groups=param_groups_of(optimizer, parameters),
        optimizer=type(optimizer).__name__,
    )


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, state: PortableState) -> None:
    """Restore the model and the optimizer: training continues bit for bit.

    The model's tensors are copied into; optimizer state is taken over without a copy, so `state` must not be given to a
    second optimizer. With a state from another optimizer only the model is restored.
    """
    fill_model(model, state.model)
    if state.optimizer == type(optimizer).__name__:
        parameters = named_parameters(model)
        fill_optimizer_state(optimizer, parameters, state.optimizer_state)
        fill_param_groups(optimizer, parameters, state.param_groups)


def portable_name(name: str) -> str:
    """A parameter's name in the plain model."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by portable name; one that is used in several places once, under its first name."""
    return {portable_name(name): parameter for name, parameter in _plain(model).named_parameters()}


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters that train and persistent buffers by portable name, the live ones.

    What is frozen is left out: it is what the run began with, so a checkpoint of an adapter is as small as the adapter.
    """
    tensors: dict[str, Tensor] = {}
    seen = _frozen(_plain(model))
    for name, value in _plain(model).state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"the model keeps {name}, a {type(value).__name__}; a checkpoint holds tensors only")
        if id(value) not in seen:
            seen.add(id(value))
            tensors[portable_name(name)] = value
    return tensors


def fill_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors of the same names and shapes into the model; those that are the model's own already are left alone."""
    own = model_tensors(model)
    if own.keys() != tensors.keys():
        raise CheckpointError(f"the model has other tensors: {_some(own.keys() ^ tensors.keys())}")
    with torch.no_grad():
        for name, tensor in own.items():
            if tensor is not tensors[name]:
                if tensor.shape != tensors[name].shape:
                    raise CheckpointError(f"{name} has another shape in the model")
                tensor.copy_(tensors[name])


def optimizer_state_of(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The tensors of an optimizer's state, by parameter and key; nothing for parameters that were never stepped."""
    state: dict[str, dict[str, Tensor]] = {}
    for name, parameter in _optimized(optimizer, parameters).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if "." in key:
                raise CheckpointError(
                    f"the optimizer keeps {key!r}; a name with a dot cannot be distinguished from a parameter's"
                )
            if isinstance(value, Tensor):
                state.setdefault(name, {})[key] = value
    return state


def param_groups_of(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> list[dict[str, object]]:
    """Hyper-parameters per parameter group, JSON-able, with whatever is kept per parameter and is no tensor."""
    names = _names(parameters)
    groups = []
    for group in optimizer.param_groups:
        plain = {key: _as_json(key, value) for key, value in group.items() if key not in _SWITCHES}
        values: dict[str, object] = {}
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if kept := {key: _as_json(key, value) for key, value in state.items() if not isinstance(value, Tensor)}:
                values[names[id(parameter)]] = kept
        groups.append(plain | {_VALUES: values} if values else plain)
    return groups


def fill_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], state: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Replace the tensors of an optimizer's state. They are moved to where the optimizer wants them, else taken as they are."""
    optimized = _optimized(optimizer, parameters)
    if unknown := state.keys() - optimized.keys():
        raise CheckpointError(f"optimizer state of parameters that are not optimized: {_some(unknown)}")
    on_device = {
        id(parameter): bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for name, parameter in optimized.items():
        optimizer.state.pop(parameter, None)
        for key, tensor in state.get(name, {}).items():
            # torch counts steps on the CPU, unless a kernel on the device reads the count.
            device = parameter.device if key != "step" or on_device[id(parameter)] else torch.device("cpu")
            optimizer.state[parameter][key] = tensor.to(device)


def fill_param_groups(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], param_groups: list[dict[str, object]]
) -> None:
    """Set hyper-parameters group by group, each in the type that the optimizer has it in."""
    if len(param_groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the optimizer has {len(optimizer.param_groups)} parameter groups, its saved state {len(param_groups)}"
        )
    for group, saved in zip(optimizer.param_groups, param_groups, strict=True):
        for key, value in saved.items():
            if key == _VALUES and isinstance(value, dict):
                for name, kept in value.items():
                    optimizer.state[parameters[name]].update(kept)
            else:
                group[key] = _like(group.get(key), value)


def regrouped(saved: list[dict[str, object]], own: list[dict[str, object]]) -> list[dict[str, object]]:
    """Saved parameter groups for an optimizer that has its parameters in other groups, `own`.

    What was saved, if there are as many groups or none to compare with. Else its own hyper-parameters, and what was saved per
    parameter, which does not depend on the groups, or was counted in the first group: a group has no such key at first.
    """
    if not own or len(saved) == len(own):
        return saved
    kept = (cast(dict[str, object], group.get(_VALUES, {})) for group in saved)
    values = {name: value for each in kept for name, value in each.items()}
    counted = {key: value for group in saved[:1] for key, value in group.items() if key != _VALUES}
    plain = [counted | {key: value for key, value in group.items() if key != _VALUES} for group in own]
    return [plain[0] | {_VALUES: values}, *plain[1:]] if values else plain


def _plain(model: nn.Module) -> nn.Module:
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _frozen(model: nn.Module) -> set[int]:
    """The ids of parameters that do not train, and of buffers in modules that have parameters, none of which trains."""
    frozen = {id(parameter) for parameter in model.parameters() if not parameter.requires_grad}
    for module in model.modules() if frozen else ():
        own = {id(parameter) for parameter in module.parameters()}
        if own and own <= frozen:
            frozen |= {id(buffer) for buffer in module.buffers()}
    return frozen


def _names(parameters: Mapping[str, Tensor]) -> dict[int, str]:
    return {id(parameter): name for name, parameter in parameters.items()}


def _optimized(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters that the optimizer steps, by name."""
    names = _names(parameters)
    found = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if strangers := sum(id(parameter) not in names for parameter in found):
        raise CheckpointError(f"the optimizer steps {strangers} parameters that the model does not have")
    return {names[id(parameter)]: parameter for parameter in found}


def _as_json(key: str, value: object) -> object:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor() if value.ndim == 0:
            return value.item()
        case list() | tuple():
            return [_as_json(key, item) for item in value]
        case dict():
            return {str(name): _as_json(key, item) for name, item in value.items()}
    raise CheckpointError(f"the optimizer's {key} is a {type(value).__name__}, which a checkpoint cannot hold")


def _like(current: object, value: object) -> object:
    if isinstance(current, Tensor) and isinstance(value, int | float):
        return torch.full_like(current, value)
    if isinstance(current, tuple) and isinstance(value, list):
        return tuple(value)
    return value


def _some(names: set[str]) -> str:
    chosen = sorted(names)
    return ", ".join(chosen[:3]) + (f" and {len(chosen) - 3} more" if len(chosen) > 3 else "")
