"""Checkpoints made as the writer makes them, and the ways in which they can be damaged."""

import json
import os
import pickle
import shutil
import struct

from blake3 import blake3

from smalti.checkpoint.format.manifest import FileRecord, Manifest, read_manifest
from smalti.checkpoint.format.safetensors_layout import Chunk, encode_header
from smalti.checkpoint.format.state_file import State
from smalti.checkpoint.format.store import CheckpointStore

PIECE = Chunk(dtype="F32", shape=(4,), offsets=(0,))
TENSORS = encode_header([("w", PIECE)]) + bytes(range(16))


def record(data):
    return FileRecord(size=len(data), digest=blake3(data).hexdigest())


def make(root, step, *, flags=(), tensors=TENSORS, state=None):
    """A whole checkpoint, made the way the writer makes it."""
    store = CheckpointStore(root)
    with store.exclusive():
        partial = store.prepare(step)
        files = {"model/a.safetensors": tensors, "ema/a.safetensors": tensors}
        files["state.json"] = State(step=step).encode() if state is None else state
        for name, data in files.items():
            (partial / name).write_bytes(data)
        records = {name: record(data) for name, data in files.items()}
        return store.publish(partial, Manifest(step=step, world_size=1, files=records, flags=flags))


def remake_manifest(path):
    """What someone does who edits a file and knows about digests."""
    files = {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}
    del files["manifest.json"]
    manifest = Manifest(step=read_manifest(path).step, world_size=1, files={n: record(d) for n, d in files.items()})
    (path / "manifest.json").write_bytes(manifest.encode())


def flip(path, position=-1):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


# --- damage ---------------------------------------------------------------------------------------------------------


def flipped_bit(path):
    flip(path / "model/a.safetensors")


def flipped_bit_in_the_state(path):
    flip(path / "state.json", 2)


def truncated(path):
    os.truncate(path / "model/a.safetensors", len(TENSORS) - 1)


def emptied(path):
    os.truncate(path / "model/a.safetensors", 0)


def missing_file(path):
    (path / "ema/a.safetensors").unlink()


def missing_directory(path):
    shutil.rmtree(path / "ema")


def extra_file(path):
    (path / "model/b.safetensors").write_bytes(TENSORS)


def hidden_extra_file(path):
    (path / "model/.b.safetensors").write_bytes(TENSORS)


def extra_directory(path):
    (path / "pickles").mkdir()
    (path / "pickles/optimizer.pt").write_bytes(b"")


def swapped_files(path):
    (path / "ema/a.safetensors").write_bytes((path / "state.json").read_bytes())


def linked_file(path):
    (path / "model/a.safetensors").rename(path.parent / "elsewhere.safetensors")
    (path / "model/a.safetensors").symlink_to(path.parent / "elsewhere.safetensors")


def linked_directory(path):
    (path / "model").rename(path.parent / "elsewhere")
    (path / "model").symlink_to(path.parent / "elsewhere")


def named_pipe(path):
    (path / "model/a.safetensors").unlink()
    os.mkfifo(path / "model/a.safetensors")


def no_manifest(path):
    (path / "manifest.json").unlink()


def half_a_manifest(path):
    os.truncate(path / "manifest.json", 100)


def edited_manifest(path):
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"world_size": 1', '"world_size": 2'))


def linked_manifest(path):
    (path / "manifest.json").rename(path.parent / "elsewhere.json")
    (path / "manifest.json").symlink_to(path.parent / "elsewhere.json")


def manifest_of_another_step(path):
    manifest = read_manifest(path)
    (path / "manifest.json").write_bytes(Manifest(step=99, world_size=1, files=manifest.files).encode())


def pickle_under_an_accepted_name(path):
    (path / "model/a.safetensors").write_bytes(pickle.dumps({"w": list(range(100))}))
    remake_manifest(path)


def header_longer_than_the_file(path):
    (path / "model/a.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    remake_manifest(path)


def tensor_that_claims_more_bytes(path):
    (path / "model/a.safetensors").write_bytes(encode_header([("w", PIECE)]) + bytes(8))
    remake_manifest(path)


def overlapping_tensors(path):
    entry = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    header = json.dumps({"a": entry, "b": entry}).encode()
    (path / "model/a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    remake_manifest(path)


def state_that_is_no_json(path):
    (path / "state.json").write_bytes(b'{"loss": NaN}')
    remake_manifest(path)


DAMAGE = {
    flipped_bit: "model/a.safetensors does not match its digest",
    flipped_bit_in_the_state: "state.json does not match its digest",
    truncated: "model/a.safetensors has 191 bytes where the manifest says 192",
    emptied: "model/a.safetensors has 0 bytes",
    missing_file: "ema/a.safetensors is missing",
    missing_directory: "ema/a.safetensors is missing",
    extra_file: "model/b.safetensors is not in the manifest",
    hidden_extra_file: "model/.b.safetensors is not in the manifest",
    extra_directory: "pickles/optimizer.pt is not in the manifest",
    swapped_files: f"ema/a.safetensors has {len(State(step=2).encode())} bytes",
    linked_file: "model/a.safetensors is a symbolic link",
    linked_directory: "model is a symbolic link",
    named_pipe: "model/a.safetensors is not a regular file",
    no_manifest: "manifest.json is missing",
    half_a_manifest: "manifest.json is damaged",
    edited_manifest: "manifest.json does not match its own digest",
    linked_manifest: "manifest.json is a symbolic link",
    manifest_of_another_step: "manifest.json is of step 99",
    pickle_under_an_accepted_name: "model/a.safetensors is not a valid safetensors file",
    header_longer_than_the_file: "the header is longer than the file",
    tensor_that_claims_more_bytes: "8 bytes of data where the header says 16",
    overlapping_tensors: "tensors overlap or leave a gap",
    state_that_is_no_json: "state.json is not valid JSON: NaN is not valid in JSON",
}
