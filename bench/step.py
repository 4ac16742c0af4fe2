"""A training step of the demo's model under smalti, everything included, against a loop written by hand.

Both train the same model on the same images with the same precision, optimizer, clipping and EMA. The loop by hand has
its images in memory and draws its noise in one go; ours reads, shuffles, writes events, looks for requests and agrees on
stops. Five steps of one, then five of the other, in one process.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from run import Result, paired, precision_of
from sizes import sized

from smalti import HookSpecs, RunState, StepResult, hookimpl
from smalti.cli.arguments import CommandLine
from smalti.launch.preflight import Preparation
from smalti.parallel import in_bf16
from smalti.parallel.failure_detection import FailureDetector
from smalti.plugins.lookup import choose_distributed
from smalti.plugins.registry import PluginInfo
from smalti.training.build_run import build, open_parallel
from smalti.training.run import Context, Run
from smalti.training.trainer import loop

ROUND, ROUNDS, BATCH = sized((5, 30, 32), short=(1, 1, 2))
ROOT = Path(__file__).parents[1]
DEMO = Path(os.environ.get("DEMO", ROOT / "demo"))
FACES = DEMO / "faces"


def measure() -> list[Result]:
    make_images()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
        arguments = [
            str(ROOT / "examples/emoji/config.toml"),
            f"--output_dir={folder}/run",
            "--num_processes=1",
            "--no_fsdp_enable",
        ]
        arguments += [
            f"--max_train_steps={ROUND * (ROUNDS + 1)}",
            "--checkpoint_step_interval=0",
            "--validation_prompt=[]",
            "--mixed_precision=auto",
            "--lr_scheduler=constant",  # as the loop by hand has it
            "--lr_warmup_steps=0",
        ]
        arguments += [f"--instance_data_dir={FACES}", f"--train_batch_size={BATCH}"]
        run = opened(arguments, closing)
        ours, peer = alternated(run, by_hand(run))
        precision = precision_of(run.config)
    return [paired("step: smalti against a bare loop", ours, peer, unit="s/step", goal=1.03, precision=precision)]


def opened(arguments: list[str], closing: ExitStack) -> Run:
    """A run of one process, ready for its first step."""
    command_line = CommandLine.parse([*arguments, "--without=console", "--without=plots"])
    config, plugins = command_line.config(), command_line.plugins
    prepared = Preparation.of(config, plugins, write=True)
    config, writer = prepared.config, prepared.site.writer  # with the precision of this machine
    assert writer is not None, "no other node and no group has the directory"
    closing.enter_context(writer)
    plan = choose_distributed(config, plugins)
    parallel = open_parallel(plan, config)
    closing.callback(parallel.close)
    detector, state = FailureDetector.create(parallel), RunState(max_steps=0)
    return build(Context.of(config, plugins, plan, parallel, detector, state, writer), closing)


def alternated(run: Run, step: Callable[[], None]) -> tuple[list[float], list[float]]:
    """Train to the end; seconds per step of the run, and of `step` in turn with it. The first round does not count."""
    alternation = Alternation(step)
    run.plugins.register(PluginInfo(name="alternation", distribution="bench", version="0"), alternation)
    run.plugins.notify(HookSpecs.on_train_start, state=run.state, info=run.info)
    loop(run)
    run.plugins.notify(HookSpecs.on_train_end, state=run.state, outcome=None)
    return alternation.ours[1:], alternation.peer[1:]


def make_images() -> None:
    """The demo's images, made if they are not there."""
    sys.path.insert(0, str(ROOT / "examples/emoji"))
    import prepare

    for drawing in prepare.find_drawings(prepare.svg_folder(), "face"):
        prepare.write(drawing, FACES, 64)


class Alternation:
    """After every round of steps of the run, as many of the loop by hand; the times of both per step."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.step = step
        self.ours: list[float] = []
        self.peer: list[float] = []
        self.begin = time.perf_counter()

    @hookimpl
    def on_step_end(self, state: RunState, result: StepResult) -> None:
        if result.step % ROUND:
            return
        now = time.perf_counter()
        self.ours.append((now - self.begin) / ROUND)
        for _ in range(ROUND):
            self.step()
        after = time.perf_counter()
        self.peer.append((after - now) / ROUND)
        self.begin = time.perf_counter()


def by_hand(run: Run) -> Callable[[], None]:
    """One step of an ordinary PyTorch loop on a second model like the run's."""
    family = run.family
    model = family.build_model()
    weights = family.weights(0)
    model.load_state_dict({name: weights.get(name).clone() for name in weights.names()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    first = next(iter(run.batches)).micro[0]
    pixels, captions = first.pixels, first.captions
    assert pixels is not None, "the toy family caches no latents"
    size = run.effective_batch
    pixels = pixels.repeat(-(-size // len(pixels)), 1, 1, 1)[:size]
    captions = (captions * -(-size // len(captions)))[:size]
    objective = run.loss.objective
    bf16 = in_bf16(run.config)

    def step() -> None:
        noise = torch.randn_like(pixels)
        t = objective.times(torch.rand(size).clamp(1e-4, 1 - 1e-4))
        noisy = objective.add_noise(pixels, noise, t)
        conditioning = family.encode_captions(captions)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            prediction = family.forward(model, noisy, objective.timesteps(t), conditioning)
        loss = objective.compare(prediction, objective.target(pixels, noise, t), t).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_(average, [parameter.detach() for parameter in model.parameters()], 0.01)
        loss.item()

    return step
