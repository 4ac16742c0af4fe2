"""The shapes of the parts of adapters; how a lokr divides the sizes of a layer, as LyCORIS and peft do. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping

MAGNITUDE = "lora_magnitude_vector"
"""The part of a dora with the lengths of rows."""
Factors = tuple[tuple[int, int], tuple[int, int]]
"""Of a layer: (a, b) with a b outputs, (c, d) with c d inputs."""


def factorised(size: int, factor: int) -> tuple[int, int]:
    """Two numbers with this product: `factor` first if it divides the size; else the nearest to the square root, but for a
    factor other than -1 the first is at most the factor.
    """
    if factor > 0 and size % factor == 0:
        return factor, size // factor
    most = size if factor == -1 else factor
    first = max((each for each in range(1, int(size**0.5) + 1) if size % each == 0 and each <= most), default=1)
    return first, size // first


def factors_of(shapes: Mapping[str, tuple[int, ...]]) -> Factors:
    """How a layer's sizes are divided, from the shapes of the parts of its lokr."""
    sizes = []
    for number in (1, 2):
        name = f"lokr_w{number}"
        whole = shapes.get(name)
        sizes.append(whole[:2] if whole is not None else (shapes[f"{name}_a"][0], shapes[f"{name}_b"][1]))
    (a, c), (b, d) = sizes
    return (a, b), (c, d)


def common_factor(layers: Collection[Factors]) -> int | None:
    """The factor by which all layers are divided, -1 if possible; None if they have several."""
    for factor in (-1, *sorted({outputs[0] for outputs, _ in layers} | {inputs[0] for _, inputs in layers}, reverse=True)):
        if all(factorised(pair[0] * pair[1], factor) == pair for layer in layers for pair in layer):
            return factor
    return None


def rank_of(shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """The rank of a layer, from the shapes of its parts; None of a lokr of two full matrices."""
    for part in ("lora_A", "hada_w1_b", "lokr_w2_b", "lokr_w1_b"):
        if part in shapes:
            return shapes[part][0]
    return None
