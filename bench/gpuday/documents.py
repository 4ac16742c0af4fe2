"""Puts measured figures into the documents: `python -m gpuday.documents REPORT.json [FILE.md ...]`, by default all of docs/.

A figure that is computed stands between two comments, which nobody sees:

    about <!-- measured:memory_sdxl_lora -->12.7<!-- end --> GiB

and becomes "12.9 (measured: NVIDIA H100, 2026-12-01)" if the report has the key. The keys are the `marks` of `gpuday.table`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpuday.models import ROOT

MARK = re.compile(r"(<!-- measured:(\w+) -->)(.*?)(<!-- end -->)", re.DOTALL)


def replaced(text: str, report: Mapping[str, object]) -> str:
    """The text with the figures of the report in its marks. Marks that the report has no figure for stay as they are."""
    measured, hardware = report["measured"], report["hardware"]
    assert isinstance(measured, dict)
    assert isinstance(hardware, dict)

    def figure(mark: re.Match[str]) -> str:
        if mark[2] not in measured:
            return mark[0]
        value = measured[mark[2]]
        number = f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
        return f"{mark[1]}{number} (measured: {hardware['device']}, {report['date']}){mark[4]}"

    return MARK.sub(figure, text)


def main(words: Sequence[str]) -> None:
    """Print the files that have changed. Raises SystemExit for a rehearsal, whose figures say nothing."""
    report = json.loads(Path(words[0]).read_text())
    if report["rehearsed"]:
        raise SystemExit(f"{words[0]} is of a rehearsal: its figures do not belong into documents")
    for path in [Path(word) for word in words[1:]] or sorted((ROOT / "docs").rglob("*.md")):
        text = path.read_text()
        if (new := replaced(text, report)) != text:
            path.write_text(new)
            print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
