"""GPUs for `smalti doctor`: the driver, and each GPU by the rules that also stop a run."""

from __future__ import annotations

from smalti import Finding, UserError
from smalti_health.cli.now import GpuNow, read_now
from smalti_health.policy.decisions import Action
from smalti_health.policy.limits import Limits

_CHECK = "GPU health"


def gpu_findings() -> list[Finding]:
    """One for each GPU; a note if no driver can be read, because a machine without GPUs has none."""
    try:
        gpus = read_now(Limits())
    except UserError as error:
        if "not answered" in error.message:
            return [Finding(check=_CHECK, level="error", message=error.message, fix=error.fix)]
        return [Finding(check=_CHECK, level="note", message=error.message)]
    return [finding for gpu in gpus for finding in _findings(gpu)]


def _findings(gpu: GpuNow) -> list[Finding]:
    name = f"GPU {gpu.device.index} ({gpu.device.name or gpu.device.uuid})"
    if not gpu.decisions:
        ecc = gpu.reading.ecc_uncorrected
        errors = "does not report ECC errors" if ecc is None else f"{ecc} uncorrected ECC errors since the driver was loaded"
        return [Finding(check=_CHECK, level="ok", message=f"{name}: no fault; {errors}")]
    return [
        Finding(
            check=_CHECK,
            level="error" if each.action > Action.WARN else "warning",
            message=f"{name}: {each.message}",
            fix="reset the GPU, or leave it out with CUDA_VISIBLE_DEVICES; see docs/health.md",
        )
        for each in gpu.decisions
    ]
