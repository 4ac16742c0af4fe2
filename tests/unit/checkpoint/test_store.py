import contextlib
import fcntl
import hashlib
import json
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from smalti.checkpoint.format.manifest import SUSPECT
from smalti.checkpoint.format.safetensors_layout import Chunk, encode_header, read_layout, stored_tensors
from smalti.checkpoint.format.state_file import State
from smalti.checkpoint.format.store import RANKING, CheckpointStore
from smalti.checkpoint.format.verification import verify
from smalti.errors import CheckpointError
from support.checkpoints import DAMAGE, flip, flipped_bit, make, missing_file, no_manifest, remake_manifest

OTHER = State(step=1, trainer={"other": 1}).encode()


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_is_named_and_the_one_before_is_taken(tmp_path, damage):
    root, told = tmp_path / "checkpoints", []
    good, bad = make(root, 1), make(root, 2)
    damage(bad)
    assert CheckpointStore(root, report=told.append).latest() == good
    assert len(told) == 1
    assert told[0].startswith("skipped step-00000002: ")
    assert DAMAGE[damage] in told[0]


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_single_flipped_bit_is_found(one_checkpoint, data):
    files = sorted(path for path in one_checkpoint.rglob("*") if path.is_file())
    path = data.draw(st.sampled_from(files))
    before = path.read_bytes()
    position, bit = data.draw(st.integers(0, len(before) - 1)), data.draw(st.integers(0, 7))
    changed = bytearray(before)
    changed[position] ^= 1 << bit
    path.write_bytes(changed)
    try:
        assert not verify(one_checkpoint).ok
    finally:
        path.write_bytes(before)


@pytest.fixture(scope="module")
def one_checkpoint(tmp_path_factory):
    return make(tmp_path_factory.mktemp("one"), 5)


@given(st.binary(max_size=200) | st.binary(max_size=100).map(lambda data: struct.pack("<Q", len(data)) + data))
@settings(deadline=None)
def test_no_bytes_make_the_header_reader_fail_in_an_unforeseen_way(data):
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with contextlib.suppress(CheckpointError):
            assert isinstance(read_layout(Path(file.name)), dict)


def test_what_a_file_browser_leaves_behind_is_no_damage(tmp_path):
    path = make(tmp_path, 1)
    (path / ".DS_Store").write_bytes(b"")
    (path / "model/.nfs0000001").write_bytes(b"")
    assert verify(path).ok


def test_ranks_share_the_reading_and_each_finds_the_damage_in_its_share(tmp_path):
    path = make(tmp_path, 1)
    flip(path / "ema/a.safetensors")
    flip(path / "model/a.safetensors")
    assert [len(verify(path, rank=rank, ranks=3).problems) for rank in range(3)] == [1, 1, 0]


def test_ranks_share_the_bytes_evenly_whatever_the_files_are_called(tmp_path):
    path = make(tmp_path, 1)
    sizes = {f"model/{number}.safetensors": size for number, size in enumerate((9000, 300, 4000, 300, 5000))}
    for name, size in sizes.items():
        (path / name).write_bytes(bytes(size))
    remake_manifest(path)
    for name in sizes:
        flip(path / name)
    found = [[told.split()[0] for told in verify(path, rank=rank, ranks=2).problems] for rank in range(2)]
    assert sorted(found[0] + found[1]) == sorted(sizes)
    assert [sum(sizes[name] for name in names) for names in found] == [9300, 9300]


def test_a_checkpoint_of_the_first_version_of_the_format_is_still_read_and_checked(tmp_path):
    path = make(tmp_path, 1)
    body = json.loads((path / "manifest.json").read_bytes())
    body["version"] = 1
    body["files"] = {
        name: {"size": record["size"], "sha256": hashlib.sha256((path / name).read_bytes()).hexdigest()}
        for name, record in body["files"].items()
    }
    del body["sha256"]
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(body | {"sha256": digest}))
    assert verify(path).ok
    flip(path / "model/a.safetensors")
    assert verify(path).problems == ("model/a.safetensors does not match its digest: damaged or edited",)


