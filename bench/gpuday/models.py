"""The models of checks, and the options of `smalti train` that name them: `python -m gpuday.models NAME FOLDER` makes one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gpuday.checks import Work

if TYPE_CHECKING:
    from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
TOY = {False: (256, 8, 4), True: (32, 2, 2)}
"""Width, depth and heads: on a device, and in a rehearsal."""
ON_CPUS = {
    "--mixed_precision=bf16": "--mixed_precision=no",
    "--dynamo_backend=inductor": "--dynamo_backend=eager",
    "--sdpa_backend=efficient": "--sdpa_backend=flash",
    "--sdpa_backend=cudnn": "--sdpa_backend=flash",
}
"""What a rehearsal takes in place of what only a CUDA device has, or would compile for minutes. In bf16, operations on the CPU
break graphs, and allocate more than their results."""


def folder_of(work: Work, models: Path, *, rehearsed: bool) -> Path | None:
    """Where the model of the work lies, which `make` makes; None for one without files."""
    if work.model == "toy":
        return None
    return models / (f"{work.model}-published" if work.published and not rehearsed else work.model)


def words_of(work: Work, models: Path, directory: Path, *, rehearsed: bool) -> list[str]:
    """The words of `smalti train` for this work. `directory` is that of the run."""
    edge = min(work.edge, 64) if rehearsed else work.edge
    words = [f"--train_batch_size={work.batch}", f"--resolution={edge}", "--resolution_type=pixel", f"--output_dir={directory}"]
    folder = folder_of(work, models, rehearsed=rehearsed)
    if folder is None:
        width, depth, heads = TOY[rehearsed]
        words += ["--model_family=toy", f"--toy_width={width}", f"--toy_depth={depth}", f"--toy_heads={heads}"]
    else:
        words += [f"--model_family={work.model}", f"--pretrained_model_name_or_path={folder}"]
        words += ["--init_from_config"] if work.published and not rehearsed else []
        words += (
            ["--tokenizer_max_length=32"] if work.model in ("flux", "sd3") and not (work.published and not rehearsed) else []
        )
    words += [f"--num_processes={work.ranks}", *([f"--num_machines={work.nodes}"] if work.nodes > 1 else [])]
    given = [ON_CPUS.get(word, word) if rehearsed else word for word in work.words]
    if rehearsed and not any(word.startswith("--sdpa_backend") for word in given):
        given.append("--sdpa_backend=math")  # that of CPUs breaks graphs
    return [
        *words,
        "--learning_rate=1e-3",
        "--max_train_steps=100",
        *given,
        *(["--use_cpu"] if rehearsed or work.on_cpu else []),
    ]


def make(name: str, folder: Path) -> None:
    """A tiny pipeline of a family; with "-published" the one of published size, described and without weights."""
    sys.path.insert(0, str(ROOT / "plugins/diffusers/tests"))
    import tiny

    from smalti_diffusers.flavours import FLAVOURS, shipped_folder

    family, _, size = name.partition("-")
    making = folder.with_name(f"{folder.name}.making")
    getattr(tiny, family)(making)
    if size:
        shipped = shipped_folder(next(iter(FLAVOURS[family].values())))
        assert shipped is not None, family
        for part in ("unet" if family == "sdxl" else "transformer", "vae"):
            (making / part / "config.json").write_text((shipped / part / "config.json").read_text())
    making.rename(folder)


class SomeWeights:
    """`Weights` of random numbers, the same ones over and over: drawing twelve billion would take minutes."""

    def __init__(self, model: nn.Module) -> None:
        import torch

        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self._numbers = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)) * 0.02

    def names(self) -> Iterator[str]:
        return iter(self._shapes)

    def get(self, name: str) -> Tensor:
        shape = self._shapes[name]
        times = -(-shape.numel() // len(self._numbers))
        numbers = self._numbers.repeat(times) if times > 1 else self._numbers
        return numbers[: shape.numel()].view(shape).clone()


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
