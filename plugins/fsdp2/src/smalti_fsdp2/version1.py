"""`Parallel` on torch's first FSDP, which flattens each group of parameters into one and cuts that. Deprecated; it works.

A parameter that is not gathered is a flat slice of itself, perhaps an empty one. What leaves this module are whole shapes
again: the portable state is a copy of the live one, as DTensors, like those of version 2.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.fsdp.wrap import CustomPolicy

from smalti import Block, Config
from smalti.checkpoint.portable import fill_settings, named_parameters, optimizer_settings, portable_name
from smalti.group import Group
from smalti.models.compilation import compile_blocks
from smalti.models.family import Weights
from smalti.parallel import PortableState, Ranks
from smalti.settings import TrainingOptions
from smalti_fsdp2.filling import fill_buffers
from smalti_fsdp2.options import FsdpOptions
from smalti_fsdp2.recomputation import recompute
from smalti_fsdp2.sharding import precision, shard_mesh
from smalti_fsdp2.wrapping import units

_log = logging.getLogger(__name__)
_DEPRECATED = "FSDP 1 is deprecated; --fsdp_version=2 reads the same options and checkpoints"


class FullySharded(Group):
    """Every rank holds a slice of each group of parameters; a group is gathered just before it computes."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, alone_too=True)
        self._config = config
        self._options = config[FsdpOptions]
        self._bf16 = config[TrainingOptions].mixed_precision == "bf16"
        self._mesh = shard_mesh(self.world, self._options.fsdp_shard_size)
        if self.world.is_main:
            _log.warning(_DEPRECATED)

    def wrap(self, model: nn.Module, blocks: Sequence[Block], weights: Weights) -> nn.Module:
        options = self._options
        if options.fsdp_activation_checkpointing:
            mode, every = options.fsdp_activation_checkpointing_mode, options.fsdp_activation_checkpointing_every
            recompute(model, blocks, mode=mode, every=every)
        compile_blocks(model, blocks, self._config)
        groups = {model.get_submodule(unit.path): _strategy(self._mesh, unit.reshard) for unit in units(model, blocks, options)}
        fill_buffers(model, dict(model.named_buffers(remove_duplicate=False)), weights, self.world.device)
        mixed = precision(options, bf16=self._bf16)
        on_cpu = self._mesh.device_type == "cpu"
        return Root(
            model,
            device_mesh=self._mesh,
            device_id=torch.device(self.world.device),
            sharding_strategy=_strategy(self._mesh, options.fsdp_reshard_after_forward),
            auto_wrap_policy=CustomPolicy(lambda module: {"sharding_strategy": groups[module]} if module in groups else False),
            mixed_precision=MixedPrecision(
                param_dtype=mixed.param_dtype,
                reduce_dtype=mixed.reduce_dtype,
                cast_forward_inputs=False,
                cast_root_forward_inputs=False,
                _module_classes_to_ignore=(),
            ),
            cpu_offload=CPUOffload(options.fsdp_cpu_offload and not on_cpu),
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE if options.fsdp_backward_prefetch else None,
            forward_prefetch=options.fsdp_forward_prefetch > 0,
            limit_all_gathers=options.fsdp_limit_all_gathers,
            use_orig_params=True,
            param_init_fn=_filling(model, weights, self, from_first=options.fsdp_cpu_ram_efficient_loading),
        )

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def bind(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        assert isinstance(model, Root)
        self._model, self._optimizer = model, optimizer
        return model, optimizer

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._model.no_sync()

    def autocast(self) -> AbstractContextManager[None]:
        if not self._bf16:
            return nullcontext()
        return torch.autocast(torch.device(self.world.device).type, dtype=torch.bfloat16)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def clip_gradients(self, limit: float) -> Tensor:
        return self._model.clip_grad_norm_(limit if limit > 0 else float("inf"))

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def discard(self) -> None:
        self._optimizer.zero_grad()

    def refresh(self, model: nn.Module) -> None:
        """Let go of gathered parameters: a forward pass without backward leaves some, and the next would use them."""
        for unit in FullyShardedDataParallel.fsdp_modules(model):
            if unit._is_root is not None and unit._handle is not None:
                _reshard(unit, unit._handle, True)

    def portable_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> PortableState:
        self.refresh(model)
        return PortableState(
            model=get_model_state_dict(model, options=_OPTIONS),
            moments=_moments(model, optimizer),
            settings=optimizer_settings(optimizer, named_parameters(model)),
            optimizer=type(optimizer).__name__,
        )

    def load_portable_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: PortableState) -> None:
        self.refresh(model)
        set_model_state_dict(model, dict(state.model), options=_OPTIONS)
        if state.optimizer == type(optimizer).__name__:
            _set_moments(model, optimizer, state)
            fill_settings(optimizer, named_parameters(model), state.settings)


_OPTIONS = StateDictOptions(cpu_offload=True)


class Root(FullyShardedDataParallel):
    """The outermost group, whose parameters have the names that the family gave them."""

    def named_parameters(self, *arguments: object, **named: object) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters(*arguments, **named):
            yield portable_name(name), parameter


def _strategy(mesh: DeviceMesh, reshard: bool) -> ShardingStrategy:
    if mesh.ndim == 2:
        return ShardingStrategy.HYBRID_SHARD if reshard else ShardingStrategy._HYBRID_SHARD_ZERO2
    return ShardingStrategy.FULL_SHARD if reshard else ShardingStrategy.SHARD_GRAD_OP


def _filling(model: nn.Module, weights: Weights, ranks: Ranks, *, from_first: bool) -> Callable[[nn.Module], None]:
    """What gives a module's own parameters their first values; FSDP calls it group by group, and cuts a group at once.

    With `from_first`, rank 0 alone reads `weights` and sends each tensor to the others.
    """
    device = ranks.world.device
    paths = {module: path for path, module in model.named_modules()}
    made: dict[nn.Parameter, nn.Parameter] = {}  # shared parameters stay shared

    @torch.no_grad()
    def first(name: str, like: Tensor) -> Tensor:
        if from_first and not ranks.world.is_main:
            tensor = torch.empty_like(like, device=device)
        else:
            tensor = weights.get(name).to(device, like.dtype)
        if from_first:
            dist.broadcast(tensor, 0)
        return tensor

    def fill(module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in made:
                path = f"{paths[module]}.{name}" if paths[module] else name
                made[parameter] = nn.Parameter(first(path, parameter), requires_grad=parameter.requires_grad)
            module._parameters[name] = made[parameter]

    return fill


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    if not optimizer.state:
        return {}  # torch would make a step to have some
    found = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)["state"]
    return {
        name: tensors
        for name, state in found.items()
        if (tensors := {key: value for key, value in state.items() if isinstance(value, Tensor)})
    }


def _set_moments(model: nn.Module, optimizer: torch.optim.Optimizer, state: PortableState) -> None:
    names = {parameter: name for name, parameter in named_parameters(model).items()}
    groups = [{**group, "params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups]
    set_optimizer_state_dict(model, optimizer, {"state": dict(state.moments), "param_groups": groups}, options=_OPTIONS)
