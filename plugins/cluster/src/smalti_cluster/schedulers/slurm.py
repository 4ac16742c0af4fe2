"""What SLURM's commands say of a job and of this node."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Mapping

_SECONDS = 20.0
"""The commands wait for the controller for longer than this if it does not answer."""
_LEAVING = ("DRAIN", "DRAINING", "DRAINED", "FAIL", "FAILING")
"""States of a node on which no new job starts. SLURM does not notify a job that runs there."""
_DOWN = ("DOWN", "ERROR", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN", "REBOOT_ISSUED")
_TIME = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")


def seconds_left(environment: Mapping[str, str]) -> float | None:
    """Seconds to the time limit of this job; None without a limit, outside of a job, and if SLURM does not answer."""
    job = environment.get("SLURM_JOB_ID", "")
    text = _output("squeue", "--noheader", f"--jobs={job}", "--format=%L") if job else None
    return read_time(text) if text else None


def read_time(text: str) -> float | None:
    """Seconds in a time as SLURM writes it: "1-02:30:00", "02:30:00" or "30:00". None for "UNLIMITED" and the like."""
    if (found := _TIME.fullmatch(text.strip())) is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24.0 + hours) * 60 + minutes) * 60 + seconds


def node_is_leaving(environment: Mapping[str, str]) -> str:
    """The state of this node, with SLURM's reason, if it is drained or failing; "" if not, and if SLURM does not answer."""
    name = environment.get("SLURMD_NODENAME", "")
    text = _output("scontrol", "--oneliner", "show", "node", name) if name else None
    state = re.search(r"\bState=(\S+)", text or "")
    if state is None or not _is_in(state[1], _LEAVING):
        return ""
    reason = re.search(r"\bReason=(.*?)(?: \[\S+@\S+\])?$", text or "", re.MULTILINE)
    return f"{state[1]}: {reason[1].strip()}" if reason else state[1]


def unusable_nodes(names: Collection[str]) -> set[str]:
    """Those of these nodes that are down, drained or failing; none if SLURM does not answer."""
    text = _output("scontrol", "--oneliner", "show", "node", ",".join(names)) if names else None
    found = re.findall(r"^NodeName=(\S+) .*?\bState=(\S+)", text or "", re.MULTILINE)
    return {name for name, state in found if _is_in(state, (*_LEAVING, *_DOWN))}


def _is_in(state: str, states: Collection[str]) -> bool:
    """Whether a state such as "MIXED+DRAIN" or "DOWN*" has one of these parts."""
    return any(part in states for part in re.split(r"[+*~#$@^%!-]", state))


def _output(*command: str) -> str | None:
    """What a command prints; None if it is missing, fails or does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
