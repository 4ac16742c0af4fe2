"""A zip file about this node and a run, to be sent with a question. Every text in it is masked."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from smalti import UserError
from smalti.rundir import RunDirectory
from smalti.system import load_json
from smalti_doctor.masking import Mask
from smalti_doctor.report import Report

_TAIL = 1 << 20
"""Of each file, at most this number of bytes from the end."""
_OF_RUN = (
    "run.json",
    "config.toml",
    "launch.json",
    "accelerate.yaml",
    "*.next.*",
    "circuit.*.json",
    "nodes/*.json",
    "heartbeat",
)
_ENDS_OF_RUN = ("events*.jsonl", "health*.jsonl", "hangs/*")
_MOST = 100
"""Files of one kind: those of a run on hundreds of nodes would be too many."""


def write_bundle(target: Path, report: Report, mask: Mask, *, config: str = "", run: RunDirectory | None = None) -> list[str]:
    """Write the zip file, which must not exist, and return the names of the files in it.

    `config` is the text of a configuration. The files are doctor.json, packages.txt, config.toml; of a run directory what says
    how it was launched, and the last MiB of each file of events, health and hangs. Images, weights and data are never in it.
    Raises UserError.
    """
    members = dict(_members(report, mask, config, run))
    try:
        with target.open("xb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in members.items():
                archive.writestr(name, text)
    except FileExistsError:
        raise UserError(f"{target} already exists", fix="give --bundle another name") from None
    except OSError as error:
        message = f"cannot write {target}: {error.strerror or error}"
        raise UserError(message, fix="give --bundle a name in a folder that is writable") from error
    return list(members)


def _members(report: Report, mask: Mask, config: str, run: RunDirectory | None) -> Iterator[tuple[str, str]]:
    yield "doctor.json", _as_json(report.as_json(), mask)
    packages = next((each.facts["packages"] for each in report.sections if "packages" in each.facts), {})
    assert isinstance(packages, dict)
    yield "packages.txt", mask.text("".join(f"{name}=={version}\n" for name, version in packages.items()))
    if config:
        yield "config.toml", mask.text(config)
    for path in _files(run) if run is not None else ():
        with suppress(OSError):  # removed in the meantime, or not readable by this user
            name = path.relative_to(run.path) if run is not None else path
            yield f"run/{mask.text(str(name))}", _content(path, mask)


def _files(run: RunDirectory) -> Iterator[Path]:
    for pattern in (*_OF_RUN, *_ENDS_OF_RUN):
        yield from [path for path in sorted(run.path.glob(pattern)) if path.is_file()][-_MOST:]


def _content(path: Path, mask: Mask) -> str:
    """The end of a file. Lines of JSON are masked by their keys too; a first line that is cut off is left out."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - _TAIL))
        text = file.read(_TAIL).decode(errors="replace")
    if size > _TAIL:
        text = text.partition("\n")[2]
    if path.suffix == ".jsonl":
        return "\n".join(_line(line, mask) for line in text.split("\n"))  # splitlines would split within strings
    if path.suffix == ".json" or path.name == "heartbeat":
        with suppress(ValueError):
            return _as_json(load_json(text), mask)
    return mask.text(text)


def _line(line: str, mask: Mask) -> str:
    with suppress(ValueError):
        return json.dumps(mask.value(load_json(line)), ensure_ascii=False)
    return mask.text(line)


def _as_json(value: object, mask: Mask) -> str:
    return json.dumps(mask.value(value), indent=2, ensure_ascii=False) + "\n"
