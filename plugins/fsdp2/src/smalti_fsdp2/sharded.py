"""`Parallel` for a model whose parameters, gradients and optimizer state are sharded over the ranks: torch's `fully_shard`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from smalti import Block, Config
from smalti.models import ModelFamily, Weights, compile_blocks, context_plan
from smalti.parallel import ModelState, PortableState, ProcessGroupParallel, TrainingState
from smalti_fsdp2.activation_checkpointing import recompute
from smalti_fsdp2.context import context_group, split_context
from smalti_fsdp2.host_shards import host_shards
from smalti_fsdp2.load_weights import fill
from smalti_fsdp2.options import ContextOptions, FsdpOptions
from smalti_fsdp2.pure_blocks import compute_in_bf16
from smalti_fsdp2.sharding import learn_order, precision, prefetch, shard, shard_mesh, use_symmetric_memory
from smalti_fsdp2.wrapping import units
from smalti_memory.host_memory import pin_limit

_log = logging.getLogger(__name__)


class Fsdp2Parallel(ProcessGroupParallel):
    """Every rank holds a part of each parameter; a group of them is gathered just before it computes."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, context=config[ContextOptions].context_parallel_size, single=True)
        self._options = config[FsdpOptions]
        self._mesh = shard_mesh(
            self.world, self._options.fsdp_shard_size, offload=self._options.fsdp_cpu_offload, timeout=self.timeout
        )
        self._shards = self._mesh.get_group("shard")
        self._synchronised = True

    def share_tokens(self, model: nn.Module, family: ModelFamily) -> None:
        """Where ranks work on the same samples, make the model work on this rank's part of the tokens. *Collective*."""
        if self.world.context > 1:
            strategy = self.config[ContextOptions].context_parallel_comm_strategy
            split_context(model, context_plan(family, model), context_group(self.world, self.timeout), strategy)

    def wrap(self, model: nn.Module, blocks: Sequence[Block], weights: Weights) -> nn.Module:
        """The model, sharded and with its weights. *Collective*."""
        options = self._options
        on_cpu = self._mesh.device_type == "cpu"
        if options.fsdp_cpu_offload and on_cpu and self.world.is_main:
            _log.warning("fsdp_cpu_offload has no effect: the ranks train in host memory already")
        if options.fsdp_bf16_blocks and precision(options, bf16=self.bf16).param_dtype == torch.bfloat16:
            compute_in_bf16((model.get_submodule(block.path) for block in blocks), self._mesh.device_type)
        if options.fsdp_activation_checkpointing:
            mode, every = options.fsdp_activation_checkpointing_mode, options.fsdp_activation_checkpointing_every
            recompute(model, blocks, mode=mode, every=every)
        compile_blocks(model, blocks, self.config)
        chosen = units(model, blocks, options)
        shard(model, chosen, self._mesh, options, bf16=self.bf16)
        if options.fsdp_symmetric_memory:
            use_symmetric_memory(model)
        self._groups = [model.get_submodule(unit.path) for unit in chosen]
        self._prefetch(model)
        learn_order(model, self._groups, partial(self._reorder, model))
        fill(
            model,
            weights,
            self,
            on_host=on_cpu or options.fsdp_cpu_offload,
            from_first=options.fsdp_cpu_ram_efficient_loading,
            streamed=host_shards(self.config, self.world, self._groups),
            pin_limit=pin_limit(self.config, self.world),
        )
        return model

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """Gradients of micro-batches are added up in shards; between copies of the model (HSDP) they are averaged once a step.

        Or else they are added up whole, and nothing is sent before the last micro-batch.
        """
        if last is not self._synchronised:
            if self._options.fsdp_sync_each_batch:
                self._root.set_requires_all_reduce(last)
            else:
                self._root.set_requires_gradient_sync(last)
            self._synchronised = last
        if not self._options.fsdp_sync_each_batch:
            self._root.set_is_last_backward(last)
        yield

    @torch.no_grad()
    def clip_gradients(self, limit: float) -> Tensor:
        """On this rank's part of every gradient, with one all-reduce; torch's own would treat each as a DTensor."""
        gradients = [_local(parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if self._shards.size() > 1:
            squares = norm.square()
            dist.all_reduce(squares, group=self._shards)
            norm = squares.sqrt()
        if limit > 0:
            torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def training_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingState:
        assert isinstance(model, FSDPModule)
        self._root = model
        return ShardedState(model, optimizer, self._prefetch)

    def _reorder(self, model: nn.Module, groups: list[nn.Module]) -> None:
        self._groups = groups
        self._prefetch(model)

    def _prefetch(self, model: nn.Module) -> None:
        prefetch(
            self._groups,
            ahead=self._options.fsdp_forward_prefetch if model.training else 0,
            behind=self._options.fsdp_backward_prefetch,
        )


class ShardedState(ModelState):
    """The state in DTensors, read and written only while no parameters are gathered."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, prefetch: Callable[[nn.Module], None]) -> None:
        super().__init__(model, optimizer)
        self._prefetch = prefetch

    def portable(self) -> PortableState:
        self.invalidate_gathered()
        return super().portable()

    def load(self, state: PortableState) -> None:
        self.invalidate_gathered()
        super().load(state)

    def invalidate_gathered(self) -> None:
        """Free gathered parameters: a forward pass without backward leaves some, and the next would use them.

        In evaluation mode the model prefetches nothing: that would be left too, and could not be freed here.
        """
        self._prefetch(self.model)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
