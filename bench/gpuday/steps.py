"""Some steps of smalti on this rank: `python -m gpuday.steps ORDER` writes what was measured; see `Order`.

The model, its wrapping and the step are those of a run. Latents and texts are random numbers, the same on every rank.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smalti.data import Batch
    from smalti.types import StepResult
    from smalti_plan.rehearsal.stage import Stage

WARM_UP = {False: 3, True: 1}
STEPS = {False: 10, True: 3}


@dataclass(frozen=True, kw_only=True)
class Order:
    """Words of `smalti train`, and the file for the result of rank 0. `bare`: the loop of diffusers' example instead."""

    words: Sequence[str]
    result: str
    published: bool = False
    rehearsed: bool = False
    bare: bool = False


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Medians of some steps after the first ones; losses and norms of gradients of all. None: not known here.

    `peak` and `device` are bytes on the device and its name, `graphs` and `breaks` those of torch.compile.
    """

    losses: Sequence[float]
    gradients: Sequence[float]
    seconds: float
    device: str
    peak: int | None
    mfu: float | None = None
    graphs: int = 0
    breaks: int = 0


def main(text: str) -> None:
    order = Order(**json.loads(text))
    with ExitStack() as closing:
        memory = _Memory(rehearsed=order.rehearsed)
        stage = staged(order, closing)
        found = bare(stage, order, memory) if order.bare else steps(stage, order, memory)
        if stage.parallel.world.rank == 0:
            Path(order.result).write_text(json.dumps(asdict(found)))


def staged(order: Order, closing: ExitStack) -> Stage:
    """A run on this rank up to its model, with latents and texts to train on."""
    import torch

    from gpuday.models import SomeWeights
    from smalti.cli.arguments import CommandLine
    from smalti.models import without_weights
    from smalti.plugins import choose_distributed, find_family
    from smalti.training import open_parallel
    from smalti_plan.largest_bucket import largest_bucket
    from smalti_plan.rehearsal.ledger import Ledger
    from smalti_plan.rehearsal.samples import ExampleTexts, Samples
    from smalti_plan.rehearsal.stage import Stage

    if os.environ.get("WORLD_SIZE") == "1":  # a single rank has no launcher
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    line = CommandLine.parse(list(order.words))
    config, plugins = line.config(), line.plugins
    plan = choose_distributed(config, plugins)
    parallel = open_parallel(plan, config)
    closing.callback(parallel.close)
    family = find_family(config, plugins)
    weights: Any
    if order.published and not order.rehearsed:
        with without_weights():
            weights = SomeWeights(family.build_model())
    else:
        weights = family.weights(0)
    bucket = largest_bucket(config, plugins, family.alignment).bucket
    stage = Stage(
        config=config,
        plugins=plugins,
        plan=plan,
        parallel=parallel,
        ledger=Ledger("cpu", 1),  # which is not entered, and so counts nothing
        family=family,
        bucket=bucket,
        weights=weights,
    )
    torch.manual_seed(0)
    examples = stage._example()
    rows = {name: torch.randn(row.shape).to(row.dtype) if row.is_floating_point() else row for name, row in examples.items()}
    latents = torch.randn(1, *family.latent_shape(bucket.width, bucket.height)) if family.cacheable else None
    texts = ExampleTexts({name: row.to("cpu") for name, row in rows.items()}) if family.cacheable else None
    stage.samples = Samples(
        config=config, plugins=plugins, family=family, bucket=bucket, world=parallel.world, latents=latents, texts=texts
    )
    return stage


def steps(stage: Stage, order: Order, memory: _Memory) -> Measured:
    """The steps of a run."""
    import torch
    import torch._dynamo.utils as dynamo

    from smalti.training import train_step

    dynamo.counters.clear()
    stage.build()
    stage.weights = None
    run, batch = stage.run, stage.samples.batch(stage.run.loss)
    run.model.train()
    if not run.family.cacheable:
        pixels = torch.randn(len(batch.micro[0].captions), 3, stage.bucket.height, stage.bucket.width)
        micro = [replace(each, pixels=pixels.to(stage.device)) for each in batch.micro]
        batch = replace(batch, micro=tuple(micro))
    results: list[StepResult] = []

    def tell(batch: Batch, result: StepResult) -> None:
        results.append(result)
        run.state.step = result.step

    run.finish_step = tell  # type: ignore[method-assign]
    run.state.check_before_step = None

    def step() -> None:
        run.boundary.reach()
        train_step(run, batch)

    seconds = _timed(step, stage.device, order, memory)
    run.settle()
    counted = dynamo.counters
    return Measured(
        losses=[each.loss for each in results],
        gradients=[each.grad_norm for each in results],
        seconds=seconds,
        device=_name_of(stage.device),
        peak=memory.peak,
        mfu=run.utilisation.of(replace(results[-1], seconds=seconds), stage.bucket.width, stage.bucket.height),
        graphs=int(counted["stats"]["unique_graphs"]),
        breaks=sum(counted["graph_break"].values()),
    )


def bare(stage: Stage, order: Order, memory: _Memory) -> Measured:
    """The loop of diffusers' example for SDXL: Accelerate around U-Net and optimizer, what is encoded was encoded before."""
    import torch
    import torch.nn.functional as F
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from diffusers import DDPMScheduler

    from smalti.parallel import in_bf16

    AcceleratorState._reset_state(reset_partial_state=True)  # it remembers the precision that smalti asked it for: none
    accelerator = Accelerator(cpu=order.rehearsed, mixed_precision="bf16" if in_bf16(stage.config) else "no")
    model: Any = stage.family.build_model()
    weights: Any = stage.weights
    model.load_state_dict({name: weights.get(name).clone() for name in weights.names()})
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer = accelerator.prepare(model.train(), optimizer)
    noises: Any = DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)  # type: ignore[no-untyped-call]
    micro = stage.samples.batch().micro[0]
    latents, texts = micro.latents, micro.conditioning
    assert latents is not None
    assert texts is not None
    count, device = len(latents), accelerator.device
    height, width = stage.bucket.height, stage.bucket.width
    sizes = torch.tensor([[height, width, 0, 0, height, width]], device=device, dtype=torch.float32).repeat(count, 1)
    losses: list[float] = []

    def step() -> None:
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, noises.config.num_train_timesteps, (count,), device=device)
        noisy = noises.add_noise(latents, noise, timesteps)
        extra = {"time_ids": sizes, "text_embeds": texts["pooled"]}
        prediction = model(noisy, timesteps, texts["tokens"], added_cond_kwargs=extra, return_dict=False)[0]
        loss = F.mse_loss(prediction.float(), noise.float())
        losses.append(accelerator.gather(loss.repeat(count)).mean().item())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    seconds = _timed(step, stage.device, order, memory)
    return Measured(losses=losses, gradients=(), seconds=seconds, device=_name_of(stage.device), peak=memory.peak)


