"""What a check is: the work that is measured, and the bounds that its figures have to keep. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Figures = Mapping[str, float | None]
SLACK = 6.0
"""In a rehearsal, whose models are tiny, a ratio of times may be so much worse."""
TINY_SECONDS = 2.0
"""In a rehearsal, the most that any step may take."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What a figure has to be. With `device`, only devices with this word in their name are held to it.

    `unit` "times" is a ratio of two times, "s" are seconds, "share" is one of a device's peak. A rehearsal, whose models are
    tiny and whose device is the CPU, takes times less exactly, and shares and speeds not at all.
    """

    figure: str
    most: float | None = None
    least: float | None = None
    unit: Literal["", "times", "s", "MiB", "GB/s", "share"] = ""
    device: str = ""

    def __str__(self) -> str:
        limits = [f"at least {self.least:g}"] if self.least is not None else []
        limits += [f"at most {self.most:g}"] if self.most is not None else []
        unit = f" {self.unit}" if self.unit in ("s", "MiB", "GB/s") else ""
        return f"{self.figure} {' and '.join(limits)}{unit}{f' ({self.device})' if self.device else ''}"

    def problem(self, figures: Figures, *, device: str, rehearsed: bool) -> str | None:
        """Why the figure does not keep the bound; None if it does, or need not here."""
        if self.device not in device and not rehearsed:
            return None
        if rehearsed and self.unit == "share":
            return None
        found = figures.get(self.figure)
        if found is None or math.isnan(found):
            return f"{self.figure} was not measured"
        most, least = self.most, self.least
        if rehearsed and self.unit == "times":
            most, least = most and most * SLACK, least and least / SLACK
        elif rehearsed and self.unit == "s":
            most = TINY_SECONDS
        elif rehearsed and self.unit == "GB/s":
            least = None
        if most is not None and found > most:
            return f"{self.figure} is {found:.6g}, and may be {most:g} at most"
        if least is not None and found < least:
            return f"{self.figure} is {found:.6g}, and must be {least:g} at least"
        return None


@dataclass(frozen=True, kw_only=True)
class Work:
    """Some steps of smalti: a model, the options of `smalti train`, and the ranks.

    `model` is "toy", or a family of smalti-diffusers: a tiny one, or with `published` one of published size without weights. In
    a rehearsal all are tiny. `on_cpu`: on the CPU, to compare with. `nodes`: of a cluster, 0 for this one.
    """

    model: str = "toy"
    words: Sequence[str] = ()
    edge: int = 64
    batch: int = 1
    ranks: int = 1
    nodes: int = 0
    published: bool = False
    on_cpu: bool = False


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row of the table.

    `measure` names the function of `gpuday.measures` that makes the figures. `minutes` are expected on an H100. Needs: `gpus`,
    `memory` of each in GiB, a Python `package`, and `nodes` of a cluster; with `only_cuda` it cannot be rehearsed. `reference`
    is what the work is compared with; `plan` compares its memory with what `smalti plan` says, `bare` its steps with the loop
    of diffusers' example. `marks` are the figures that documents quote, by the key of the mark (`gpuday.documents`).
    """

    name: str
    what: str
    minutes: float
    bounds: Sequence[Bound]
    measure: str = "steps"
    gpus: int = 1
    memory: float = 0
    package: str = ""
    nodes: int = 0
    only_cuda: bool = False
    work: Work | None = None
    reference: Work | None = None
    plan: bool = False
    bare: bool = False
    marks: Mapping[str, str] | None = None

    @property
    def needs(self) -> str:
        words = [f"{self.nodes} nodes"] if self.nodes else []
        words += [f"{self.gpus} GPU{'s' * (self.gpus > 1)}"]
        words += [f"{self.memory:g} GiB"] if self.memory else []
        return ", ".join([*words, *([self.package] if self.package else [])])

    def problems(self, figures: Figures, *, device: str, rehearsed: bool) -> list[str]:
        found = (bound.problem(figures, device=device, rehearsed=rehearsed) for bound in self.bounds)
        return [each for each in found if each is not None]
