import json

import pytest
from hypothesis import given, strategies as st

from smalti.checkpoint.format.manifest import FileRecord, Manifest, decode_manifest, read_manifest
from smalti.errors import CheckpointError

RECORD = FileRecord(size=3, digest="ab" * 32)
STATE = {"state.json": RECORD}


def manifest(**changes):
    return Manifest(**({"step": 7, "world_size": 2, "files": STATE} | changes))


def reason(data):
    with pytest.raises(CheckpointError) as caught:
        decode_manifest(data)
    return caught.value.message


words = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
records = st.builds(FileRecord, size=st.integers(0, 2**60), digest=st.text("0123456789abcdef", min_size=64, max_size=64))
names = st.from_regex(r"(model|optimizer|ema)/[a-z0-9][a-z0-9._-]{0,9}\.safetensors", fullmatch=True)


@given(
    st.builds(
        Manifest,
        step=st.integers(0, 10**9),
        world_size=st.integers(1, 4096),
        files=st.dictionaries(names, records, max_size=4).map(lambda files: files | STATE),
        created=words,
        plugins=st.lists(words, max_size=3).map(tuple),
        config_digest=words,
        flags=st.lists(words, max_size=2).map(tuple),
    )
)
def test_a_manifest_comes_back_as_it_was_written(value):
    assert decode_manifest(value.encode()) == value


@pytest.mark.parametrize(
    "name",
    [
        "../state.json",
        "/etc/passwd",
        "model/../../x.safetensors",
        "model//x.safetensors",
        "model\\x.safetensors",
        "model/.x.safetensors",
        "model/x.pt",
        "model/deep/x.safetensors",
        "other/x.safetensors",
        "manifest.json",
        "state.json\n",
        "",
    ],
)
def test_a_name_outside_the_format_is_refused(name):
    assert "is not a file of a checkpoint" in reason(manifest(files=STATE | {name: RECORD}).encode())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"version": 3}, "format version 3; this smalti reads versions 1 and 2"),
        ({"version": True}, "format version True"),
        ({"version": None}, "format version None"),
        ({"format": "other"}, "not the manifest of a smalti checkpoint"),
        ({"step": 8}, "does not match its own digest"),
        ({"sha256": "0" * 64}, "does not match its own digest"),
        ({"surprise": 1}, "missing or unknown keys: surprise"),
    ],
)
def test_an_edited_manifest_is_refused_with_the_reason(change, expected):
    body = json.loads(manifest().encode()) | change
    assert expected in reason(json.dumps(body).encode())


@pytest.mark.parametrize("key", ["step", "files", "sha256"])
def test_a_manifest_without_one_of_its_keys_is_refused(key):
    body = json.loads(manifest().encode())
    del body[key]
    assert f"missing or unknown keys: {key}" in reason(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "damaged"),
        (b"[]", "not the manifest"),
        (b"\xff\xfe", "damaged"),
        (b'{"step": NaN}', "NaN is not valid in JSON"),
        (b'{"step": -Infinity}', "-Infinity is not valid in JSON"),
        (b'{"step": 1e999}', "1e999 is too large"),
        (b'{"step": 1, "step": 2}', "'step' occurs twice"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_json_that_could_mean_two_things_is_refused(data, expected):
    assert expected in reason(data)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1},
        {"step": True},
        {"step": 1.0},
        {"world_size": "2"},
        {"world_size": 0},
        {"created": 5},
        {"plugins": (1,)},
        {"files": STATE | {"model/a.safetensors": FileRecord(size=-1, digest="ab" * 32)}},
        {"files": STATE | {"model/a.safetensors": FileRecord(size=1, digest="AB" * 32)}},
        {"files": STATE | {"model/a.safetensors": FileRecord(size=1, digest="short")}},
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_even_under_a_right_digest(changes):
    assert "has an invalid value" in reason(manifest(**changes).encode())


def test_a_manifest_must_list_the_state():
    assert "does not list state.json" in reason(manifest(files={}).encode())


def test_a_manifest_of_absurd_size_is_not_read(tmp_path):
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(CheckpointError, match="too large for a manifest"):
        read_manifest(tmp_path)


def test_manifests_that_differ_only_in_time_hold_the_same():
    assert manifest(created="monday").holds_the_same_as(manifest(created="tuesday"))
    assert not manifest(step=1).holds_the_same_as(manifest(step=2))
