"""Which signals ask for something, and which only repeat what was asked."""

import signal
import subprocess
import sys

import pytest

from smalti.errors import ExitCode
from smalti.system.signals import REPEAT_SECONDS, SignalFilter, immediate_exit_code

INT, TERM, HUP, USR1, USR2 = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
LATE = REPEAT_SECONDS + 1


@pytest.mark.parametrize(
    ("came", "counted"),
    [
        ([(TERM, 0), (TERM, 1), (TERM, REPEAT_SECONDS), (TERM, LATE)], [True, False, False, True]),
        ([(TERM, 0), (INT, 0)], [True, True]),
        ([(INT, 0), (INT, 0)], [True, True]),
        ([(INT, 0), (TERM, LATE), (TERM, LATE + 1), (TERM, 2 * LATE + 1)], [True, False, False, True]),
        ([(USR1, 0), (TERM, 300), (TERM, 301)], [True, False, False]),
        ([(HUP, 0), (HUP, LATE), (USR1, LATE), (USR2, 300)], [True, False, False, False]),
    ],
)
def test_ctrl_c_counts_always_and_sigterm_again_only_when_it_comes_late(came, counted):
    now = [0.0]
    signal_filter = SignalFilter(clock=lambda: now[0])
    answers = []
    for number, moment in came:
        now[0] = moment
        answers.append(signal_filter.accepts(number))
    assert answers == counted


def test_what_is_ended_before_it_has_saved_has_another_code_than_what_has_saved():
    assert [immediate_exit_code(number) for number in (INT, TERM)] == [ExitCode.INTERRUPTED, ExitCode.KILLED]


SIGNALLED = """
import os, signal, sys, time
from smalti.system.signals import Terminated, preemption_signals, preemption_as_exception
if "ignored" in sys.argv:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
try:
    with preemption_as_exception():
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
            print("trained")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            print("closed")
except Terminated:
    print("terminated")
"""


@pytest.mark.parametrize(("words", "told"), [([], ["closed", "terminated"]), (["ignored"], ["trained", "terminated"])])
def test_a_second_signal_does_not_cut_off_what_is_closed_because_of_the_first(words, told):
    done = subprocess.run([sys.executable, "-c", SIGNALLED, *words], capture_output=True, text=True, check=True)
    assert done.stdout.split() == told
