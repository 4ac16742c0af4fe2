"""`Parallel` on DeepSpeed: ZeRO 1, 2 or 3, with what it offloads, as the JSON configuration says.

Accumulation, clipping, the schedule and the decision to leave a step out stay the loop's; DeepSpeed owns the model's memory,
backward and step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from smalti import Block, Config, UserError
from smalti.models import Weights, compile_blocks, materialise
from smalti.parallel import ProcessGroupParallel
from smalti_deepspeed.compiling import compiled_one_at_a_time
from smalti_deepspeed.config import resolved, sized
from smalti_deepspeed.muon import with_muon
from smalti_deepspeed.offload_folder import Claim, claim_together
from smalti_deepspeed.optimizers import needs_accelerator
from smalti_deepspeed.parsing import is_open, section
from smalti_deepspeed.startup import start_deepspeed, stop_deepspeed

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

    from smalti_deepspeed.zero import Zero


class DeepSpeedParallel(ProcessGroupParallel):
    """Every rank holds its shard of fp32 weights and optimizer state; from stage 2 of gradients, in stage 3 of parameters."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, single=True)
        self._document = _completed(resolved(config, world_size=self.world.size))
        if self.world.device == "cpu":
            _check_without_accelerator(self._document)
        start_deepspeed(self.world)
        self._norm: Tensor | None = None
        self._limit, self._by_value = 0.0, False
        self._claim: Claim | None = None

    def wrap(self, model: nn.Module, blocks: Sequence[Block], weights: Weights) -> nn.Module:
        """The model with weights; under ZeRO 3, this rank's part of them. *Collective*."""
        from smalti_deepspeed.partition import partition
        from smalti_deepspeed.swap_files import failures_explained

        sizes = [parameter.numel() for parameter in model.parameters()]
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        even, largest = trained + trained % 2, max(sizes) + max(sizes) % 2  # as DeepSpeed wants its buckets
        self._document = sized(self._document, even, largest, world_size=self.world.size)
        self._claim = claim_together(self._document, self, parameters=sum(sizes), trained=trained)
        if _stage(self._document) == 3:
            with compiled_one_at_a_time(), failures_explained(self._document):
                model = partition(model, weights, self._document, self.world.device)
        else:
            model = materialise(model, weights, self.world.device)
        compile_blocks(model, blocks, self.config)
        self._weights: Weights | None = weights
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        from deepspeed.runtime.engine import DeepSpeedEngine

        return cast(nn.Module, model.module) if isinstance(model, DeepSpeedEngine) else model

    def setup(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The returned optimizer is this one, or that of the configuration, made for the same parameter groups."""
        import deepspeed

        from smalti_deepspeed.muon import matrices_marked
        from smalti_deepspeed.portable import ZeroState
        from smalti_deepspeed.swap_files import failures_explained
        from smalti_deepspeed.zero import (
            correct_bias_exactly,
            decay_as_the_core_does,
            numbers_sent,
            step_with_own_groups,
            zero_of,
        )

        kept = ("params", "weight_decay", "peak_lr")
        groups = [{key: group[key] for key in kept if key in group} for group in optimizer.param_groups]
        explained = failures_explained(self._document)
        with compiled_one_at_a_time(), explained, _settings_fit(self._document), numbers_sent(), matrices_marked():
            engine, _, _, _ = deepspeed.initialize(
                model=model,
                model_parameters=groups,
                optimizer=None if "optimizer" in self._document else optimizer,
                config=dict(self._document),
                dist_init_required=False,
            )
        if self.bf16:  # DeepSpeed leaves autocast as it calls the model
            model.forward = torch.autocast(torch.device(self.world.device).type, dtype=torch.bfloat16)(model.forward)
        self._engine: DeepSpeedEngine = engine
        step_with_own_groups(engine)
        self._zero: Zero = zero_of(engine)
        correct_bias_exactly(engine.basic_optimizer)
        if engine.basic_optimizer is not optimizer:
            decay_as_the_core_does(engine.basic_optimizer)
        state = ZeroState(model, engine.basic_optimizer, self._zero, self)
        if self.bf16 and self._weights is not None:
            state.fill(self._weights)  # DeepSpeed has made the fp32 weights from 16-bit ones
        self._weights = None
        self.state = state
        self.model, self.optimizer = engine, engine.basic_optimizer
        return engine, engine.basic_optimizer

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss, scale_wrt_gas=False)  # the loop has divided by the number of micro-batches

    def clip_gradients(self, limit: float) -> Tensor:
        """The norm is DeepSpeed's; it clips as it steps."""
        self._norm, self._limit, self._by_value = self._zero.norm(), limit, False
        return self._norm

    def clip_gradient_values(self, limit: float) -> Tensor:
        norm = self.clip_gradients(limit)
        self._by_value = True
        return norm

    def step(self) -> None:
        norm = self._norm if self._norm is not None else self._zero.norm()
        self._zero.step(norm, self._limit, by_value=self._by_value)
        self._norm = None

    def zero_grad(self) -> None:
        self._zero.zero_grad()
        self._norm = None

    def close(self) -> None:
        stop_deepspeed()
        if self._claim is not None:
            self._claim.release()
        super().close()


def _stage(document: Mapping[str, object]) -> int:
    return int(cast(Mapping[str, int], document["zero_optimization"])["stage"])


def _check_without_accelerator(document: Mapping[str, object]) -> None:
    """Raises UserError for an optimizer that has no form for processors."""
    offloaded = section(document, "zero_optimization", "offload_optimizer").get("device") in ("cpu", "nvme")
    name = str(section(document, "optimizer").get("type"))
    if reason := needs_accelerator(name, offloaded=offloaded):
        raise UserError(f"{reason}, and this rank has none", fix="--optimizer=adamw")


@contextmanager
def _settings_fit(document: Mapping[str, object]) -> Iterator[None]:
    """Raises UserError where the form of an optimizer that DeepSpeed has chosen does not know one of its settings."""
    try:
        yield
    except TypeError as error:
        if (found := re.fullmatch(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))) is None:
            raise
        if found[2] not in section(document, "optimizer", "params"):
            raise
        raise UserError(
            f"{found[1]}, which DeepSpeed takes for this run, has no setting {found[2]!r}",
            fix=f"leave {found[2]} out of optimizer.params in deepspeed_config",
        ) from error


