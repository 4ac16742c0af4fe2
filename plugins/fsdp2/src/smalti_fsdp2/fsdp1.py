"""`Parallel` on torch's FSDP 1, which makes one flat tensor of a group of parameters and shards that. Deprecated; it works.

Outside of forward and backward a parameter is a flat slice of itself on each rank, often an empty one. The portable state has
full shapes: it is a copy, gathered group by group, in DTensors that are sharded like those of FSDP 2.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    OptimizerStateType,
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

from smalti import Block, Config, UserError
from smalti.models import Weights, compile_blocks
from smalti.parallel import (
    Communicator,
    ModelState,
    PortableState,
    ProcessGroupParallel,
    TrainingState,
    fill_param_groups,
    named_parameters,
    param_groups_of,
    portable_name,
)
from smalti_fsdp2.activation_checkpointing import recompute
from smalti_fsdp2.load_weights import fill_buffers
from smalti_fsdp2.options import FsdpOptions
from smalti_fsdp2.sharding import precision, shard_mesh
from smalti_fsdp2.wrapping import units

_log = logging.getLogger(__name__)
_EXPECTED = (
    "FSDP is switching to use `NO_SHARD`",  # one rank has nothing to shard
    "When using ``NO_SHARD``",
    r"Called FSDP.clip_grad_norm_\(\)",  # a rank may hold nothing but frozen slices
    ".* has both parameters with requires_grad=True and False",  # adapters
)
"""How torch's warnings begin that tell nothing new."""
_ON_HOST = StateDictOptions(cpu_offload=True, strict=False)
"""Copies of the state go to host memory: beside the live one, the accelerator has no room for them."""


