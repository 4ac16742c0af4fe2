"""The name of this node, its clock and its encoding."""

from __future__ import annotations

import locale
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator

from smalti import Finding, FindingLevel
from smalti_doctor.report import Section
from smalti_doctor.time_limits import run_within

_SECONDS = 10.0


def host(*, several_nodes: bool = False) -> Section:
    """`several_nodes`: the run has several, so that they must find each other and agree on the time."""
    name = socket.gethostname()
    addresses, problem = resolved(name)
    synchronised = clock_synchronised()
    facts = {
        "name": name,
        "addresses": addresses,
        "clock_synchronised": synchronised,
        "encoding": sys.getfilesystemencoding(),
        "locale": locale.setlocale(locale.LC_CTYPE),
    }
    level: FindingLevel = "warning" if several_nodes else "note"
    findings = [*_of_name(name, addresses, problem, level), *_of_clock(synchronised, level), *_of_encoding()]
    return Section(name="host", facts=facts, findings=findings)


def resolved(name: str) -> tuple[list[str], str]:
    """The addresses of a name, and why there are none."""
    found = run_within({name: (lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM), _SECONDS)})[name]
    if isinstance(found, TimeoutError):
        return [], f"the name server does not answer within {_SECONDS:g} s"
    if isinstance(found, Exception):
        return [], getattr(found, "strerror", None) or str(found)
    return sorted({str(entry[4][0]) for entry in found}), ""


def clock_synchronised() -> bool | None:
    """Whether the clock follows others over the network (NTP); None if nothing on this node knows."""
    if tool := shutil.which("chronyc"):
        said = _output(tool, "-n", "tracking")
        if "Leap status" in said:
            return "Not synchronised" not in said
    if tool := shutil.which("timedatectl"):
        return {"yes": True, "no": False}.get(_output(tool, "show", "--property=NTPSynchronized", "--value").strip())
    return None


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _of_name(name: str, addresses: list[str], problem: str, level: FindingLevel) -> Iterator[Finding]:
    fix = f"add a line with the address of this node and {name} to /etc/hosts; one node alone needs none"
    if not addresses:
        yield Finding(check="host name", level=level, message=f"{name} cannot be resolved: {problem}", fix=fix)
    elif all(address.startswith("127.") or address == "::1" for address in addresses):
        message = f"{name} resolves to {', '.join(addresses)}, which other nodes cannot reach"
        yield Finding(check="host name", level=level, message=message, fix=fix)
    else:
        yield Finding(check="host name", level="ok", message=f"{name} resolves to {', '.join(addresses)}")


def _of_clock(synchronised: bool | None, level: FindingLevel) -> Iterator[Finding]:
    if synchronised is None:
        yield Finding(
            check="clock", level="note", message="unknown whether it is synchronised: no chronyc or timedatectl answers"
        )
    elif synchronised:
        yield Finding(check="clock", level="ok", message="synchronised over the network")
    else:
        message = "the clock is not synchronised: times of nodes and servers differ, and S3 refuses requests from 15 minutes on"
        yield Finding(check="clock", level=level, message=message, fix="timedatectl set-ntp true, or start chrony")


def _of_encoding() -> Iterator[Finding]:
    encodings = {"file names": sys.getfilesystemencoding(), "files": locale.getencoding()}
    wrong = {what: name for what, name in encodings.items() if name.lower().replace("-", "") != "utf8"}
    if wrong:
        named = ", ".join(f"{name} for {what}" for what, name in wrong.items())
        message = f"the encoding is {named}: captions and names with other letters are damaged"
        yield Finding(check="encoding", level="warning", message=message, fix="export LANG=C.UTF-8 PYTHONUTF8=1")
    else:
        yield Finding(check="encoding", level="ok", message="UTF-8")
