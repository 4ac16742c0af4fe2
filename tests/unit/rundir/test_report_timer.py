"""Reports of something that takes long are due first after one time, then after another."""

import time

import pytest

from smalti.rundir import ReportTimer


def test_a_report_is_due_once_after_each_interval():
    timer = ReportTimer(0.05)
    assert not timer.due()
    time.sleep(0.06)
    assert timer.due()
    assert not timer.due()
    time.sleep(0.06)
    assert timer.due()


def test_the_first_report_may_be_due_at_another_time():
    timer = ReportTimer(60, first=0)
    assert timer.due()
    assert not timer.due()


def test_the_rest_takes_as_long_as_what_is_done():
    timer = ReportTimer()
    time.sleep(0.05)
    before = timer.elapsed
    left = timer.left(1, 4)
    assert 3 * before <= left <= 3 * timer.elapsed
    assert timer.left(4, 4) == pytest.approx(0)
