"""A single safetensors file that somebody brings: what it is, and its tensors, which are read later.

Weights in fp16, bf16 and fp8 are read as they are and converted to the model's types by whoever asks for them. Scaled fp8, as
ComfyUI writes it, is multiplied with its scale while it is read: `X.weight` with `X.scale_weight` or `X.weight_scale`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from smalti import UserError
from smalti.checkpoint import DTYPES
from smalti.models import FolderWeights
from smalti.system import load_json
from smalti_diffusers.sources.pending import PendingTensor, Rows

SUFFIX = ".safetensors"
_PICKLES = frozenset((".bin", ".pt", ".pth", ".ckpt", ".pkl"))
_SCALES = (".scale_weight", ".weight_scale")
_NOT_WEIGHTS = (".scale_input", ".input_scale", ".comfy_quant", "scaled_fp8")
"""What quantised files have beside weights and their scales: scales of activations, and notes."""
MARKS: Mapping[str, tuple[str, object]] = {
    "v_pred": ("prediction_type", "v_prediction"),
    "ztsnr": ("rescale_betas_zero_snr", True),
}
"""Empty tensors by which SDXL files say what differs from the scheduler of the base model."""
_FP8 = ("F8_E4M3", "F8_E5M2")


class ModelFile:
    """The tensors of a safetensors file by name, without their values. Reads the header only.

    Raises UserError, which names the file, for another format, a damaged file, and quantised weights that cannot be restored.
    """

    def __init__(self, path: Path) -> None:
        check_format(path)
        self.path = path
        self._stored = FolderWeights(path)
        names = set(self._stored.names())
        self._scales = dict(_scales(names))
        beside = {*self._scales.values(), *(name for name in names if name.endswith(_NOT_WEIGHTS))}
        self.tensors = {name: self._pending(name) for name in sorted(names - beside)}

    def read(self, name: str, start: int, stop: int | None) -> Tensor:
        """Rows of a tensor, in fp32 where it has a scale."""
        rows = self._stored.rows(name, start, stop)
        if name not in self._scales:
            return rows
        scale = self._stored.get(self._scales[name]).float()
        if scale.numel() == 1:
            return rows.float() * scale.view(())
        return rows.float() * scale.view(-1, *(1,) * (rows.ndim - 1))[start:stop]

    @property
    def scheduler(self) -> dict[str, object]:
        """Scheduler settings from this file: SDXL files mark v-prediction and zero terminal SNR."""
        return {key: value for mark, (key, value) in MARKS.items() if mark in self.tensors}

    def digest(self, names: Iterable[str]) -> str:
        """Tells these tensors from others, by a sample of their bytes and of their scales."""
        chosen = set(names)
        return self._stored.digest(chosen | {self._scales[name] for name in chosen & self._scales.keys()})

    def _pending(self, name: str) -> PendingTensor:
        stored = self._stored.stored(name)
        if name in self._scales:
            scale = self._stored.stored(self._scales[name])
            if stored.dtype not in _FP8 or scale.elements not in (1, stored.shape[0]):
                raise self._quantised(name)
            return PendingTensor(stored.shape, torch.float32, Rows(name))
        if len(stored.shape) > 1 and not DTYPES[stored.dtype].is_floating_point and name.endswith(".weight"):
            raise self._quantised(name)
        return PendingTensor(stored.shape, DTYPES[stored.dtype], Rows(name))

    def _quantised(self, name: str) -> UserError:
        kind = self._stored.stored(name).dtype
        note = f"{name.removesuffix('.weight')}.comfy_quant"
        if note in set(self._stored.names()):
            kind = load_json(bytes(self._stored.get(note).tolist())).get("format", kind)
        return UserError(
            f"{self.path} holds quantised weights ({name}: {kind}), from which training cannot start",
            fix="take the file in bf16, in fp16, or in fp8 without scales or with one for each tensor or row, where mxfp8 and "
            "nvfp4 have one for each block; --base_model_precision quantises while it is loaded",
        )

    def __str__(self) -> str:
        return str(self.path)


def _scales(names: set[str]) -> Iterator[tuple[str, str]]:
    """Weights with the names of their scales."""
    for name in names:
        for suffix in _SCALES:
            weight = name.removesuffix(suffix) + ".weight"
            if name.endswith(suffix) and weight in names:
                yield weight, name


def check_format(path: Path) -> None:
    """Raises UserError for a file that is evidently not safetensors, with what it is instead."""
    with path.open("rb") as file:
        start = file.read(64)
    if start.startswith(b"GGUF") or path.suffix == ".gguf":
        raise UserError(
            f"{path} is a GGUF file: its weights are quantised for inference, and training cannot start from them",
            fix="take the model's safetensors file, in bf16, fp16 or fp8",
        )
    if start.startswith(b"version https://git-lfs"):
        raise UserError(f"{path} is a pointer of Git LFS, not the model itself", fix="`git lfs pull` in that folder")
    if start.lstrip()[:1] == b"<":
        raise UserError(
            f"{path} is a web page, not a model",
            fix="download the file again, logged in or with a token where the site asks for one",
        )
    # A zip archive of torch, or an older pickle; not the length of a header, which would be 16 MiB or more.
    if path.suffix in _PICKLES or start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04")):
        raise UserError(f"{path} is a pickle, which can run code when it is opened", fix=_conversion(path))


def _conversion(path: Path) -> str:
    """A command that makes a safetensors file of the tensors of a pickle, without running code from it."""
    return (
        'convert it once:\n    python -c "import torch; from safetensors.torch import save_file; '
        f"found = torch.load('{path}', map_location='cpu', weights_only=True); found = found.get('state_dict', found); "
        "save_file({name: value.clone().contiguous() for name, value in found.items() if isinstance(value, torch.Tensor)}, "
        f"'{path.with_suffix(SUFFIX)}')\""
    )
