"""ICC profiles as cameras and editors embed them, and the values of colours in them by the definitions of the colour spaces."""

import struct
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
"""(3, 3): the columns are red, green and blue as XYZ under D50."""

SRGB: Matrix = np.array([[0.43607, 0.38515, 0.14307], [0.22249, 0.71687, 0.06061], [0.01392, 0.09708, 0.71410]])
DISPLAY_P3: Matrix = np.array([[0.51512, 0.29198, 0.15710], [0.24120, 0.69225, 0.06657], [-0.00105, 0.04189, 0.78407]])
ADOBE_RGB: Matrix = np.array([[0.60974, 0.20528, 0.14919], [0.31111, 0.62567, 0.06322], [0.01947, 0.06087, 0.74457]])
ADOBE_GAMMA = 563 / 256
_SRGB_CURVE = (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)


def rgb_profile(primaries: Matrix, gamma: float | None = None) -> bytes:
    """A profile of RGB images; `gamma` None is the curve of sRGB."""
    tags = {f"{name}XYZ": _xyz(column) for name, column in zip("rgb", primaries.T, strict=True)}
    return _profile(b"RGB ", tags | {f"{name}TRC": _curve(gamma) for name in "rgb"})


def grey_profile(gamma: float) -> bytes:
    return _profile(b"GRAY", {"kTRC": _curve(gamma)})


def ink_profile() -> bytes:
    """A profile of CMYK images in which every mixture of inks is the grey of L* = 50, which is 119 in sRGB."""
    ramp = bytes(range(256))
    identity = b"".join(struct.pack(">i", 65536 * (row == column)) for row in range(3) for column in range(3))
    table = b"mft1" + bytes(4) + bytes([4, 3, 2, 0]) + identity + 4 * ramp + 16 * bytes([128, 128, 128]) + 3 * ramp
    return _profile(b"CMYK", {"A2B0": table}, connection=b"Lab ", kind=b"prtr")


def values_in(primaries: Matrix, gamma: float | None, srgb: tuple[int, int, int]) -> tuple[int, ...]:
    """The values from 0 to 255 that an sRGB colour has in another colour space."""
    coded = np.array(srgb) / 255
    linear = np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)
    other = np.linalg.solve(primaries, SRGB @ linear).clip(0, 1)
    if gamma is None:
        coded = np.where(other <= 0.0031308, other * 12.92, 1.055 * other ** (1 / 2.4) - 0.055)
    else:
        coded = other ** (1 / gamma)
    return tuple(np.round(255 * coded).astype(int).tolist())


def _xyz(column: NDArray[np.float64]) -> bytes:
    return b"XYZ " + bytes(4) + struct.pack(">3i", *_fixed(*column))


def _curve(gamma: float | None) -> bytes:
    kind, numbers = (3, _SRGB_CURVE) if gamma is None else (0, (gamma,))
    return b"para" + bytes(4) + struct.pack(f">HH{len(numbers)}i", kind, 0, *_fixed(*numbers))


def _fixed(*numbers: float) -> list[int]:
    return [round(float(number) * 65536) for number in numbers]


def _profile(space: bytes, tags: Mapping[str, bytes], connection: bytes = b"XYZ ", kind: bytes = b"mntr") -> bytes:
    tags = {**tags, "wtpt": _xyz(np.array([0.9642, 1.0, 0.8249])), "desc": _text("test"), "cprt": _text("none")}
    at, table, data = 128 + 4 + 12 * len(tags), struct.pack(">I", len(tags)), b""
    for name, value in tags.items():
        table += name.encode() + struct.pack(">II", at + len(data), len(value))
        data += value + bytes(-len(value) % 4)
    header = struct.pack(">I4sI4s4s4s", at + len(data), bytes(4), 0x04000000, kind, space, connection)
    header += struct.pack(">6H4s4sI", 2020, 1, 1, 0, 0, 0, b"acsp", bytes(4), 0) + bytes(20)
    header += struct.pack(">3i", *_fixed(0.9642, 1.0, 0.8249))
    return header.ljust(128, b"\0") + table + data


def _text(text: str) -> bytes:
    coded = text.encode("utf-16-be")
    return b"mluc" + bytes(4) + struct.pack(">II4sII", 1, 12, b"enUS", len(coded), 28) + coded