def _completed(document: Mapping[str, object]) -> dict[str, object]:
    """With what this module sees to, where the user's own configuration says nothing else."""
    zero = section(document, "zero_optimization")
    made = {key: value for key, value in document.items() if key != "scheduler"}  # the loop schedules the learning rate
    if is_open(made.get("steps_per_print")):
        made["steps_per_print"] = None
        made.setdefault("timers", {"throughput": {"enabled": False}})  # which waits for the device twice a step
    if "optimizer" not in made:
        made["zero_force_ds_cpu_optimizer"] = False
    elif section(made, "optimizer")["type"] == "Muon":
        made = with_muon(made)
    elif section(made, "optimizer")["type"] in ("Adam", "AdamW") and section(zero, "offload_optimizer").get("device") not in (
        "cpu",
        "nvme",
    ):
        # torch's own form needs no compiler.
        params = {"torch_adam": True, "fused": True} | section(made, "optimizer", "params")
        made["optimizer"] = {**section(made, "optimizer"), "params": params}
    if section(made, "bf16").get("enabled"):
        # Gradients are averaged in fp32, and added up so. In stage 1 DeepSpeed can do only the first.
        if is_open(made.get("communication_data_type")):
            made["communication_data_type"] = "fp32"
        if _stage(made) > 1 and is_open(section(made, "data_types").get("grad_accum_dtype")):
            made["data_types"] = {**section(made, "data_types"), "grad_accum_dtype": "fp32"}
    return made
