"""What is to be exported, and tensors that are computed while an export is written. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """What to export. `format` is that of adapters, such as "kohya"; None is the family's own choice."""

    format: str | None = None


@dataclass(frozen=True, kw_only=True)
class Computed:
    """A tensor that is computed when the export is written. `dtype` is its type in the file; None is that of the export."""

    shape: tuple[int, ...]
    compute: Callable[[], Tensor]
    dtype: torch.dtype | None = None
