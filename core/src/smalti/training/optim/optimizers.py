"""Optimizers by name, and which parameters get which weight decay."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from smalti.config import Config, OptimizerOptions
from smalti.errors import BrokenPlugin, CheckpointError
from smalti.plugins import create, find_optimizer
from smalti.training.optim.ema import local_parts
from smalti.types import OptimizerEntry


def matrices(model: nn.Module) -> frozenset[str]:
    """The names of the parameters that are no vectors. For a model that is not wrapped: a wrapper may leave flat slices."""
    return frozenset(name for name, parameter in model.named_parameters() if parameter.dim() >= 2)


def parameter_groups(model: nn.Module, weight_decay: float, decayed: Collection[str]) -> list[dict[str, object]]:
    """The trained parameters as (name, parameter) pairs: the `decayed` ones, and those without weight decay (norms, biases)."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups: list[dict[str, object]] = [
        {"params": [pair for pair in trained if pair[0] in decayed], "weight_decay": weight_decay},
        {"params": [pair for pair in trained if pair[0] not in decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_registered(
    groups: list[dict[str, object]], config: Config, registry: Sequence[OptimizerEntry]
) -> torch.optim.Optimizer:
    """The optimizer that `--optimizer` names, from the registry."""
    options = config[OptimizerOptions]
    entry = find_optimizer(options.optimizer, registry)
    settings: dict[str, object] = {
        "betas": (options.adam_beta1, options.adam_beta2),
        "eps": options.adam_epsilon,
        "weight_decay": options.adam_weight_decay,
    }
    accepted = {key: value for key, value in settings.items() if key in entry.accepts}
    optimizer = create(entry, entry.factory, groups, lr=options.learning_rate, **accepted)
    if not isinstance(optimizer, torch.optim.Optimizer):
        what = f"{entry.kind} {entry.name!r} of {entry.origin}: {entry.factory} made a {type(optimizer).__name__}"
        raise BrokenPlugin(f"{what}, not a torch.optim.Optimizer", fix=entry.origin.workaround)
    return optimizer


class AdamW(torch.optim.AdamW):
    """AdamW in its fused form, which is the fastest on CPUs and on CUDA; of sharded parameters each rank steps its own part.

    It treats every number by itself, so parts give the same bits as the whole. As DTensors they would cost a step tens of
    milliseconds: torch computes again how all of them are spread whenever the learning rate has another value, and keeps each
    answer for good.
    """

    def __init__(self, groups: list[dict[str, object]], **settings: object) -> None:
        super().__init__(groups, fused=True, **settings)  # type: ignore[arg-type]

    def _init_group(self, group: dict[str, object], *found: list[Tensor]) -> bool:
        """torch fills these lists, with parameters, gradients and optimizer state, and steps what is in them afterwards."""
        has_complex = cast(bool, super()._init_group(group, *found))  # type: ignore[no-untyped-call]
        for tensors in found:
            tensors[:] = local_parts(tensors)
        return has_complex


def sgd(groups: list[dict[str, object]], **settings: object) -> torch.optim.Optimizer:
    return decouple_decay(torch.optim.SGD(groups, momentum=0.9, **settings))  # type: ignore[arg-type]


def adagrad(groups: list[dict[str, object]], **settings: object) -> torch.optim.Optimizer:
    return decouple_decay(torch.optim.Adagrad(groups, **settings))  # type: ignore[arg-type]


def decouple_decay(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimizer, made to shrink weights by rate times decay before each step, as AdamW does.

    For one that adds the decay to the gradient, where Adagrad would divide it away (Loshchilov and Hutter 2019). In between
    steps its groups say their `weight_decay` as before.
    """
    decays: list[float] = []

    def shrink(*_: object) -> None:
        decays[:] = [group["weight_decay"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["weight_decay"] and stepped:
                with torch.no_grad():
                    torch._foreach_mul_(local_parts(stepped), 1 - group["lr"] * group["weight_decay"])
            group["weight_decay"] = 0.0

    def restore_decay(*_: object) -> None:
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay

    optimizer.register_step_pre_hook(shrink)
    optimizer.register_step_post_hook(restore_decay)
    return optimizer


def muon(
    groups: list[dict[str, object]], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Muon (Jordan et al. 2024) on matrices, AdamW on everything else, as one optimizer.

    Muon's updates are scaled to the size of AdamW's (Liu et al. 2025), so that one learning rate serves both.
    """
    matrices, rest = [], []
    for group in groups:
        pairs = cast(list[tuple[str, Tensor]], group["params"])
        matrices.append({**group, "params": [pair for pair in pairs if pair[1].dim() == 2]})
        rest.append({**group, "params": [pair for pair in pairs if pair[1].dim() != 2]})
    parts: list[torch.optim.Optimizer] = []
    if chosen := [group for group in matrices if group["params"]]:
        parts.append(torch.optim.Muon(chosen, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))
    if chosen := [group for group in rest if group["params"]]:
        parts.append(AdamW(chosen, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
    return Joined(parts)


class Joined(torch.optim.Optimizer):
    """Several optimizers over different parameters that step as one; they share one state and list of groups."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.parts = tuple(parts)
        self.param_groups = groups
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step(closure)


class FixedRateAdafactor(torch.optim.Optimizer):
    """Adafactor (Shazeer and Stern 2018) at an absolute learning rate: a step has about the size of the rate.

    As that of transformers is with `relative_step` and `scale_parameter` off. torch's multiplies the rate by the size of each
    weight, so that it does not train an adapter, which begins at zero. Of a matrix it keeps a row and a column of the second
    moment, under the names and in the shapes of torch's.
    """

    def __init__(self, groups: list[dict[str, object]], *, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "beta2_decay": -0.8, "eps": 1e-30, "clip": 1.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = self._update(self.state[parameter], parameter.grad.float(), group)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(update, alpha=group["lr"])

    @staticmethod
    def _update(state: dict[str, Tensor], gradient: Tensor, group: dict[str, float]) -> Tensor:
        """The gradient over the root of its second moment, with a root mean square of at most `clip`."""
        rows, columns = gradient.shape[-2:-1], gradient.shape[-1:]
        if not state:
            state["step"] = torch.tensor(0.0)
            if rows:
                state["row_var"] = gradient.new_zeros(*gradient.shape[:-1], 1)
                state["col_var"] = gradient.new_zeros(*gradient.shape[:-2], 1, *columns)
            else:
                state["variance"] = torch.zeros_like(gradient)
        state["step"] += 1
        new = state["step"].item() ** group["beta2_decay"]
        square = gradient.square().add_(group["eps"])
        if rows:
            row = state["row_var"].lerp_(square.mean(-1, keepdim=True), new)
            column = state["col_var"].lerp_(square.mean(-2, keepdim=True), new)
            scale = (row / row.mean(-2, keepdim=True)).rsqrt_() * column.rsqrt()
        else:
            scale = state["variance"].lerp_(square, new).rsqrt()
        update = scale.mul_(gradient)
        return update.div_((update.norm() / update.numel() ** 0.5 / group["clip"]).clamp_(min=1.0))


def check_step_sizes(saved: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuse to resume with `FixedRateAdafactor` from a checkpoint of torch's Adafactor, the optimizer that was `saved`.

    The same learning rate would make steps that are hundreds of times as large. Raises CheckpointError.
    """
    if saved == torch.optim.Adafactor.__name__ and isinstance(optimizer, FixedRateAdafactor):
        raise CheckpointError(
            "the checkpoint is of a run whose Adafactor scaled the learning rate by the size of each weight, and "
            "--optimizer=adafactor takes it as it is",
            fix="--optimizer=adafactor_scaled resumes it; or start a new run in a new --output_dir",
        )
