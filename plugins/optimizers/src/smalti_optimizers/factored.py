"""Second moments of which a row and a column are kept instead of the matrix (Shazeer and Stern 2018, arXiv:1804.04235).

A parameter of more than two dimensions is factored over its last two, or as the matrix of its `parameter[i]`, flattened:
whichever keeps fewer numbers, which for a convolution is the matrix. Of a sharded parameter a rank has complete `parameter[i]`.
So only the column of a matrix, and what is one number for a parameter, need the other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from smalti.training import local_part
from smalti_optimizers.steps import redistributed, sharded_like, sum_together

_EPS = 1e-30


class Factors:
    """Averages of the squares of what has a parameter's shape: this rank's part, in fp32, in the parameter's `state`.

    A row, (..., rows, 1), and a column, (..., 1, columns), under `names`; of a vector all averages, under the last name. Of a
    sharded parameter they are sharded likewise, but the column of a matrix is the same plain tensor on every rank.

    State of earlier versions, which factored every parameter over its last two dimensions, goes on as it is.
    """

    def __init__(self, parameter: Tensor, state: dict[str, Tensor], names: tuple[str, str, str]) -> None:
        shape, row = parameter.shape, state.get(names[0])
        self._part = local_part(parameter).shape
        if is_flattened(shape) if row is None else row.dim() < len(shape):
            shape = torch.Size((shape[0], shape[1:].numel()))
        self.is_matrix = len(shape) == 2
        self._rows = shape[-2] if len(shape) > 1 else 0
        if len(shape) < 2:
            self._squares = _kept(parameter, state, names[2], shape)
            return
        self._row = _kept(parameter, state, names[0], torch.Size((*shape[:-1], 1)))
        self._column = _kept(parameter, state, names[1], torch.Size((*shape[:-2], 1, shape[-1])), whole=self.is_matrix)

    def add(self, squares: Tensor, new: float, eps: float) -> Tensor:
        """Move the averages by the share `new` towards squares + eps: of a matrix all but its column.

        Returns this rank's part of the sums that `finish` needs of a matrix, (columns + 1,); of others nothing, (0,).
        """
        if not self._rows:
            self._squares.lerp_(squares + eps, new)
            return squares.new_empty(0)
        squares = self._factored(squares)
        self._row.lerp_(squares.mean(-1, keepdim=True).add_(eps), new)
        if self.is_matrix:
            return torch.cat([squares.sum(0), self._row.sum().view(1)])
        self._column.lerp_(squares.mean(-2, keepdim=True).add_(eps), new)
        self._mean = self._row.mean(-2, keepdim=True)
        return squares.new_empty(0)

    def finish(self, sums: Tensor, new: float, eps: float) -> None:
        """Move the column of a matrix by the sums, over all ranks, of what `add` returned."""
        if self.is_matrix:
            self._column.lerp_(sums[:-1].div(self._rows).add_(eps), new)
            self._mean = sums[-1] / self._rows

    def scale(self) -> Tensor:
        """One over the root of the averages that the factors stand for, (...) as the parameter. After `finish`."""
        if not self._rows:
            return self._squares.rsqrt()
        return ((self._row / self._mean).rsqrt_() * self._column.rsqrt()).view(self._part)

    def over_row(self, squares: Tensor) -> Tensor:
        """Of a matrix, after `add`: this rank's part of the sums that `scaled_sum` needs, (columns,)."""
        return (self._factored(squares) / self._row).sum(0)

    def scaled_sum(self, sums: Tensor) -> Tensor:
        """The sum of squares x scale^2 of a matrix, a scalar: by the sums, over all ranks, of `over_row`."""
        return (sums / self._column).sum() * self._mean

    def _factored(self, squares: Tensor) -> Tensor:
        """What has the parameter's shape in the shape whose last two dimensions are factored."""
        return squares.flatten(1) if self.is_matrix else squares


def is_flattened(shape: torch.Size) -> bool:
    """Whether a parameter of this shape, with more than two dimensions, is factored as a matrix of its `parameter[i]`."""
    over_last = shape[:-1].numel() + shape[:-2].numel() * shape[-1] if len(shape) > 2 else 0
    return shape[:1].numel() + shape[1:].numel() < over_last


def clipped_updates(parameters: Sequence[Tensor], factors: Sequence[Factors], new: Sequence[float]) -> Iterator[Tensor]:
    """This rank's part of each gradient over the root of its second moment, with a root mean square of at most 1. In fp32.

    First moves the moments by the shares `new`. *Collective*, once for all parameters: the size of the update of a matrix
    follows from the sums of which its factors are made, and needs no sum over the update.
    """
    parts = []
    for parameter, each, share in zip(parameters, factors, new, strict=True):
        gradient = _gradient(parameter)
        squares = gradient.square()
        sums = each.add(squares, share, _EPS)
        more = each.over_row(squares) if each.is_matrix else (each.scale() * gradient).square().sum().view(1)
        parts.append(torch.cat([sums, more]))
    for parameter, each, share, sums in zip(parameters, factors, new, sum_together(parts, parameters), strict=True):
        total = sums[0]
        if each.is_matrix:
            columns = len(sums) // 2
            each.finish(sums[: columns + 1], share, _EPS)
            total = each.scaled_sum(sums[columns + 1 :])
        update = each.scale().mul_(_gradient(parameter))
        yield update.div_((total / parameter.numel()).sqrt_().clamp_(min=1.0))


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return local_part(parameter.grad).float()


def _kept(parameter: Tensor, state: dict[str, Tensor], name: str, shape: torch.Size, *, whole: bool = False) -> Tensor:
    """This rank's part of a tensor of the state, at first zeros: sharded like the parameter, or not at all with `whole`.

    A checkpoint is read into a plain tensor, but into one like the parameter if it has the parameter's shape.
    """
    tensor = state.get(name)
    if not isinstance(parameter, DTensor):
        if tensor is None:
            tensor = torch.zeros(shape, device=parameter.device)
    elif whole:
        tensor = torch.zeros(shape, device=local_part(parameter).device) if tensor is None else tensor
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    elif tensor is None:
        tensor = sharded_like(parameter, torch.zeros(len(local_part(parameter)), *shape[1:]), shape)
    elif not isinstance(tensor, DTensor):
        tensor = redistributed(tensor, parameter)
    state[name] = tensor
    return local_part(tensor)
