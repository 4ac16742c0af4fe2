"""What a distribution strategy implements: `Parallel`, a `Communicator` that also trains, and its `TrainingState`.

The plan of a strategy names a factory of a `Parallel`; the training loop calls nothing else. FSDP2 shards the model before the
optimizer exists. DeepSpeed needs model and optimizer together, and then owns backward and step: `setup` creates its engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from smalti.parallel.state import PortableState
from smalti.types import World


class Communicator(Protocol):
    """Short messages between ranks. Methods marked *collective* must be called by every rank, in the same order."""

    @property
    def world(self) -> World: ...

    def all_reduce_max(self, code: int) -> int:
        """The largest code over ranks. Never waits for the accelerator. *Collective*."""
        ...

    def all_gather_text(self, value: str) -> Sequence[str]:
        """A short text from each rank, in rank order. For setup and rare events. *Collective*."""
        ...

    def barrier(self) -> None:
        """Wait for every rank. *Collective*."""
        ...


class AbortableCommunicator(Communicator, Protocol):
    """A communicator that any of its ranks can abort."""

    def abort(self) -> None:
        """End every call that waits on this communicator, here and on other ranks, with an error. Permanent."""
        ...


class TrainingState(Protocol):
    """Weights and optimizer state of a strategy, for checkpoints and EMA. Methods marked *collective* are as in `Communicator`.

    *Weights* are tensors by parameter name in the shapes of `master_weights`: these themselves, or an EMA of them.
    """

    def portable(self) -> PortableState:
        """This rank's part of the state in portable form: references to the live tensors, or copies. *Collective*."""
        ...

    def empty(self) -> PortableState:
        """The state into which a checkpoint is read: like `portable` with any values, or `FlatRange`s. *Collective*.

        It may refer to live tensors, and its `allocate` may return such. It has no optimizer state that the optimizer lacks.
        """
        ...

    def load(self, state: PortableState) -> None:
        """Load a state that came from `portable` or `empty` into model and optimizer. *Collective*."""
        ...

    def master_weights(self) -> dict[str, Tensor]:
        """This rank's part of the fp32 weights that train, by parameter name: live, in whatever shape they are kept.

        An EMA is computed from these and replaces them during validation. Call `invalidate_gathered` after changing them.
        """
        ...

    def portable_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """These weights as a `PortableState` has them: the same tensors, or copies. *Collective*."""
        ...

    def empty_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a checkpoint of these weights is read into: like `portable_weights` with any values, or `FlatRange`s.

        It may share memory with `weights`.
        """
        ...

    def copy_from(self, portable: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Copy what `portable_weights` or `empty_weights` returned into these weights. *Collective*."""
        ...

    def invalidate_gathered(self) -> None:
        """Weights were changed in place by something other than `step`: drop what was derived from them. *Collective*.

        Gathered or low-precision copies, for example, which the next forward pass would use.
        """
        ...


class Parallel(Communicator, Protocol):
    """A distribution strategy on one rank. Methods marked *collective* are as in `Communicator`."""

    def setup(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Prepare the wrapped model and its optimizer; returns the pair to train with. *Collective*, called once."""
        ...

    @property
    def state(self) -> TrainingState:
        """The state of what `setup` has prepared."""
        ...

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module inside the strategy's wrapper, with the parameter names of the family."""
        ...

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Around one micro-batch; gradients need to be reduced over ranks only in the last one of a step."""
        ...

    def autocast(self) -> AbstractContextManager[None]:
        """Around a forward pass, in training and in validation: the compute precision of the run."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a scalar loss to those that are there. *Collective* in the last micro-batch."""
        ...

    def clip_gradients(self, limit: float) -> Tensor:
        """Scale gradients to a global norm of at most `limit` (0: no clipping); returns the norm before. *Collective*."""
        ...

    def clip_gradient_values(self, limit: float) -> Tensor:
        """Clamp each gradient element to [-limit, limit] (0: no clipping); returns the global norm before. *Collective*."""
        ...

    def step(self) -> None:
        """One optimizer step; gradients are cleared. *Collective*."""
        ...

    def zero_grad(self) -> None:
        """Clear gradients without a step."""
        ...

    def mean(self, value: Tensor) -> Tensor:
        """Mean of a scalar over ranks; not finite on any rank if it is not finite on one. *Collective*."""
        ...

    def gather(self, value: Tensor) -> Sequence[Tensor]:
        """The tensors of all ranks, of equal shape, in rank order. *Collective*."""
        ...

    def background_communicator(self) -> AbortableCommunicator:
        """A second communicator, for a thread that saves while the loop trains. *Collective*, called once.

        `smalti.parallel.GlooCommunicator` over a process group that nothing else uses.
        """
        ...

    def local_communicator(self) -> Communicator | None:
        """A communicator of this rank only, if it holds the whole state; None if it holds a part of it.

        With it the rank can save when other ranks are lost: `portable` then waits for nobody, and returns no DTensors.
        """
        ...

    def close(self) -> None:
        """Leave the process group. Called once, on every rank at the same time; after an error only by a single process."""
        ...
