"""What a family is given to export a trained model, and what it says of it. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from smalti.checkpoint.format.full_weights import LARGEST_FILE
from smalti.checkpoint.format.safetensors_layout import StoredTensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """What to export.

    `format` is that of adapters, such as "kohya"; None is the family's own choice. With `merge` the complete model is exported,
    with the adapter merged into it. With `single_file` it is one file, in the layout that the model's tools load.
    `largest_file` is in bytes of tensors; larger models get several files and an index, except for a single file.
    """

    format: str | None = None
    merge: bool = False
    single_file: bool = False
    largest_file: int = LARGEST_FILE


@dataclass(frozen=True, kw_only=True)
class Computed:
    """A tensor that is computed when the export is written.

    `dtype` is its type in the file, None is fp32; floating-point types give way to that of the export unless they are `fixed`.
    """

    shape: tuple[int, ...]
    compute: Callable[[], Tensor]
    dtype: torch.dtype | None = None
    fixed: bool = False


@dataclass(frozen=True, kw_only=True)
class Usage:
    """How a tool loads an export. In `text`, `{path}` stands for the folder and `{prompt}` for a prompt in quotes.

    With `needs_run`, it can only be done where the run is, as another export: the model card leaves it out.
    """

    tool: str
    text: str
    needs_run: bool = False


class ExportFolder(Protocol):
    """An empty folder that becomes an export. `adapter` describes the adapter of the run; None without one.

    `name` is what the folder will be called. A family adds to `usages` how its files are loaded, and to
    `metadata` what the head of the model card says, in the terms of the Hugging Face Hub: `base_model`, `library_name`, ...
    """

    adapter: Mapping[str, object] | None
    name: str
    request: ExportRequest
    usages: list[Usage]
    metadata: dict[str, object]

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Types and shapes of the trained tensors, by their names in the model."""
        ...

    def tensor(self, name: str) -> Tensor:
        """One trained tensor, in the type in which it is stored."""
        ...

    def write_model(self, part: str, config: Mapping[str, object], *, tensors: Mapping[str, Computed] | None = None) -> None:
        """Write a model and its config, in diffusers' layout, to the sub-folder `part` ("": none).

        `tensors` are all tensors of the model, computed one at a time; None takes the trained tensors as they are.
        """
        ...

    def write_computed(self, name: str, tensors: Mapping[str, Computed], notes: Mapping[str, str]) -> None:
        """Write a safetensors file of tensors that are computed one at a time; `notes` are its metadata."""
        ...

    def write_json(self, name: str, value: Mapping[str, object]) -> None:
        """Write a file in JSON."""
        ...

    def write_text(self, name: str, text: str) -> None:
        """Write a file in UTF-8."""
        ...

    def copy(self, source: Path, name: str) -> None:
        """Copy a file unchanged."""
        ...
