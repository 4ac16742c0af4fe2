"""Adapters with random weights, exported as `smalti checkpoint export` does, and what their readers make of the files."""

from dataclasses import dataclass, field
from pathlib import Path

import kinds
import tiny
import torch
from diffusers import DiffusionPipeline, ModularPipeline
from safetensors.torch import load_file

from smalti.checkpoint.conversion.export_request import ExportRequest
from smalti.checkpoint.conversion.formats import OwnCheckpoint
from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.writer import save
from smalti.config.resolution import resolve
from smalti.models.weights import materialise
from smalti.parallel.state import PortableState
from smalti.plugins.discovery import load_plugins
from smalti.plugins.lookup import find_family
from smalti.plugins.schema import schema_of
from smalti_diffusers.families.anima import without_padding
from smalti_diffusers.families.qwen_image import mask_aside
from smalti_diffusers.families.text_first import text_first
from smalti_diffusers.lora.kinds import parted
from smalti_diffusers.lora.shapes import MAGNITUDE
from smalti_export.folder import NewExport, TrainedWeights
from smalti_testing.family_subject import FamilySubject
from smalti_testing.strategies import SingleRank

RANK, ALPHA = 4, 6.0
FAMILIES = (
    *("anima", "auraflow", "bria", "chroma", "cosmos", "ernie", "flux", "flux2", "ideogram", "krea2", "lumina2", "ovis_image"),
    *("hidream", "longcat_image", "pixart", "qwen_image", "qwen_image21", "sana", "sd1x", "sd2x", "sd3", "sdxl", "z_image"),
)


def opened(folder: Path) -> DiffusionPipeline | ModularPipeline:
    """A pipeline with all of its parts, by diffusers."""
    if not (folder / "modular_model_index.json").is_file():
        return kinds.opened(folder)
    pipeline = ModularPipeline.from_pretrained(folder)
    pipeline.load_components()
    return pipeline


def family(name, base, *flags):
    plugins = load_plugins()
    words = [f"--model_family={name}", f"--pretrained_model_name_or_path={base}", "--mixed_precision=no", *flags]
    return find_family(resolve(schema_of(plugins), words, environment={}), plugins)


@dataclass
class Adapter:
    """A tiny pipeline, its model with a random adapter, and a checkpoint of that adapter."""

    name: str
    base: Path
    subject: FamilySubject
    model: torch.nn.Module
    checkpoint: Path
    usages: dict[str, str] = field(default_factory=dict)
    """What the last export said about its files, by tool."""

    @property
    def deltas(self) -> dict[str, torch.Tensor]:
        """What the adapter adds to the weight of each layer."""
        return {
            name: module.get_delta_weight("default").detach()
            for name, module in self.model.named_modules()
            if hasattr(module, "get_delta_weight")
        }

    def export(self, folder: Path, **request) -> Path:
        """The one file of tensors, or the folder of a complete model."""
        trained = TrainedWeights(OwnCheckpoint(self.checkpoint), use_ema=False, precision=None)
        described = self.subject.family.adapter(0)
        asked = ExportRequest(**request)
        self.subject.family.check_export(asked)
        made = NewExport(folder, trained, described, lambda done, total: None, name=folder.name, request=asked)
        self.subject.family.export(made)
        made.finish()
        self.usages = {usage.tool: usage.text.replace("{path}", str(folder)) for usage in made.usages}
        return folder

    def predict(self, model) -> torch.Tensor:
        if model is not self.model and self.subject.family.name == "qwen_image":
            mask_aside(model)  # as those that the family builds
        if model is not self.model and self.subject.family.name == "qwen_image21":
            text_first(model)
        if self.subject.family.name in ("anima", "cosmos"):
            without_padding(model)
        noisy = torch.randn(self.subject.latents.shape, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            return self.subject.predict(model, noisy, [100.0, 500.0, 900.0], self.subject.captions)


def make_adapter(root: Path, name: str, *flags: str, base: Path | None = None) -> Adapter:
    base = base or getattr(tiny, name)(root / "base")
    words = ["--model_type=lora", f"--lora_rank={RANK}", f"--lora_alpha={ALPHA}", *flags]
    subject = FamilySubject(family(name, base, *words))
    model = materialise(subject.bare(), subject.family.weights(0), "cpu").eval()
    random = torch.Generator().manual_seed(7)
    trained = {name: each for name, each in model.named_parameters() if parted(name)}
    with torch.no_grad():
        for key, parameter in trained.items():
            values = torch.randn(parameter.shape, generator=random) * 0.2
            parameter.copy_(parameter * (1 + values) if MAGNITUDE in key else values)
    saved = save(root, Snapshot(step=1, state=PortableState(model=trained)), SingleRank())
    return Adapter(name=name, base=base, subject=subject, model=model, checkpoint=saved.path)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the one safetensors file of a folder."""
    (file,) = folder.glob("*.safetensors")
    return load_file(file)
