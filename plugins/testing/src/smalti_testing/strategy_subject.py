"""A strategy as its contract looks at it: opened as a run opens it, next to an ordinary model that is fed the same samples.

Shapes: B samples of one micro-batch, (B, 3, H, W).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from smalti import DistributedPlan
from smalti.config import Config, OptimizerOptions, PluginOptions, resolve
from smalti.models import materialise
from smalti.parallel import Parallel, PortableState, capture, restore
from smalti.plugins import BUILT_IN, Backend, Plugins, Selection, choose_distributed, load_plugins, schema_of, selection_of
from smalti.training import build_model, build_optimizer, matrices, open_parallel, parameter_groups, wrap_model
from smalti_testing.contract import expect
from smalti_testing.tiny import TinyFamily

FLAGS = ("--mixed_precision=no", "--use_cpu", "--learning_rate=0.01", "--adam_epsilon=1e-3", "--accelerate_config=none")
"""A large epsilon, because Adam makes a whole step of a rounding error in a gradient that is nearly zero."""
MICRO, BATCH = 2, 2
"""Micro-batches of a step, and samples in each."""
SEED = 3


@dataclass
class Reference:
    """An ordinary model and its optimizer, in one process."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    family: TinyFamily

    def step(self, number: int, ranks: int, limit: float, *, by_value: bool = False) -> float:
        """One optimizer step on the samples of all ranks together; the norm of its gradient before it is clipped."""
        losses = [_loss(self.family, self.model, number, rank, micro) for rank in range(ranks) for micro in range(MICRO)]
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), math.inf if by_value else limit or math.inf)
        if by_value:
            nn.utils.clip_grad_value_(self.model.parameters(), limit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)


@dataclass
class StrategySubject:
    """One rank's view of a strategy that is open. `folder` is seen by all ranks; each check takes another part of it."""

    name: str
    config: Config
    plugins: Plugins
    plan: DistributedPlan
    parallel: Parallel
    backend: Backend
    family: TinyFamily
    model: nn.Module
    optimizer: torch.optim.Optimizer
    first: dict[str, Tensor]
    """The whole weights right after wrapping."""
    folder: Path = field(default_factory=Path)

    def state(self) -> PortableState:
        return self.parallel.state.portable()

    def empty(self) -> PortableState:
        return self.parallel.state.empty()

    def whole(self) -> dict[str, Tensor]:
        """Weights and optimizer state as full tensors on the CPU, copied. *Collective*."""
        return whole_state(self.state())

    def reference(self) -> Reference:
        """An ordinary model and optimizer in the state in which the strategy is. *Collective*."""
        state, reference = self.state(), self.fresh_reference()
        optimizer_state = {
            name: {key: whole_tensor(tensor) for key, tensor in found.items()} for name, found in state.optimizer_state.items()
        }
        plain = PortableState(
            model={name: whole_tensor(tensor) for name, tensor in state.model.items()},
            optimizer_state=optimizer_state,
            param_groups=state.param_groups,
            optimizer=type(reference.optimizer).__name__,
        )
        restore(reference.model, reference.optimizer, plain)
        return reference

    def fresh_reference(self, seed: int = SEED) -> Reference:
        model = materialise(build_model(self.config, self.plugins, self.family)[0], self.family.weights(seed), "cpu")
        more = self.config[PluginOptions].plugins
        alone = load_plugins(Selection(only=more) if more else Selection(without=("all",)))
        groups = parameter_groups(model, self.config[OptimizerOptions].adam_weight_decay, matrices(model))
        return Reference(model, build_optimizer(self.config, alone, model, groups), self.family)

    def step(self, number: int, *, limit: float = 0.0, by_value: bool = False) -> float:
        """One optimizer step on this rank's samples, as the loop makes it; the norm of its gradient. *Collective*."""
        self.accumulate(number)
        norm = float(self.parallel.clip_gradient_values(limit) if by_value else self.parallel.clip_gradients(limit))
        self.parallel.step()
        return norm

    def accumulate(self, number: int, *, factor: float = 1.0) -> None:
        """The gradients of one step, with this rank's losses times `factor`."""
        for micro in range(MICRO):
            with self.parallel.accumulate(last=micro == MICRO - 1):
                with self.parallel.autocast():
                    loss = _loss(self.family, self.model, number, self.parallel.world.rank, micro) / MICRO
                self.parallel.backward(loss * factor)

    @torch.no_grad()
    def look(self, number: int) -> float:
        """The loss of this rank's first micro-batch, without a gradient, as validation computes. *Collective*."""
        model = self.parallel.unwrap(self.model)
        with self.parallel.autocast():
            return float(_loss(self.family, model, number, self.parallel.world.rank, 0))

    def follows(self, reference: Reference, context: str) -> None:
        """Expect the strategy's state to be the reference's, but for rounding. *Collective*."""
        wanted, found = whole_state(capture(reference.model, reference.optimizer)), self.whole()
        odd = sorted(found.keys() ^ wanted.keys())
        expect(not odd, f"{context}: the state has too many or too few of {odd[:3]}")
        for name, tensor in wanted.items():
            worst = float((tensor.double() - found[name].double()).abs().max()) if tensor.numel() else 0.0
            expect(worst <= 2e-5, f"{context}: {name} is {worst:.1e} away from what one process has")