def test_a_checkpoint_under_another_name_is_still_whole(tmp_path):
    assert verify(make(tmp_path, 1).rename(tmp_path / "the-good-one")).ok


def test_chunks_of_a_tensor_are_joined_over_files(tmp_path):
    for number, offset in enumerate((0, 4)):
        chunk = Chunk(dtype="F32", shape=(4,), offsets=(offset,))
        (tmp_path / f"{number}.safetensors").write_bytes(encode_header([("w", chunk)]) + bytes(16))
    assert (stored_tensors(tmp_path)["w"].shape, stored_tensors(tmp_path)["w"].chunks) == ((8,), 2)


def test_a_gap_between_chunks_is_an_error(tmp_path):
    chunk = Chunk(dtype="F32", shape=(4,), offsets=(4,))
    (tmp_path / "0.safetensors").write_bytes(encode_header([("w", chunk)]) + bytes(16))
    with pytest.raises(CheckpointError, match="chunks of w do not fill it"):
        stored_tensors(tmp_path)


# --- choosing -------------------------------------------------------------------------------------------------------


def test_checkpoints_are_ordered_by_step_and_never_by_time(tmp_path):
    for step in (10, 9, 100_000_000, 2):
        make(tmp_path, step)
    assert [entry.step for entry in CheckpointStore(tmp_path).all()] == [2, 9, 10, 100_000_000]


def test_only_directories_named_like_checkpoints_are_listed(tmp_path):
    make(tmp_path, 1)
    for name in ("step-2", "step-00000003-old", "notes", ".partial-step-00000004-0123abcd", "xstep-00000005"):
        (tmp_path / name).mkdir()
    assert [entry.path.name for entry in CheckpointStore(tmp_path).all()] == ["step-00000001"]


def test_a_link_to_a_checkpoint_is_not_one_of_the_run(tmp_path):
    make(tmp_path / "a", 1)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/step-00000001").symlink_to(tmp_path / "a/step-00000001")
    assert CheckpointStore(tmp_path / "b").latest() is None


def test_a_run_without_checkpoints_begins_anew(tmp_path):
    store = CheckpointStore(tmp_path / "never made")
    assert (store.latest(), store.resolve("latest"), store.resolve("none")) == (None, None, None)


@pytest.mark.parametrize("choice", ["2", "step-2", "step-00000002", "PATH", "RUN", "RUN/checkpoints"])
def test_a_choice_names_a_step_or_a_path(tmp_path, choice):
    root = tmp_path / "run/checkpoints"
    wanted = make(root, 2)
    if "RUN" not in choice:
        make(root, 3)
    choice = choice.replace("PATH", str(wanted)).replace("RUN", str(tmp_path / "run"))
    assert CheckpointStore(root).resolve(choice) == wanted


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("7", "no checkpoint of step 7 .*\n  fix: there are: 1, 2"),
        ("2", "step-00000002: model/a.safetensors does not match its digest"),
        ("checkpoints/step-00000002", "does not match its digest"),
        ("nowhere", "neither a checkpoint nor a run directory"),
        ("checkpoints/step-00000001/state.json", "neither a checkpoint nor a run directory"),
    ],
)
def test_a_choice_that_cannot_be_met_says_why(tmp_path, monkeypatch, choice, expected):
    monkeypatch.chdir(tmp_path)
    root = Path("checkpoints")
    make(root, 1)
    flip(make(root, 2) / "model/a.safetensors")
    with pytest.raises(CheckpointError, match=expected):
        CheckpointStore(root).resolve(choice)


def test_a_run_whose_checkpoints_are_all_damaged_does_not_silently_begin_anew(tmp_path):
    for step in (1, 2):
        flip(make(tmp_path, step) / "model/a.safetensors")
    with pytest.raises(CheckpointError, match=r"(?s)can be used:.*step-00000002: .*step-00000001: .*none"):
        CheckpointStore(tmp_path).resolve("latest")


# --- publishing -----------------------------------------------------------------------------------------------------


def test_saving_the_same_again_gives_the_checkpoint_that_is_there(tmp_path):
    assert make(tmp_path, 1) == make(tmp_path, 1)
    assert [entry.path.name for entry in CheckpointStore(tmp_path).all()] == ["step-00000001"]


