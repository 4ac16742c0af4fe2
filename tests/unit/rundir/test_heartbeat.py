"""A heartbeat is judged by its changes, whatever the clocks of its writer, of the file server and of the watcher."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import given, settings, strategies as st

from smalti.rundir.heartbeat import STALE_SECONDS, Heartbeat, HeartbeatWatch

SKEW = st.floats(-1e9, 1e9) | st.sampled_from([-600.0, -30.0, 0.0, 30.0, 600.0])


class Clocks:
    """The watcher's wall clock, ahead by `skew`, and its monotonic one."""

    def __init__(self, skew: float) -> None:
        self.now = 0.0
        self.skew = skew

    def monotonic(self) -> float:
        return 5e4 + self.now

    def time(self) -> float:
        return 1.7e9 + self.now + self.skew


@settings(deadline=None, max_examples=150)
@given(
    skew=SKEW,
    ahead=SKEW,
    beats=st.lists(st.floats(0.5, STALE_SECONDS - 1), min_size=1, max_size=12),
    looks=st.lists(st.floats(0.1, 60), min_size=1, max_size=30),
    pauses=st.lists(st.floats(0, 300), min_size=30, max_size=30),
)
def test_a_live_run_is_never_taken_for_dead_and_a_dead_one_is_found(
    skew: float, ahead: float, beats: list[float], looks: list[float], pauses: list[float]
) -> None:
    """`beats` are between two signs of life, then it is dead; `pauses` stop the watcher between a look and its clock."""
    clocks, signs = Clocks(skew), [0.0]
    for seconds in beats:
        signs.append(signs[-1] + seconds)
    dead = signs[-1] + STALE_SECONDS - 1

    def read() -> Heartbeat:
        last = max(sign for sign in signs if sign <= clocks.now)
        return Heartbeat(process=None, started=1.0, touched=1.7e9 + last + ahead)

    with patch("smalti.rundir.heartbeat.time", clocks):
        watch = HeartbeatWatch()
        for seconds, pause in zip(looks, pauses, strict=False):
            clocks.now += seconds

            def read_and_pause(pause: float = pause) -> Heartbeat:
                heartbeat = read()
                clocks.now += pause
                return heartbeat

            begun = clocks.now
            watch.look(read_and_pause)
            if watch.silence > STALE_SECONDS:
                assert begun >= dead, "it was alive when it was looked at"
        clocks.now = max(clocks.now, dead)
        watch.look(read)
        clocks.now += STALE_SECONDS + 0.5
        watch.look(read)
        assert watch.silence > STALE_SECONDS
        assert watch.stale
