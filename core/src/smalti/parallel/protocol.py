"""The verbs of a step whose meaning depends on how the model is spread over ranks.

A backend's plan names a factory for one of these; the loop calls nothing else. FSDP2 must shard before the optimizer exists;
DeepSpeed must see model and optimizer together and then owns backward and step: `bind` is where it makes its engine and
where others do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from smalti.types import World


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


class Communicator(Protocol):
    """Words between ranks. Methods marked *collective* must be called by every rank, in the same order."""

    @property
    def world(self) -> World: ...

    def all_reduce_max(self, code: int) -> int:
        """The largest code over ranks. Never waits for the accelerator. *Collective*."""
        ...

    def all_gather_text(self, value: str) -> Sequence[str]:
        """A short text from each rank, in rank order. For set-up and rare events. *Collective*."""
        ...

    def barrier(self) -> None:
        """Wait for every rank. *Collective*."""
        ...


class AbortableCommunicator(Communicator, Protocol):
    """Words between ranks that one of them can end for all."""

    def abort(self) -> None:
        """End every call that waits on this line, here and on other ranks, with an error; nothing can be said after it."""
        ...


class Parallel(Communicator, Protocol):
    """One rank's end of the backend. Methods marked *collective* must be called by every rank, in the same order."""

    def background_communicator(self) -> AbortableCommunicator:
        """Words between ranks on a line of their own, for a thread that works beside the loop. *Collective*, called once.

        `smalti.parallel.GlooCommunicator` over a process group that nothing else uses.
        """
        ...

    def local_communicator(self) -> Communicator | None:
        """The words of this rank to itself, as of a single process, if it holds the whole state; None if it has a share of it.

        When other ranks are lost, it can then save without them: `portable_state` asks nobody, and its tensors are whole.
        """
        ...

    def bind(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Join model and optimizer; returns the pair to train with. *Collective*, called once."""
        ...

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module inside the backend's wrapper, whose parameter names are the family's."""
        ...

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Around one micro-batch; gradients need only be reduced over ranks in the last one of a step."""
        ...

    def autocast(self) -> AbstractContextManager[None]:
        """Around a forward pass, in training and in validation: the compute precision of the run."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Gradients of a scalar loss, added to those that are there. *Collective* in the last micro-batch."""
        ...

    def clip_gradients(self, limit: float) -> Tensor:
        """Scale gradients to a global norm of at most `limit` (0: leave them); returns the norm before. *Collective*."""
        ...

    def step(self) -> None:
        """One optimizer step; gradients are cleared. *Collective*."""
        ...

    def discard(self) -> None:
        """Clear gradients without a step."""
        ...

    def mean(self, value: Tensor) -> Tensor:
        """Mean of a scalar over ranks; not finite everywhere when it is not finite anywhere. *Collective*."""
        ...

    def gather(self, value: Tensor) -> Sequence[Tensor]:
        """The equally shaped tensors of all ranks, in rank order. *Collective*."""
        ...

    def refresh(self, model: nn.Module) -> None:
        """Weights were changed in place by something other than `step`: let go of what was derived from them.

        Gathered or low-precision copies, which the next forward pass would use. *Collective*.
        """
        ...

    def masters(self, model: nn.Module) -> dict[str, Tensor]:
        """This rank's share of the fp32 weights that train, by fully qualified name: live, in whatever shape they are kept.

        An average follows these, and takes their place; `refresh` has to be told.
        """
        ...

    def portable(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors in the shapes of `masters`, under its names, as a `PortableState` has them: the same, or copies.

        *Collective*.
        """
        ...

    def blank(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a checkpoint can be read into to take the place of such tensors: as `portable` with any values, or `FlatRange`s.

        May be in memory shared with `tensors`.
        """
        ...

    def put_back(self, portable: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        """Fill such tensors from what `portable` or `blank` gave for them. *Collective*."""
        ...

    def portable_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> PortableState:
        """This rank's share of the state in portable form: references to the live tensors, or a copy of them. *Collective*."""
        ...

    def blank_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> PortableState:
        """What a checkpoint can be read into: as `portable_state` with any values, or `FlatRange`s. *Collective*.

        It may be live, or have live `allocate`. It has no moments that the optimizer has not.
        """
        ...

    def load_portable_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: PortableState) -> None:
        """Put a portable state, as `portable_state` or `blank_state` gave it, back into model and optimizer. *Collective*."""
        ...

    def close(self) -> None:
        """Leave the process group; called once, in step with the other ranks. After an error only a single process calls it."""
        ...


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Of the whole tensor of which a rank may hold a part."""
    return tuple(tensor.whole if isinstance(tensor, FlatRange) else tensor.shape)


def named_state(values: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Moments as flat names, "PARAMETER.MOMENT": the form in which checkpoints hold them."""
    return {f"{name}.{moment}": tensor for name, moments in values.items() for moment, tensor in moments.items()}