def test_saving_a_step_anew_in_another_state_makes_the_one_that_counts(tmp_path):
    old = make(tmp_path, 1)
    new = make(tmp_path, 1, state=OTHER)
    assert (new.name, CheckpointStore(tmp_path).latest(), verify(old).ok) == ("step-00000001.2", new, True)
    assert CheckpointStore(tmp_path).resolve("1") == new


def test_a_damaged_checkpoint_of_the_same_step_is_not_taken_for_the_same(tmp_path):
    flip(make(tmp_path, 1) / "model/a.safetensors")
    assert verify(make(tmp_path, 1)).ok


def test_the_next_save_clears_away_what_dead_ones_left_and_nothing_else(tmp_path):
    ours = (".partial-step-00000001-0123abcd", ".removed-step-00000002.3-0123abcd")
    others = (".partial", ".partial-step-1-0123abcd", ".partial-step-00000001-mine", "partial-step-00000001-0123abcd")
    for name in (*ours, *others):
        (tmp_path / name / "model").mkdir(parents=True)
    (tmp_path / ".partial-step-00000009-0123abcd").symlink_to(tmp_path / ".partial")
    make(tmp_path, 3)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*others, ".partial-step-00000009-0123abcd", ".lock", "step-00000003"}


def test_two_processes_cannot_save_into_one_directory(tmp_path):
    make(tmp_path, 1)
    partial = CheckpointStore(tmp_path).prepare(2)
    with (tmp_path / ".lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another process is saving"):
            make(tmp_path, 3)
    assert partial.is_dir()


# --- rotating -------------------------------------------------------------------------------------------------------


def names(root):
    return [path.name for path in sorted(root.iterdir()) if path.name != ".lock"]


def test_rotation_keeps_the_newest_and_leaves_no_trace_of_the_others(tmp_path):
    paths = [make(tmp_path, step) for step in (1, 2, 3, 4)]
    assert CheckpointStore(tmp_path).rotate(2) == [paths[1], paths[0]]
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_without_a_limit_nothing_is_removed(tmp_path):
    make(tmp_path, 1)
    make(tmp_path, 2)
    assert CheckpointStore(tmp_path).rotate(None) == []


def test_a_limit_of_nothing_is_a_mistake(tmp_path):
    with pytest.raises(ValueError, match="at least 1"):
        CheckpointStore(tmp_path).rotate(0)


def test_damaged_checkpoints_neither_count_nor_vanish(tmp_path):
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    flip(tmp_path / "step-00000004/model/a.safetensors")
    CheckpointStore(tmp_path).rotate(1)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_suspect_checkpoints_do_not_displace_good_ones(tmp_path):
    for step, flags in ((1, ()), (2, ()), (3, (SUSPECT,))):
        make(tmp_path, step, flags=flags)
    CheckpointStore(tmp_path).rotate(1)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def rank(root, *steps, keep=1):
    (root / RANKING).write_text(json.dumps({"keep": keep, "steps": steps}))


def test_the_best_checkpoints_stay_as_many_as_the_ranking_says(tmp_path):
    for step in (1, 2, 3, 4, 5):
        make(tmp_path, step)
    rank(tmp_path, 9, 2, 1, 3, keep=2)
    CheckpointStore(tmp_path).rotate(1)
    assert names(tmp_path) == [RANKING, "step-00000001", "step-00000002", "step-00000005"]
    rank(tmp_path, 2, 1)
    CheckpointStore(tmp_path).rotate(1)
    assert names(tmp_path) == [RANKING, "step-00000002", "step-00000005"]


def test_the_best_checkpoint_is_a_complete_one_that_is_not_suspect(tmp_path):
    for step, flags in ((1, ()), (2, (SUSPECT,)), (3, ()), (4, ()), (5, ())):
        make(tmp_path, step, flags=flags)
    flip(tmp_path / "step-00000003/model/a.safetensors")
    rank(tmp_path, 3, 2, 1, 4)
    store = CheckpointStore(tmp_path)
    assert store.resolve("best") == tmp_path / "step-00000001"
    store.rotate(1)
    assert names(tmp_path) == [RANKING, "step-00000001", "step-00000003", "step-00000005"]