def _timed(step: Callable[[], None], device: str, order: Order, memory: _Memory) -> float:
    """The median of the seconds of a step but for the first ones, in which kernels are compiled and memory is taken."""
    import torch

    seconds = []
    for number in range(WARM_UP[order.rehearsed] + STEPS[order.rehearsed]):
        if number == WARM_UP[order.rehearsed]:
            gc.collect()
            memory.begin()
        begun = time.perf_counter()
        step()
        if torch.device(device).type != "cpu":
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    memory.end()
    return statistics.median(seconds[WARM_UP[order.rehearsed] :])


class _Memory:
    """The most that tensors took: on a device by torch's own count; in a rehearsal by an allocator of the CPU that counts."""

    def __init__(self, *, rehearsed: bool) -> None:
        self.peak: int | None = None
        self._allocations: Any = None
        if rehearsed:
            sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
            from support.allocations import counting

            gc.collect()
            self._allocations = counting()
            self._before = self._allocations.held

    def begin(self) -> None:
        """Count from here on; what tensors hold already counts."""
        import torch

        if self._allocations is not None:
            self._allocations.most()
        elif torch.accelerator.is_available():
            torch.accelerator.reset_peak_memory_stats()

    def end(self) -> None:
        import torch

        if self._allocations is not None:
            self.peak = self._allocations.most() - self._before
        elif torch.accelerator.is_available():
            self.peak = torch.accelerator.max_memory_allocated()


def _name_of(device: str) -> str:
    import torch

    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else torch.device(device).type


if __name__ == "__main__":
    main(sys.argv[1])
