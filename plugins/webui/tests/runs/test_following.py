"""Events are followed by offsets: every complete line once, in the order of time, whatever a crash has left."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from hypothesis import given, strategies as st

from smalti.rundir import RunDirectory
from smalti_webui.runs.following import Follower, Position, backwards, time_of


def line(time: float, **fields: object) -> bytes:
    return json.dumps({"type": "log", "t": time, "step": None, **fields}).encode() + b"\n"


def numbers(lines: list[bytes]) -> list[object]:
    return [json.loads(each).get("n") for each in lines]


def read_all(follower: Follower, chunk: int) -> list[bytes]:
    lines: list[bytes] = []
    while True:
        batch = follower.read(chunk)
        lines += batch.lines
        if not batch.more:
            return lines


def test_an_incomplete_line_waits_for_its_end(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    follower = Follower(run)
    assert follower.read().lines == []
    whole = line(1, n=1)
    run.events_file.write_bytes(whole + b'{"type":"lo')
    assert numbers(follower.read().lines) == [1]
    assert follower.position.offset == len(whole)
    assert follower.read().lines == []
    run.events_file.write_bytes(whole + line(2, n=2))
    assert numbers(follower.read().lines) == [2]


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 18])
def test_every_line_comes_once_however_little_is_read(tmp_path: Path, chunk: int) -> None:
    run = RunDirectory(tmp_path)
    run.events_file.write_bytes(b"".join(line(n, n=n, text="x" * (n % 40)) + b"\n" * (n % 3) for n in range(60)))
    assert numbers(read_all(Follower(run), chunk)) == list(range(60))


def test_reading_continues_at_any_position(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    times = {0: range(0, 60, 2), 1: range(1, 60, 3), 2: [5, 5, 50]}
    for node, each in times.items():
        path = run.node_events_file(node) if node else run.events_file
        path.write_bytes(b"".join(line(t, n=t, of=node) for t in each))
    expected = sorted(t for each in times.values() for t in each)
    for chunk in (40, 150, 1 << 18):
        follower, found = Follower(run), []
        while True:
            batch = follower.read(chunk)
            found += numbers(batch.lines)
            position = Position.parse(str(batch.position))
            assert position is not None
            follower = Follower(run, position)  # another connection
            if not batch.more:
                break
        assert found == expected


def test_lines_of_other_nodes_say_so(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.events_file.write_bytes(line(1))
    run.node_events_file(3).write_bytes(line(2) + line(3, node=3) + b"damaged\n")
    found = Follower(run).read().lines
    assert [each.count(b'"node"') for each in found] == [0, 1, 1, 0]
    assert json.loads(found[1])["node"] == 3


def test_a_file_that_was_replaced_is_read_from_its_beginning(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.events_file.write_bytes(line(1, n=1) + line(2, n=2))
    follower = Follower(run)
    follower.read()
    run.events_file.write_bytes(line(3, n=3))
    assert follower.read().replaced
    assert numbers(follower.read().lines) == [3]


@pytest.mark.parametrize("text", ["", "-1", "1.5", "12+", "12+1", "12+1=2+", "../x", "9" * 40, "1\n"])
def test_what_is_not_a_position_is_refused(text: str) -> None:
    assert Position.parse(text) is None


@given(st.integers(0, 10**15), st.dictionaries(st.integers(1, 999), st.integers(0, 10**15)))
def test_positions_survive_as_text(offset: int, nodes: dict[int, int]) -> None:
    position = Position(offset=offset, nodes=nodes)
    assert Position.parse(str(position)) == position


@given(st.lists(st.binary(max_size=12).filter(lambda part: b"\n" not in part)), st.booleans(), st.integers(1, 30))
def test_backwards_is_the_same_in_reverse(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], torn: bool, block: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "backwards"
    data = b"".join(part + b"\n" for part in parts) + (b"torn" if torn else b"")
    path.write_bytes(data)
    found = list(backwards(path, block=block))
    assert [text for _, text in found] == [part for part in parts if part][::-1]
    assert all(data[offset : offset + len(text) + 1] == text + b"\n" for offset, text in found)


def test_a_long_line_is_read_backwards_in_few_pieces(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(line(0, n=0, text="x" * 2_000_000) + line(1, n=1))
    before = psutil.Process().io_counters().read_count
    assert numbers([each for _, each in backwards(path, block=64)]) == [1, 0]
    assert psutil.Process().io_counters().read_count - before < 100


def test_a_time_that_no_number_can_hold_is_none():
    assert (time_of(b'{"t": 1' + b"0" * 400 + b"}"), time_of(b'{"t": 2.5}')) == (0, 2.5)
