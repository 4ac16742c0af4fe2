"""The time of a step as a roofline: what a device can do at most, with what is known of the share that is reached. No torch.

Times rank ways to train; as seconds they are a range. Sources of the ranges: public measurements of diffusion transformers on
H100, eager and compiled, reach 17 to 57 % of the peak of bf16 products. The other ranges are estimates: optimizers reach 60
to 85 % of the memory's bandwidth, collective operations as much of a link; an operation takes 4 to 10 microseconds to dispatch.
On a CPU the same cores compute, dispatch and send, so nothing is hidden behind anything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from smalti import Strategy, World
from smalti.parallel import DeviceModel
from smalti_plan.facts import ModelFacts
from smalti_plan.formulas.memory import resident_bytes, sent_bytes
from smalti_plan.formulas.run_facts import RunFacts
from smalti_plan.records import Candidate

_HOST_MEMORY = 150e9
"""Bytes per second that the processors of a node read and write, shared by its ranks: between a desktop's and a server's."""

_RELEASED, _IN_BF16 = 6, 51
"""Operations in a step for each tensor, counted on CPUs: to update it in the backward pass, and to update one in bf16."""
_ROUNDING = 210
"""Bytes that these operations read and write for each weight in bf16 that is rounded at random: 22 passes over it."""


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The share of a peak that is reached, and seconds that an operation takes to dispatch.

    `collectives` are the shares of a link's bandwidth by collective operation, `links` that of those that are not in it.
    """

    products: float
    memory: float
    links: float
    dispatch: float
    collectives: Mapping[str, float] = field(default_factory=dict)

    def times(self, factor: float) -> Efficiency:
        """The same with every share multiplied by the factor."""
        shares = {"products": self.products, "memory": self.memory, "links": self.links}
        collectives = {name: share * factor for name, share in self.collectives.items()}
        scaled = {name: share * factor for name, share in shares.items()}
        return Efficiency(**scaled, dispatch=self.dispatch / factor, collectives=collectives)


FAST = Efficiency(products=0.6, memory=0.85, links=0.85, dispatch=4e-6)
SLOW = Efficiency(products=0.25, memory=0.6, links=0.6, dispatch=10e-6)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step. `parts` add up to `seconds`; `bound` is the largest one."""

    parts: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def bound(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name], default="")


def time_of(
    model: ModelFacts,
    run: RunFacts,
    strategy: Strategy,
    candidate: Candidate,
    device: DeviceModel,
    world: World,
    efficiency: Efficiency,
) -> StepTime:
    """Seconds of one optimizer step on each rank of `world`."""
    on_host, times = device.kind == "cpu", candidate.accumulation
    passes = _passes(model, run, strategy, candidate, device, efficiency)
    computing = times * sum(products for products, _ in passes)
    dispatch = times * sum(each if on_host else max(0.0, each - products) for products, each in passes)
    own = (_RELEASED if run.releases_gradients else 0) + (_IN_BF16 if run.bf16_weights else 0)
    dispatch += model.tensors * (strategy.operations.get("step", 0) + own) * efficiency.dispatch
    hidden = {"micro-batch": computing + dispatch, "step": max(passes[1])}
    sending = dict.fromkeys(hidden, 0.0)
    for each in strategy.communication:
        link = device.network_bandwidth if each.between_nodes else device.link_bandwidth
        speed = link * efficiency.collectives.get(each.collective, efficiency.links)
        sending[each.times] += sent_bytes(each, model, strategy, candidate) / speed
    exposed = sum(
        seconds if on_host else max(0.0, seconds - 0.9 * hidden[times]) + _unhidden(model, seconds)
        for times, seconds in sending.items()
    )
    return StepTime(
        parts={
            "computing": computing,
            "restoring weights": _restoring(model, candidate, device, efficiency),
            "dispatch": dispatch,
            "communication": exposed,
            "optimizer": _stepping(model, run, strategy, device, world, efficiency),
            "host transfers": _transferring(model, strategy, candidate, device, efficiency, computing),
        }
    )


def _passes(
    model: ModelFacts,
    run: RunFacts,
    strategy: Strategy,
    candidate: Candidate,
    device: DeviceModel,
    efficiency: Efficiency,
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds of the products and of dispatching all operations, in all forward and all backward passes of a micro-batch."""
    sample = model.sample
    again = {"none": 0.0, "selective": 0.15, "full": 1.0}[candidate.recompute]
    products = sample.flops * candidate.micro_batch / (device.peaks[run.products] * efficiency.products) / strategy.context
    dispatch = sample.operations * efficiency.dispatch
    own = model.tensors * strategy.operations.get("micro-batch", 0) * efficiency.dispatch
    trained = model.trained / model.parameters
    backward = sample.turns * sample.trained_passes
    forward = backward + sample.other_passes
    return (
        (forward * products, forward * dispatch + own / 2),
        (backward * (1.0 + trained + again) * products, backward * (2.0 + again) * dispatch + own / 2),
    )


def _restoring(model: ModelFacts, candidate: Candidate, device: DeviceModel, efficiency: Efficiency) -> float:
    """Frozen weights that are kept in less are restored for every pass: what that takes of the largest layer, for all."""
    each = model.frozen.restoring / model.largest
    passes = 3 if candidate.recompute == "full" else 2
    moved = candidate.accumulation * passes * each * (model.parameters - model.trained)
    return moved / (device.memory_bandwidth * efficiency.memory)


def _unhidden(model: ModelFacts, seconds: float) -> float:
    """The first block is gathered, and the last one reduced, while nothing else is computed."""
    return seconds / max(1, len(model.sample.blocks))


def _stepping(
    model: ModelFacts, run: RunFacts, strategy: Strategy, device: DeviceModel, world: World, efficiency: Efficiency
) -> float:
    """Weights and state are read and written, gradients are read; in host memory all ranks of a node share the bandwidth."""
    share = model.trained / strategy.divided.get("state", 1)
    moved = share * (3 * (2 if run.bf16_weights else 4) + 2 * run.state_bytes + (3 * 4 if run.ema else 0))
    moved += share * _ROUNDING if run.bf16_weights else 0
    if "state" in strategy.offloaded:
        return moved * world.local_size / (_HOST_MEMORY * efficiency.memory)
    return moved / (device.memory_bandwidth * efficiency.memory)


def _transferring(
    model: ModelFacts,
    strategy: Strategy,
    candidate: Candidate,
    device: DeviceModel,
    efficiency: Efficiency,
    computing: float,
) -> float:
    """Gradients go to host memory and weights come back; weights that are kept there come for every pass.

    Frozen ones that are not resident come block by block, beside what is computed; so activations go and come.
    """
    if not strategy.offloaded:
        return 0.0
    speed = device.host_bandwidth * efficiency.links
    passes = 2 * candidate.accumulation
    streamed = passes * (model.frozen.bytes // strategy.frozen - resident_bytes(model, strategy, candidate)) / speed
    if "activations" in strategy.offloaded:
        inputs = sum(block.inputs for block in model.sample.blocks) * candidate.micro_batch / strategy.context
        streamed += passes * inputs / speed
    exposed = max(0.0, streamed - 0.9 * computing) + _unhidden(model, streamed)
    if "gradients" not in strategy.offloaded:
        return exposed
    share = model.trained / strategy.divided.get("gradients", 1)
    gradients = share * strategy.bytes.get("gradients", 4) * candidate.accumulation
    if "weights" not in strategy.offloaded:
        passes = 1
    weights = model.trained * strategy.bytes.get("weights", 4) / strategy.divided.get("state", 1) * passes
    return (gradients + weights) / speed + exposed
