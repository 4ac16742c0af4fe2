"""A stretch of a tensor's elements, which begins and ends anywhere, is read from the files whatever chunks those hold."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from smalti.checkpoint.format.safetensors_layout import Chunk, encode_header
from smalti.checkpoint.format.safetensors_reader import TensorFiles
from smalti.checkpoint.reader import load
from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.writer import save
from smalti.errors import CheckpointError
from smalti.parallel.state import FlatRange, PortableState
from support.forked_ranks import SingleRank


@given(data=st.data(), shape=st.lists(st.integers(0, 5), max_size=3).map(tuple))
def test_the_elements_are_those_of_the_whole_tensor(data, shape):
    whole = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    axis = data.draw(st.integers(0, len(shape) - 1)) if shape else None
    cuts = sorted(data.draw(st.sets(st.integers(1, 4)))) if shape else []
    begin = data.draw(st.integers(0, whole.size))
    end = data.draw(st.integers(begin, whole.size))
    with TemporaryDirectory() as folder:
        paths = [Path(folder) / str(number) for number in range(len(cuts) + 1)]
        start = 0
        for path, part in zip(paths, np.split(whole, cuts, axis) if shape else [whole], strict=True):
            offsets = tuple(start if each == axis else 0 for each in range(len(shape)))
            chunk = Chunk(dtype="F32", shape=part.shape, offsets=offsets)
            path.write_bytes(encode_header([("w", chunk)]) + part.tobytes())
            start += part.shape[axis] if shape else 0
        room = np.zeros(end - begin, dtype=np.float32)
        TensorFiles(paths).read_into(room.view(np.uint8).data, "w", begin * room.itemsize)
    assert room.tolist() == whole.reshape(-1)[begin:end].tolist()


def spans(whole: torch.Tensor, begin: int, end: int) -> Snapshot:
    state = PortableState(model={"w": FlatRange.empty(end - begin, whole.shape, begin)}, optimizer="AdamW")
    return Snapshot(step=0, state=state)


@pytest.fixture
def saved(tmp_path):
    weight = torch.arange(12.0).view(3, 4)
    moments = {"w": {"exp_avg": weight + 100, "step": torch.tensor(7.0)}}
    state = PortableState(model={"w": weight.bfloat16()}, optimizer_state=moments, optimizer="AdamW")
    return save(tmp_path, Snapshot(step=1, state=state, trainer={"step": 1}), SingleRank()).path


def test_moments_are_made_for_the_same_stretch_and_narrow_types_widen(saved):
    into = spans(torch.empty(3, 4), 3, 9)
    load(saved, into, SingleRank())
    assert into.state.model["w"].tolist() == [3, 4, 5, 6, 7, 8]
    assert into.state.optimizer_state["w"]["exp_avg"].tolist() == [103, 104, 105, 106, 107, 108]
    assert into.state.optimizer_state["w"]["step"].shape == ()


def test_moments_are_read_into_the_room_that_the_target_makes(saved):
    into = spans(torch.empty(3, 4), 3, 9)
    flat = torch.zeros(8)
    into.state.allocate = lambda name, moment, dtype: FlatRange.of(flat[1:7], torch.Size([3, 4]), 3)
    load(saved, into, SingleRank())
    assert flat.tolist() == [0, 103, 104, 105, 106, 107, 108, 0]


def test_another_shape_of_the_whole_is_refused(saved):
    with pytest.raises(CheckpointError, match=r"w \[3, 4\] for \[4, 3\]"):
        load(saved, spans(torch.empty(4, 3), 3, 9), SingleRank())


def test_a_file_that_ends_within_the_stretch_is_told(saved):
    [path] = (saved / "model").glob("*.safetensors")
    files = TensorFiles([path])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="ends within w"):
        files.read_into(memoryview(bytearray(6)), "w", 18)
