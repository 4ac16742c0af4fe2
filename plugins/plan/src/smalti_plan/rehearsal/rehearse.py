"""Rehearse a configuration: in a process of its own, and once, for the answer is kept. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from smalti import UserError
from smalti.config import Config
from smalti.parallel import DeviceModel
from smalti.plugins import CacheFile, Plugins
from smalti.system import load_json, read_regular
from smalti_plan.records import Candidate, Rehearsal
from smalti_plan.rehearsal.request import Request, values_for

CACHE = "rehearsals"
_SHOWN = 2000
_LIMIT = 1800.0
"""Seconds; a model of 12 billion parameters takes 30 of CPU."""


def cache() -> CacheFile:
    """Of rehearsals, by configuration and versions."""
    return CacheFile(CACHE)


def rehearse(
    config: Config,
    plugins: Plugins,
    device: DeviceModel,
    candidate: Candidate,
    *,
    ranks: int = 1,
    rank: int = 0,
    local: int = 8,
    size: tuple[int, int] | None = None,
    extension: bool = True,
    cached: bool = True,
) -> Rehearsal:
    """What one of `ranks` ranks needs to train this configuration in this way. Takes seconds to minutes, and no device.

    `local` ranks are on each node. `size` is that of the largest images in pixels; None takes what the datasets say.
    An error of the run is a part of the answer, and such an answer is not kept. Raises UserError if there is no answer: the
    process has crashed, was killed or hangs.
    """
    width, height = size or (0, 0)
    request = Request(
        values=values_for(config, device.kind),
        accelerate=config.accelerate,
        candidate=candidate,
        device=device.title or device.name,
        kind=device.kind,
        memory=device.memory,
        ranks=ranks,
        rank=rank,
        local=min(local, ranks),
        width=width,
        height=height,
        extension=extension,
    )
    store, key = cache(), _key(request, config, plugins)
    if cached and isinstance(known := store.get(key), dict):
        try:
            return Rehearsal.from_json(known)
        except (TypeError, KeyError):
            pass  # of a version with other fields
    result = _in_process(request, config)
    if cached and result.error is None:
        store.put(key, result.as_json())
    return result


def _key(request: Request, config: Config, plugins: Plugins) -> str:
    """Changes with the configuration, the datasets, what was asked for, and the versions of everything that computes."""
    from smalti_plan.largest_bucket import buckets_key  # needs numpy, which a launch without a forecast does not import

    versions = (*plugins.versions, f"torch {version('torch')}", f"python {sys.version.split()[0]}")
    own = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(__file__).parent.rglob("*.py"))]
    parts = [request.as_json(), versions, own, model_files(request.values), buckets_key(config, plugins)]
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def model_files(values: Mapping[str, object]) -> list[str]:
    """Digests of the configurations of a local model: another model under the same name is counted anew."""
    start = values.get("pretrained_model_name_or_path")
    folder = Path(str(start)).expanduser()
    if not start or not folder.is_dir():
        return []
    return [
        hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.json"))
        if path.stat().st_size < 1 << 20
    ]


def _in_process(request: Request, config: Config) -> Rehearsal:
    """Raises UserError with the last line of what the process has written, then all of it."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}  # only the devices that are not there
    accelerator = {"DS_ACCELERATOR": "cuda" if request.kind == "cuda" else "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        asked, answer, errors = (Path(folder, name) for name in ("request.json", "result.json", "errors"))
        asked.write_text(json.dumps(request.as_json()), encoding="utf-8")
        command = [sys.executable, "-m", "smalti_plan.rehearsal.child", str(asked), str(answer)]
        environment = {**os.environ, **config.secrets(), **hidden, **accelerator}
        with errors.open("w") as output:
            try:
                status = subprocess.run(command, env=environment, stdout=output, stderr=output, timeout=_LIMIT).returncode
                reason = f"ended with signal {-status}" if status < 0 else f"ended with exit status {status}"
            except subprocess.TimeoutExpired:
                reason = f"was ended after {_LIMIT:.0f} s"
        if not answer.exists():
            text = errors.read_text(encoding="utf-8", errors="replace").strip()[-_SHOWN:]
            last = text.rpartition("\n")[2] or "it has written nothing"
            raise UserError(f"the process of the rehearsal {reason}: {last}\n{text}", fix="free memory, or report this")
        return Rehearsal.from_json(load_json(read_regular(answer)))