def test_without_an_evaluation_there_is_no_best_checkpoint(tmp_path):
    make(tmp_path, 1)
    with pytest.raises(CheckpointError, match="was evaluated"):
        CheckpointStore(tmp_path).resolve("best")


@pytest.mark.parametrize(
    "content", ["", "{}", '{"keep": -1, "steps": []}', '{"keep": 1e999, "steps": []}', '{"keep": 1, "steps": [null]}', "3"]
)
def test_while_a_ranking_is_damaged_nothing_is_removed(tmp_path, content):
    for step in (1, 2):
        make(tmp_path, step)
    (tmp_path / RANKING).write_text(content)
    with pytest.raises(CheckpointError, match=r"ranking\.json is damaged"):
        CheckpointStore(tmp_path).rotate(1)
    assert names(tmp_path) == [RANKING, "step-00000001", "step-00000002"]


def test_the_latest_checkpoint_is_a_suspect_one_only_if_there_is_no_other(tmp_path):
    messages = []
    store = CheckpointStore(tmp_path, report=messages.append)
    make(tmp_path, 3, flags=(SUSPECT,))
    assert store.latest() == store.resolve("latest") == tmp_path / "step-00000003"
    make(tmp_path, 2)
    assert store.latest() == store.resolve("latest") == tmp_path / "step-00000002"
    assert "--resume_from_checkpoint=3" in messages[-1]
    assert store.resolve("3") == tmp_path / "step-00000003"


def test_what_a_newer_save_of_the_same_step_replaced_goes_first(tmp_path):
    make(tmp_path, 1)
    make(tmp_path, 2)
    make(tmp_path, 2, state=State(step=2, trainer={"other": 1}).encode())
    CheckpointStore(tmp_path).rotate(2)
    assert names(tmp_path) == ["step-00000001", "step-00000002.2"]


def test_what_rotation_does_not_know_it_does_not_touch(tmp_path):
    for step in (1, 2):
        make(tmp_path, step)
    for name in ("step-00000000", "best", "step-00000001-copy", ".hidden"):
        (tmp_path / name).mkdir()
    CheckpointStore(tmp_path).rotate(1)
    assert names(tmp_path) == [".hidden", "best", "step-00000000", "step-00000001-copy", "step-00000002"]


def test_damage_between_two_rotations_is_noticed(tmp_path):
    store = CheckpointStore(tmp_path)
    make(tmp_path, 1)
    make(tmp_path, 2)
    store.rotate(2)
    flip(tmp_path / "step-00000002/model/a.safetensors")
    store.rotate(1)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


actions = st.lists(
    st.tuples(st.just("save"), st.integers(0, 6), st.booleans())
    | st.tuples(st.just("damage"), st.integers(0, 9), st.sampled_from([flipped_bit, no_manifest, missing_file]))
    | st.tuples(st.just("rotate"), st.integers(1, 3), st.none()),
    max_size=14,
)


@given(actions)
@settings(max_examples=20, deadline=None)
def test_rotation_never_takes_the_newest_good_ones_whatever_happened_before(sequence):
    with tempfile.TemporaryDirectory() as directory:
        store = CheckpointStore(Path(directory))
        for number, (action, value, extra) in enumerate(sequence):
            if action == "save":
                make(
                    store.root,
                    value,
                    flags=(SUSPECT,) if extra else (),
                    state=State(step=value, trainer={"number": number}).encode(),
                )
            elif action == "damage" and (entries := store.all()):
                path = entries[value % len(entries)].path
                if verify(path).ok:
                    extra(path)
            elif action == "rotate":
                must_stay = damaged(store) | set(good_steps(store)[-value:])
                store.rotate(value)
                assert must_stay == damaged(store) | set(good_steps(store))


def damaged(store):
    return {entry.path for entry in store.all() if not verify(entry.path).ok}


def good_steps(store):
    """Steps of which there is a whole checkpoint that nobody suspects."""
    whole = [entry for entry in store.all() if verify(entry.path).ok]
    return sorted({entry.step for entry in whole if SUSPECT not in entry.manifest.flags})
