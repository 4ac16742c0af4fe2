"""Training steps of models of published size on one accelerator: `python bench/gpu.py`, or `python bench/gpu.py NAME ...`.

Each case is a process of its own, prints one line of JSON, and counts latents and texts as encoded before: seconds per step
(median), images per second, model FLOPs utilisation, and the most memory that tensors took. Weights are random numbers, and
so are latents and texts; the rest is what a run does in a step. `--tiny` takes tiny models and images, to try the script
without a device; `--keep` writes the results to `bench/results/`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from torch import Tensor, nn

    from smalti_diffusers.pipeline import PipelineFamily

ROOT = Path(__file__).parents[1]
WARM_UP, STEPS = 3, 10
RECOMPUTED = ("--gradient_checkpointing",)
SHARDED = ("--fsdp_enable", "--optimizer=adamw")
ADAPTER = ("--model_type=lora", "--lora_rank=16")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model, size of images and batch, with the flags of a run."""

    family: str
    edge: int
    batch: int
    flags: tuple[str, ...] = ()

    @property
    def compiled(self) -> Case:
        return replace(self, flags=(*self.flags, "--dynamo_backend=inductor"))


_EAGER = {
    "sdxl-b1": Case(family="sdxl", edge=1024, batch=1),
    "sdxl-b8": Case(family="sdxl", edge=1024, batch=8, flags=RECOMPUTED),
    "flux-lora-512": Case(family="flux", edge=512, batch=1, flags=ADAPTER),
    "flux-lora-1024": Case(family="flux", edge=1024, batch=1, flags=(*ADAPTER, *RECOMPUTED)),
}
_LADDER = {
    "ladder-1-sharded": Case(family="sdxl", edge=1024, batch=1, flags=SHARDED),
    "ladder-2-recomputed": Case(family="sdxl", edge=1024, batch=1, flags=(*SHARDED, "--fsdp_activation_checkpointing")),
    "ladder-3-offloaded": Case(
        family="sdxl", edge=1024, batch=1, flags=(*SHARDED, "--fsdp_activation_checkpointing", "--fsdp_cpu_offload")
    ),
}
ZERO2 = '--deepspeed_config={"zero_optimization": {"stage": 2%s}}'
OFFLOADED = ZERO2 % ', "offload_optimizer": {"device": "cpu"}'
_OFFLOAD = {
    "zero2-b8": Case(family="sdxl", edge=1024, batch=8, flags=(*RECOMPUTED, ZERO2 % "")),
    "zero2-offload-b8": Case(family="sdxl", edge=1024, batch=8, flags=(*RECOMPUTED, OFFLOADED)),
    "zero2-offload-128px-b8": Case(family="sdxl", edge=128, batch=8, flags=(*RECOMPUTED, OFFLOADED)),
    "fsdp-offload-b8": Case(
        family="sdxl", edge=1024, batch=8, flags=(*SHARDED, "--fsdp_activation_checkpointing", "--fsdp_cpu_offload")
    ),
}
CASES = _EAGER | {f"{name}-compiled": case.compiled for name, case in _EAGER.items()} | _LADDER | _OFFLOAD
"""Full rank but for Flux, whose weights, gradients and optimizer state need 177 GiB. The ladder: full-rank SDXL, each time with
less memory.
Offload: the same at batch 8, where SimpleTuner reports 13,102 MiB and 8 s a step on a 4090 (9,237 MiB at 128 pixels)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"any of {', '.join(CASES)}; all if none is given")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on whatever device there is")
    parser.add_argument("--keep", action="store_true", help="also write the results to bench/results/")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.cases if name not in CASES]:
        parser.error(f"unknown cases {', '.join(unknown)}")
    if arguments.here:
        case = CASES[arguments.cases[0]]
        print(json.dumps(measure(replace(case, edge=64) if arguments.tiny else case, tiny=arguments.tiny)))
        return
    results = []
    for name in arguments.cases or CASES:
        command = [sys.executable, __file__, name, "--here", *(["--tiny"] if arguments.tiny else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        lines = done.stdout.splitlines()
        results.append({"case": name, **(json.loads(lines[-1]) if done.returncode == 0 else {"failed": done.returncode})})
        print(json.dumps(results[-1]), flush=True)
    if arguments.keep:
        keep(results)


def keep(results: list[dict[str, object]]) -> None:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    record = {"date": date.today().isoformat(), "hardware": device, "python": sys.version.split()[0]}
    record |= {name: version(name) for name in ("smalti", "torch", "diffusers")}
    path = ROOT / "bench/results" / f"{record['date']}-{device.replace(' ', '-')}.json"
    path.write_text(json.dumps({**record, "results": results}, indent=2) + "\n")
    print(f"kept in {path}", file=sys.stderr)


# --- one case -------------------------------------------------------------------------------------------------------


def measure(case: Case, *, tiny: bool) -> dict[str, object]:
    """The figures of a case, in this process. Too little memory is a result, too."""
    import torch

    from smalti.training.metrics import Memory, peak_of

    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
        try:
            subject = build(case, pipeline(Path(folder), case.family, tiny=tiny), Path(folder) / "run", closing)
            device = subject.parallel.world.device
            seconds = list(steps(subject, device))
        except torch.OutOfMemoryError:
            return {"out_of_memory": True}
        peak = peak_of(subject.parallel.world, "bf16")
        flops = case.batch * subject.family.flops_per_sample(case.edge, case.edge) * (2 + subject.trained)
    median = statistics.median(seconds)
    utilization = round(flops / median / peak, 4) if peak else None
    memory = Memory(device).peak_mb()
    return {
        "seconds_per_step": round(median, 4),
        "images_per_second": round(case.batch / median, 3),
        "mfu": utilization,
        "peak_mib": None if memory is None else round(memory),
        "flags": list(case.flags),
    }


def pipeline(folder: Path, family: str, *, tiny: bool) -> Path:
    """A pipeline of published shape without weights; or a tiny one."""
    sys.path.insert(0, str(ROOT / "plugins/diffusers/tests"))
    import tiny as tiny_pipelines

    from smalti_diffusers.flavours import FLAVOURS, shipped_folder

    made: Path = getattr(tiny_pipelines, family)(folder / "pipeline")
    if not tiny:
        for part in ("unet" if family == "sdxl" else "transformer", "vae"):
            shipped = shipped_folder(next(iter(FLAVOURS[family].values())))
            assert shipped is not None, family
            (made / part / "config.json").write_text((shipped / part / "config.json").read_text())
    return made


def build(case: Case, folder: Path, directory: Path, closing: ExitStack) -> SimpleNamespace:
    """Model, optimizer and loss as a run has them, and one batch."""
    import torch

    from smalti.cli.arguments import CommandLine
    from smalti.config import TrainingOptions
    from smalti.hookspecs import HookSpecs
    from smalti.plugins.lookup import choose_distributed, find_family
    from smalti.training.build_run import build_model, build_optimizer, open_parallel
    from smalti.training.loss import denoising_loss
    from smalti.training.optim.optimizers import matrices

    arguments = [f"--model_family={case.family}", f"--pretrained_model_name_or_path={folder}", "--init_from_config"]
    arguments += [f"--output_dir={directory}", f"--train_batch_size={case.batch}", "--mixed_precision=bf16", *case.flags]
    command_line = CommandLine.parse(arguments)
    config, plugins = command_line.config(), command_line.plugins
    plan = choose_distributed(config, plugins)
    parallel = open_parallel(plan, config)
    closing.callback(parallel.close)
    device = parallel.world.device
    family = find_family(config, plugins)
    model, blocks = build_model(config, plugins, family, device)
    count = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    decayed, weights = matrices(model), SomeWeights(model)
    wrapped = plugins.backend(plan).decide(
        HookSpecs.wrap_model, model=model, family=family, blocks=blocks, parallel=parallel, weights=weights
    )
    assert wrapped is not None, "the strategy's own answer comes last"
    model, optimizer = parallel.setup(wrapped, build_optimizer(config, plugins, parallel, wrapped, decayed))
    model.train()
    shapes = family.example_conditioning(case.edge, case.edge)
    conditioning = {name: torch.randn_like(one, device=device) for name, one in shapes.items()}
    return SimpleNamespace(
        family=family,
        parallel=parallel,
        model=model,
        kernel=config[TrainingOptions].sdpa_backend,
        optimizer=optimizer,
        trained=trained / count,
        loss=denoising_loss(config, family, device, {name: one[:1] for name, one in conditioning.items()}),
        batch=batch_of(case, cast("PipelineFamily", family), conditioning, device),
    )


def batch_of(case: Case, family: PipelineFamily, conditioning: dict[str, Tensor], device: str) -> SimpleNamespace:
    """Latents and texts of a micro-batch; the images themselves do not exist."""
    import torch

    from smalti.data.buckets import Bucket
    from smalti.models.size_conditioning import SizeConditioning

    size = case.edge // family.vae_scale
    return SimpleNamespace(
        bucket=Bucket(case.edge, case.edge),
        pixels=None,
        latents=torch.randn(case.batch, family.latent_channels, size, size, device=device),
        captions=("",) * case.batch,
        conditioning={name: one.expand(case.batch, *one.shape[1:]) for name, one in conditioning.items()},
        size_conditioning=(SizeConditioning(width=case.edge, height=case.edge, left=0, top=0),) * case.batch,
        numbers=tuple(range(case.batch)),
    )


def steps(subject: SimpleNamespace, device: str) -> Iterator[float]:
    """The seconds of each step but for the first ones, in which kernels are compiled and memory is taken."""
    import torch

    from smalti.models.attention import attention_kernel

    parallel = subject.parallel
    for number in range(WARM_UP + STEPS):
        begin = time.perf_counter()
        with parallel.accumulate(last=True):
            loss = subject.loss(subject.model, subject.batch, parallel)
            with attention_kernel(subject.kernel):  # recomputation is part of it
                parallel.backward(loss)
        parallel.clip_gradients(1.0)
        parallel.step()
        if torch.device(device).type != "cpu":
            torch.accelerator.synchronize(device)
        if number >= WARM_UP:
            yield time.perf_counter() - begin


class SomeWeights:
    """Random numbers for every parameter, the same ones over and over: drawing twelve billion would take minutes."""

    def __init__(self, model: nn.Module) -> None:
        import torch

        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if tensor.is_meta}
        self._numbers = torch.randn(1 << 24) * 0.02

    def names(self) -> Iterator[str]:
        return iter(self._shapes)

    def get(self, name: str) -> Tensor:
        shape = self._shapes[name]
        times = -(-shape.numel() // len(self._numbers))
        numbers = self._numbers.repeat(times) if times > 1 else self._numbers
        return numbers[: shape.numel()].view(shape).clone()


if __name__ == "__main__":
    main()