class Fsdp1Parallel(ProcessGroupParallel):
    """Every rank holds a slice of each group of parameters; a group is gathered just before it computes."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, single=True)
        self._options = config[FsdpOptions]
        self._mesh = shard_mesh(self.world, self._options.fsdp_shard_size, offload=self._options.fsdp_cpu_offload)
        if self._mesh.ndim == 2 and self._mesh.size(1) == 1:
            fix = "--fsdp_shard_size=N above 1, or --fsdp_version=2"
            raise UserError("FSDP 1 does not average gradients over replicas that are not sharded", fix=fix)
        self._offload = self._options.fsdp_cpu_offload and self._mesh.device_type != "cpu"
        self._precision = precision(self._options, bf16=self.bf16)
        # Whole gradients of micro-batches are added up in the type of gathered parameters, their shards in fp32; but torch does
        # not add to shards on the host.
        gathers_bf16 = self._precision.param_dtype is torch.bfloat16
        self._adds_whole = self._offload or not (gathers_bf16 or self._options.fsdp_sync_each_batch)
        for message in _EXPECTED:
            warnings.filterwarnings("ignore", message)

    def wrap(self, model: nn.Module, blocks: Sequence[Block], weights: Weights) -> nn.Module:
        """The model with its weights, sharded one group after the other. *Collective*."""
        options = self._options
        if options.fsdp_cpu_offload and not self._offload and self.world.is_main:
            _log.warning("fsdp_cpu_offload has no effect: the ranks train in host memory already")
        if options.fsdp_activation_checkpointing:
            mode, every = options.fsdp_activation_checkpointing_mode, options.fsdp_activation_checkpointing_every
            recompute(model, blocks, mode=mode, every=every)
        compile_blocks(model, blocks, self.config)
        fill_buffers(model, dict(model.named_buffers(remove_duplicate=False)), weights, self.world.device)
        groups = {
            model.get_submodule(unit.path): {"sharding_strategy": _strategy(self._mesh, reshard=unit.reshard)}
            for unit in units(model, blocks, options)
        }
        return Root(
            model,
            sharding_strategy=_strategy(self._mesh, reshard=options.fsdp_reshard_after_forward),
            auto_wrap_policy=CustomPolicy(lambda module: groups.get(module, False)),
            param_init_fn=_first_weights(model, weights, self, from_first=options.fsdp_cpu_ram_efficient_loading),
            mixed_precision=MixedPrecision(
                param_dtype=self._precision.param_dtype,
                reduce_dtype=self._precision.reduce_dtype,
                cast_forward_inputs=False,
                cast_root_forward_inputs=False,
                _module_classes_to_ignore=(),
            ),
            cpu_offload=CPUOffload(offload_params=self._offload),
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE if options.fsdp_backward_prefetch else None,
            forward_prefetch=options.fsdp_forward_prefetch > 0,
            limit_all_gathers=options.fsdp_limit_all_gathers,
            use_orig_params=True,
            device_id=torch.device(self.world.device),
            device_mesh=self._mesh,
        )

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        return self._root.no_sync() if self._adds_whole and not last else nullcontext()

    def clip_gradients(self, limit: float) -> Tensor:
        return self._root.clip_grad_norm_(limit if limit > 0 else float("inf"))

    def training_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingState:
        assert isinstance(model, Root)
        self._root = model
        return FlatState(model, optimizer)


class FlatState(ModelState):
    """The state as copies in host memory: each group is gathered once for its parameters and once for each optimizer tensor."""

    def portable(self) -> PortableState:
        self.invalidate_gathered()
        found, aliases = cast(dict[str, Tensor], get_model_state_dict(self.model, options=_ON_HOST)), _aliases(self.model)
        return PortableState(
            model={name: tensor for name, tensor in found.items() if name not in aliases},
            optimizer_state=_optimizer_state(self.model, self.optimizer),
            param_groups=param_groups_of(self.optimizer, named_parameters(self.model)),
            optimizer=type(self.optimizer).__name__,
        )

    def load(self, state: PortableState) -> None:
        self.invalidate_gathered()
        if state.optimizer == type(self.optimizer).__name__:
            _set_optimizer_state(self.model, self.optimizer, state.optimizer_state)
            fill_param_groups(self.optimizer, named_parameters(self.model), state.param_groups)
        # Last, because torch lets a fresh optimizer make a step to create its state.
        again = {alias: state.model[name] for alias, name in _aliases(self.model).items()}
        set_model_state_dict(self.model, {**state.model, **again})

    def invalidate_gathered(self) -> None:
        """Free gathered parameters: a forward pass without backward leaves some, and the next would use them."""
        for group in FullyShardedDataParallel.fsdp_modules(self.model):
            handle = group._handle
            if group._is_root is not None and handle is not None and handle.uses_sharded_strategy:
                _reshard(group, handle, True)


class Root(FullyShardedDataParallel):
    """The outermost group, whose parameters have the names that the family gave them."""

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield portable_name(name), parameter


def _strategy(mesh: DeviceMesh, *, reshard: bool) -> ShardingStrategy:
    if mesh.ndim == 2:
        return ShardingStrategy.HYBRID_SHARD if reshard else ShardingStrategy._HYBRID_SHARD_ZERO2
    return ShardingStrategy.FULL_SHARD if reshard else ShardingStrategy.SHARD_GRAD_OP


def _first_weights(
    model: nn.Module, weights: Weights, communicator: Communicator, *, from_first: bool
) -> Callable[[nn.Module], None]:
    """The function that loads a module's own parameters. FSDP calls it for a group, and shards that before the next one.

    With `from_first`, rank 0 alone reads `weights` and sends each tensor to the others.
    """
    device = communicator.world.device
    paths = {module: path for path, module in model.named_modules()}
    made: dict[nn.Parameter, nn.Parameter] = {}  # what is shared stays shared; cutting empties these as well

    def value(name: str, like: Tensor) -> Tensor:
        if not from_first:
            return weights.get(name).to(device, like.dtype)
        tensor = (
            weights.get(name).to(device, like.dtype) if communicator.world.is_main else torch.empty_like(like, device=device)
        )
        dist.broadcast(tensor, 0)
        return tensor

    @torch.no_grad()
    def fill(module: nn.Module) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                path = f"{paths[module]}.{name}" if paths[module] else name
                made[parameter] = nn.Parameter(value(path, parameter), requires_grad=parameter.requires_grad)
            module._parameters[name] = made[parameter]

    return fill


def _aliases(model: nn.Module) -> dict[str, str]:
    """The further names of parameters that are used in several places, and the first one of each."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in every if first[parameter] != name}


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    if not optimizer.state:
        return {}  # torch would make a step to have some
    found = get_optimizer_state_dict(model, optimizer, options=_ON_HOST)["state"]
    tensors = {
        name: {key: value for key, value in state.items() if isinstance(value, Tensor)}
        for name, state in cast(dict[str, dict[str, object]], found).items()
    }
    return {name: state for name, state in tensors.items() if state}


def _set_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, dict[str, Tensor]]) -> None:
    state, groups = optimizer.state, optimizer.param_groups
    if tensors:
        names = {parameter: name for name, parameter in named_parameters(model).items()}
        named = [{**group, "params": [names[parameter] for parameter in group["params"]]} for group in groups]
        saved = cast(OptimizerStateType, {"state": dict(tensors), "param_groups": named})
        set_optimizer_state_dict(model, optimizer, saved, options=_ON_HOST)
    found = dict(optimizer.state) if tensors else {}
    state.clear()
    state.update(found)
    optimizer.state, optimizer.param_groups = state, groups  # torch has put others there; the run holds on to these
