"""Events: what is written is read back, whatever a crash or a full disk did in between."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from smalti.rundir.events import MALFORMED, EventWriter, complete_size, read_events, read_events_backwards

_numbers = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
_fields = st.dictionaries(
    st.text(st.characters(codec="ascii", categories=["Ll"]), min_size=2, max_size=5).filter(
        lambda name: name not in ("step", "type")
    ),
    _numbers | st.lists(_numbers, max_size=3),
    max_size=3,
)


def _write(path: Path, *fields: Mapping[str, object]) -> None:
    writer = EventWriter(path)
    for number, values in enumerate(fields):
        writer.append("metric", step=number, **values)
    writer.close()


def test_an_event_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    _write(tmp_path / "e", {"loss": 0.25, "path": Path("a/b"), "plugins": ("x", "y"), "nested": {"a": [1, None]}})
    (event,) = read_events(tmp_path / "e")
    assert (event.kind, event.step, event.fields) == (
        "metric",
        0,
        {"loss": 0.25, "path": "a/b", "plugins": ["x", "y"], "nested": {"a": [1, None]}},
    )


@pytest.mark.parametrize(("value", "text"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")])
def test_numbers_that_json_lacks_are_strings_in_the_file_and_numbers_to_the_reader(
    tmp_path: Path, value: float, text: str
) -> None:
    _write(tmp_path / "e", {"loss": value})
    (event,) = read_events(tmp_path / "e")
    assert event.fields["loss"] == text
    assert repr(event.number("loss")) == repr(value)


def test_a_field_cannot_take_the_place_of_the_time(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "e")
    with pytest.raises(ValueError, match=r"reserved fields of an event: t$"):
        writer.append("metric", t=1)
    writer.close()


def test_what_json_cannot_hold_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "e")
    with pytest.raises(TypeError, match="cannot hold a bytes"):
        writer.append("metric", value=b"raw")
    writer.close()
    assert (tmp_path / "e").read_bytes() == b""


def test_a_line_without_its_newline_is_not_read_yet(tmp_path: Path) -> None:
    _write(tmp_path / "e", {}, {})
    whole = (tmp_path / "e").read_bytes()
    (tmp_path / "e").write_bytes(whole[:-1])
    assert [event.step for event in read_events(tmp_path / "e")] == [0]


def test_lines_that_are_no_events_are_reported_and_the_rest_is_read(tmp_path: Path) -> None:
    _write(tmp_path / "e", {})
    with (tmp_path / "e").open("ab") as file:
        file.write(b'\xff\x00{\n[1]\n{"type": "step"}\n{"type": "step", "t": 1, "step": "x"}\n' + b"[" * 100_000 + b"\n")
    _write(tmp_path / "e", {})
    kinds = [event.kind for event in read_events(tmp_path / "e")]
    assert kinds == ["metric", *[MALFORMED] * 5, "metric"]


def test_a_file_that_is_not_there_has_no_events(tmp_path: Path) -> None:
    assert [*read_events(tmp_path / "e"), *read_events_backwards(tmp_path / "e")] == []


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fields=st.lists(_fields, min_size=1, max_size=6), place=st.floats(0, 1))
def test_after_a_cut_at_any_byte_only_the_torn_line_is_lost(
    tmp_path_factory: pytest.TempPathFactory, fields: list[dict[str, object]], place: float
) -> None:
    path = tmp_path_factory.mktemp("events") / "e"
    _write(path, *fields)
    content = path.read_bytes()
    path.write_bytes(content[: round(place * len(content))])
    survivors = list(read_events(path))
    _write(path, {"last": True})
    read = [event for event in read_events(path) if event.kind != MALFORMED]
    # A cut right before a newline tears nothing: the line is whole once the next one begins.
    assert [event.step for event in read] in (
        [*(event.step for event in survivors), 0],
        [*range(len(survivors) + 1), 0],
    )
    assert len(list(read_events(path))) - len(survivors) <= 2


@given(content=st.binary(max_size=60) | st.text('{}\n"ab:1', max_size=60).map(str.encode), block=st.integers(1, 70))
def test_reading_backwards_gives_the_same_events_as_reading_forwards(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, block: int
) -> None:
    path = tmp_path_factory.mktemp("events") / "e"
    path.write_bytes(content)
    assert list(read_events_backwards(path, block))[::-1] == list(read_events(path))


@given(count=st.integers(1, 6), data=st.data())
def test_a_reader_that_goes_on_from_an_end_misses_and_repeats_nothing(
    tmp_path_factory: pytest.TempPathFactory, count: int, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("events") / "e"
    _write(path, *[{"text": "ü" * number} for number in range(count)])
    events = list(read_events(path))
    seen = data.draw(st.integers(1, count))
    assert list(read_events(path, events[seen - 1].end)) == events[seen:]


def test_from_the_complete_size_on_there_is_only_what_comes_later(tmp_path: Path) -> None:
    _write(tmp_path / "e", {}, {})
    offset = complete_size(tmp_path / "e")
    _write(tmp_path / "e", {"new": 1})
    assert [event.fields for event in read_events(tmp_path / "e", offset)] == [{"new": 1}]


def test_a_surrogate_from_an_odd_file_name_can_be_written(tmp_path: Path) -> None:
    _write(tmp_path / "e", {"path": "caf\udce9.png"})
    (event,) = read_events(tmp_path / "e")
    assert event.text("path") == "caf\udce9.png"


def test_a_full_disk_does_not_stop_the_run(caplog: pytest.LogCaptureFixture) -> None:
    writer = EventWriter(Path("/dev/full"))
    writer.append("metric", step=1)
    writer.append("metric", step=2)
    writer.close()
    assert caplog.messages == ["/dev/full: No space left on device; the run continues, but events are lost"]


def test_events_lost_on_a_full_disk_are_counted_once_there_is_room(tmp_path: Path) -> None:
    script = """
import resource, sys
from pathlib import Path
from smalti.rundir.events import EventWriter
writer = EventWriter(Path(sys.argv[1]))
writer.append("metric", step=1)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (80, hard))
for step in (2, 3, 4):
    writer.append("metric", step=step)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
writer.append("metric", step=5)
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "e")], check=True, capture_output=True)
    events = [event for event in read_events(tmp_path / "e") if event.kind != MALFORMED]
    assert [(event.step, event.text("message")) for event in events] == [
        (1, ""),
        (5, ""),
        (5, "3 events before this were lost"),
    ]


def test_each_event_is_one_object_on_one_line_with_type_time_and_step(tmp_path: Path) -> None:
    _write(tmp_path / "e", {"text": "two\nlines"})
    (line,) = (tmp_path / "e").read_text().splitlines()
    assert list(json.loads(line)) == ["type", "t", "step", "text"]


def test_a_long_line_is_read_backwards_in_few_pieces(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    _write(path, {"text": "x" * 2_000_000}, {"text": "short"})
    before = psutil.Process().io_counters().read_count
    numbers = [event.step for event in read_events_backwards(path, block=64)]
    assert numbers == [1, 0]
    assert psutil.Process().io_counters().read_count - before < 100
