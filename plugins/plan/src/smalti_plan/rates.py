"""What ranks of this node reach: `python -m smalti_plan.rates RANK RANKS KIND FOLDER` prints `Rates` as JSON.

All ranks run at the same time, on the CPU with the threads that ranks of a run have. FOLDER is empty and shared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Literal

from smalti import UserError
from smalti.system import PARENT_VARIABLE, die_with_parent, load_json, usable_cores

if TYPE_CHECKING:
    import torch

Clock = Literal["wall", "cpu"]
_SENT = 4 << 20
_STEPPED = 4 << 20
_ROUNDS = 9
_LIMIT = 300.0
"""Seconds after which ranks count as hanging."""
_OPERATIONS = 5
"""That a round of `_chain` dispatches in its forward pass."""
_LAYERS = 40
_SHOWN = 2000


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Of one rank while the others do the same. `links` and `memory` are bytes per second: sent by each collective operation
    (none with one rank), read and written by AdamW. `dispatch` is seconds for each operation of a forward pass, if the backward
    pass dispatches two more.
    """

    links: Mapping[str, float]
    memory: float
    dispatch: float


def measure_rates(ranks: int, kind: str, clock: Clock = "wall") -> Rates:
    """Measure with `ranks` processes on this node for some seconds; the slowest one counts.

    Raises UserError with the end of their output.

    The clock "cpu" counts CPU seconds, which other load on the processors does not change.
    """
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, PARENT_VARIABLE: str(os.getpid())}
    if kind == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="smalti-plan-") as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", "smalti_plan.rates", str(rank), str(ranks), kind, folder],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(ranks)
        ]
        try:
            answers = [process.communicate(timeout=_LIMIT) for process in processes]
        except subprocess.TimeoutExpired as error:
            raise UserError("the devices cannot be measured: a rank hangs", fix="smalti doctor") from error
        finally:
            for process in processes:
                process.kill()
                process.wait()
    for process, (_, errors) in zip(processes, answers, strict=True):
        if process.returncode:
            raise UserError(f"the devices cannot be measured: {errors.strip()[-_SHOWN:]}", fix="smalti doctor")
    found = [Rates(**load_json(output.splitlines()[-1])[clock]) for output, _ in answers]
    return Rates(
        links={name: min(each.links[name] for each in found) for name in found[0].links},
        memory=min(each.memory for each in found),
        dispatch=max(each.dispatch for each in found),
    )


def measured(rank: int, ranks: int, kind: str, folder: Path) -> dict[Clock, Rates]:
    """What this rank reaches, by both clocks."""
    import torch
    import torch.distributed as dist

    from smalti.parallel import use_device

    device = torch.device(kind) if kind == "cpu" else torch.device(kind, rank)
    if kind != "cpu":
        use_device(str(device))
    if ranks > 1:
        dist.init_process_group(rank=rank, world_size=ranks, init_method=f"file://{folder / 'store'}")
    try:
        links = {name: _timed(send, device) for name, send in _collectives(device, ranks).items()} if ranks > 1 else {}
        memory = _timed(_optimizer(device), device)
        chain = _timed(_chain(device), device)
    finally:
        if ranks > 1:
            dist.destroy_process_group()
    sent = {name: (2 if name == "all-reduce" else 1) * _SENT * (ranks - 1) / ranks for name in links}
    clocks: tuple[Clock, ...] = ("wall", "cpu")
    return {
        clock: Rates(
            links={name: sent[name] / taken[clock] for name, taken in links.items()},
            memory=28 * _STEPPED / memory[clock],
            dispatch=chain[clock] / (3 * _OPERATIONS * _LAYERS),
        )
        for clock in clocks
    }


def _collectives(device: torch.device, ranks: int) -> dict[str, Callable[[], object]]:
    """By the names that strategies use, on fp32 values of `_SENT` bytes."""
    import torch
    import torch.distributed as dist

    whole = torch.ones(_SENT // 4 // ranks * ranks, device=device)
    part = torch.ones(whole.numel() // ranks, device=device)
    return {
        "all-gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all-reduce": lambda: dist.all_reduce(whole),
    }


def _optimizer(device: torch.device) -> Callable[[], object]:
    import torch

    weight = torch.nn.Parameter(torch.ones(_STEPPED, device=device))
    weight.grad = torch.ones_like(weight)
    return torch.optim.AdamW([weight], lr=1e-6, fused=True).step


def _chain(device: torch.device) -> Callable[[], object]:
    """Forward and backward pass of small layers: hardly anything is computed."""
    import torch
    import torch.nn.functional as F

    start = torch.ones(4, 16, device=device)
    weight = torch.full((16, 16), 0.01, device=device, requires_grad=True)
    bias = torch.zeros(16, device=device, requires_grad=True)

    def train() -> None:
        hidden = start
        for _ in range(_LAYERS):
            hidden = hidden + F.gelu(F.linear(F.layer_norm(hidden, (16,)), weight, bias))
        hidden.sum().backward()  # type: ignore[no-untyped-call]

    return train


def _timed(work: Callable[[], object], device: torch.device) -> dict[Clock, float]:
    """Median seconds, after two that warm up."""
    import torch

    found: list[tuple[float, float]] = []
    for _ in range(2 + _ROUNDS):
        begun = time.perf_counter(), time.process_time()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        found.append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
    wall, cpu = (median(each[number] for each in found[2:]) for number in range(2))
    return {"wall": wall, "cpu": cpu}


if __name__ == "__main__":
    die_with_parent()
    rank, ranks, kind, folder = sys.argv[1:]
    print(json.dumps({clock: asdict(each) for clock, each in measured(int(rank), int(ranks), kind, Path(folder)).items()}))
