"""What is to be exported, and tensors that are computed while an export is written. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smalti.checkpoint.format.full_weights import LARGEST_FILE

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
