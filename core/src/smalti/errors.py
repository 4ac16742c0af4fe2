"""Errors, and the exit codes of processes.

`UserError` is for everything that the user can fix: it is printed without a traceback, with the fix. Any other exception is a
defect, or a fault of the machine, and is printed with its traceback.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """The exit status of every smalti process, from which a scheduler decides what comes next.

    Each code says what it means, what is saved, and whether to run the same command again: the table of docs/operations.md.
    """

    DONE = 0
    """Complete: the run has reached its last step.
    Saved: yes.
    Again: no; with more steps, to train longer.
    """
    FAILED = 1
    """Failed: an exception in a rank, out of memory, a loss that is NaN or infinite, no room for a checkpoint.
    Saved: up to the last checkpoint.
    Again: no, hold: a retry fails the same way until the cause is fixed.
    """
    USAGE = 2
    """A wrong option, option value or configuration file.
    Saved: nothing changed.
    Again: no, hold: change the command.
    """
    PREFLIGHT = 3
    """A check before the start failed: data, port, devices, disk.
    Saved: nothing changed.
    Again: no, hold: fix what the message names.
    """
    MISSING_PLUGIN = 4
    """A plugin or package is missing, or cannot be imported.
    Saved: nothing changed.
    Again: no, hold: `pip install` what the message names.
    """
    GPU_FAULT = 5
    """An accelerator failed.
    Saved: as far as the state can be trusted, see `FaultAction`.
    Again: yes, on another node.
    """
    PREEMPTED = 6
    """Preempted: SIGTERM, SIGUSR1, SIGUSR2, or the terminal was closed.
    Saved: yes.
    Again: yes: requeue.
    """
    STOPPED = 7
    """Stopped before the last step because somebody asked for it: `smalti run stop`, or a plugin.
    Saved: yes.
    Again: no, not by itself; the same command resumes it.
    """
    CHECKPOINT = 8
    """A checkpoint cannot be used: missing, damaged, or made with another batch size, seed, model or other data.
    Saved: nothing changed.
    Again: no, hold: give back the files or the options, or choose another checkpoint.
    """
    KILLED = 9
    """A process or node of the run was killed, vanished or hung, or there was no time to save.
    Saved: the last step where a healthy rank has the whole state, else up to the last checkpoint.
    Again: yes: requeue, a few times at most; often the system killed it because memory ran out.
    """
    FAULT_LOOP = 10
    """Three starts on this host have ended with the same fault of an accelerator, and none got further.
    Saved: nothing changed.
    Again: no, hold: on another node, or after the repair.
    """
    TAKEN_OVER = 11
    """Another launch has taken over the run directory; this one stopped and wrote nothing more into it.
    Saved: up to the last checkpoint before that.
    Again: no: the other launch continues the run.
    """
    UNAVAILABLE = 75
    """Unavailable for now: another process uses the run directory, or a storage does not answer.
    Saved: up to the last checkpoint; at the start nothing changed.
    Again: yes, later.
    """
    INTERRUPTED = 130
    """Interrupted by Ctrl-C.
    Saved: yes; after a second Ctrl-C up to the last checkpoint.
    Again: no, not by itself; the same command resumes it.
    """


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem in the user's input.

    `where` is a flag, a file with its line, or a dataset id; empty if the message names the place. `fix` is a sentence or a
    command. `package` is set if the only problem is that this package is missing or disabled, and `install` if it is missing:
    what `pip install` takes. `exit_code` is used if there is no other problem. `option` is the option whose value is not valid.
    """

    message: str
    where: str = ""
    fix: str = ""
    package: str = ""
    install: str = ""
    exit_code: ExitCode = ExitCode.USAGE
    option: str = ""

    @classmethod
    def of(cls, error: UserError) -> Problem:
        """The problem of an error, with the notes of the error, such as the plugin that raised it."""
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        return cls(message=f"{error.message}{notes}", fix=error.fix, exit_code=error.exit_code)

    def as_json(self) -> dict[str, str]:
        return {"message": self.message, "fix": self.fix, "where": self.where, "option": self.option}

    @property
    def text(self) -> str:
        """Without the fix."""
        named = self.where.lstrip("-").startswith(self.option)  # then the message need not begin with the name
        message = self.message.removeprefix(f"{self.option} ") if named else self.message
        return f"{self.where}: {message}" if self.where else message

    def __str__(self) -> str:
        return f"{self.text}\n    fix: {self.fix}" if self.fix else self.text


class UserError(Exception):
    """Something that the user can fix. `fix` says how."""

    exit_code = ExitCode.USAGE

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message}\n  fix: {self.fix}" if self.fix else self.message


class ConfigError(UserError):
    """All problems of a configuration at once, so that one round of editing is enough.

    All that needs the same missing package is shown as one problem.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        codes: set[ExitCode] = set()
        shown: dict[Problem | str, Problem] = {}
        for each in self.problems:
            codes.add(code := ExitCode.MISSING_PLUGIN if each.package else each.exit_code)
            same = each.fix if code is ExitCode.MISSING_PLUGIN else each
            text = f"{shown[same].text}\n    {each.text}" if same in shown else each.text
            shown[same] = Problem(message=text, fix=each.fix)
        self.exit_code = codes.pop() if len(codes) == 1 else ExitCode.USAGE
        head = "the configuration has a problem" if len(shown) == 1 else f"the configuration has {len(shown)} problems"
        lines = [f"{head}:", *(f"  - {problem}" for problem in shown.values())]
        packages = sorted({problem.install for problem in self.problems if problem.install})
        if len(packages) > 1:
            lines.append(f"  all packages at once: pip install {' '.join(packages)}")
        super().__init__("\n".join(lines))


def problems_in(error: UserError) -> tuple[Problem, ...]:
    """The problems of an error: one, or all those of a configuration."""
    return error.problems if isinstance(error, ConfigError) else (Problem.of(error),)


class InvalidOptionError(Exception):
    """An option was read whose given value is not valid.

    Raised only while a configuration with problems is checked for more of them.
    """


class PreflightError(UserError):
    """The configuration is well-formed, but the run cannot work with this data or on this machine."""

    exit_code = ExitCode.PREFLIGHT


class MissingPlugin(UserError):  # noqa: N818 - names what is the matter, as UserError says what it is
    """What was asked for lives in a package that is not installed."""

    exit_code = ExitCode.MISSING_PLUGIN


class BrokenPlugin(UserError):  # noqa: N818
    """A plugin that is installed and wanted cannot be loaded."""

    exit_code = ExitCode.MISSING_PLUGIN


class CheckpointError(UserError):
    """A checkpoint cannot be used: missing, incomplete, damaged, or made for another model or batch."""

    exit_code = ExitCode.CHECKPOINT


class InUseError(UserError):
    """Another process uses the run directory now. The same command can succeed later."""

    exit_code = ExitCode.UNAVAILABLE


class TakenOverError(UserError):
    """Another launch owns the run directory now. This one must not write into it."""

    exit_code = ExitCode.TAKEN_OVER


class GpuFaultError(Exception):
    """An accelerator failed and this rank cannot continue. The fault was reported; the process exits with this code."""

    exit_code = ExitCode.GPU_FAULT


def did_you_mean(name: str, known: Iterable[str], *, count: int = 1, cutoff: float = 0.6) -> str:
    """The question of a message whether up to `count` similar names are meant; "" if none is similar enough."""
    from difflib import get_close_matches

    near = get_close_matches(name, list(known), n=count, cutoff=cutoff)
    return f"did you mean {' or '.join(near)}?" if near else ""