@cache
def open_strategy(name: str, flags: tuple[str, ...], ranks: int, frozen: tuple[str, ...] = ()) -> StrategySubject:
    """The strategy as a run opens it, once in each process, with a model of which the submodules `frozen` do not train."""
    return open_family(name, flags, ranks, TinyFamily(frozen=frozen))


def open_family(name: str, flags: tuple[str, ...], ranks: int, family: TinyFamily) -> StrategySubject:
    """The same with a family of a test's own, built again each time. `--plugins` among the flags adds to this one plugin."""
    more = selection_of(flags, None, {}).only
    only = more if name in BUILT_IN else (name, *more)
    plugins = load_plugins(Selection(only=only) if only else Selection(without=("all",)))
    config = resolve(schema_of(plugins), [*FLAGS, f"--num_processes={ranks}", *flags], environment={})
    plan = choose_distributed(config, plugins)
    parallel = open_parallel(plan, config)
    family.to(parallel.world.device)
    bare, blocks = build_model(config, plugins, family, parallel.world.device)
    decayed = matrices(bare)
    backend = plugins.backend(plan)
    model = wrap_model(config, plugins, plan, parallel, family, bare, blocks, SEED)
    groups = parameter_groups(parallel.unwrap(model), config[OptimizerOptions].adam_weight_decay, decayed)
    model, optimizer = parallel.setup(model, build_optimizer(config, plugins, model, groups))
    model.train()
    first = {name: whole_tensor(tensor) for name, tensor in parallel.state.portable().model.items()}
    return StrategySubject(name, config, plugins, plan, parallel, backend, family, model, optimizer, first)


def _loss(family: TinyFamily, model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
    """The loss of one micro-batch; its samples are a function of step, rank and number."""
    random = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    clean, noise = torch.randn(2, BATCH, 3, 4, 6, generator=random)
    times = torch.rand(BATCH, generator=random) * 1000
    device = next(model.parameters()).device
    conditioning = family.encode_captions([f"image {step} {rank} {micro} {number}" for number in range(BATCH)])
    conditioning = {name: tensor.to(device) for name, tensor in conditioning.items()}
    prediction = family.forward(model, (clean + noise).to(device), times.to(device), conditioning)
    return F.mse_loss(prediction, clean.to(device))


def whole_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor on the CPU, separate from the live one. *Collective* for what is sharded."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu().clone()


def whole_state(state: PortableState) -> dict[str, Tensor]:
    found = {name: whole_tensor(tensor) for name, tensor in state.model.items()}
    for name, values in state.optimizer_state.items():
        found |= {f"{name}.{key}": whole_tensor(tensor) for key, tensor in values.items()}
    return found
