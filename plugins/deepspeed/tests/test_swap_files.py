"""What is swapped to a drive has its room before it is written, and says which file failed and why."""

import shutil

import pytest
import torch

from smalti import ExitCode
from smalti_deepspeed.swap_files import SwapError, checked

BUFFER = torch.zeros(3 * 4096, dtype=torch.uint8)


class Handle:
    """As much of DeepSpeed's as is used. It accepts whatever it is given, and writes nothing: as on a full drive."""

    def __init__(self, answer=0):
        self.answer = answer

    def async_pwrite(self, buffer, path, offset):
        return self.answer

    async_pread = async_pwrite


@pytest.fixture
def handle():
    return checked(Handle)()


def test_a_file_has_its_room_before_it_is_written(tmp_path, handle):
    assert handle.async_pwrite(BUFFER, str(tmp_path / "one"), 0) == 0
    there = (tmp_path / "one").stat()
    assert (there.st_size, there.st_blocks * 512 >= BUFFER.nbytes) == (BUFFER.nbytes, True)


def test_a_file_that_is_written_again_keeps_what_is_in_it(tmp_path):
    path = tmp_path / "one"
    path.write_bytes(b"x" * BUFFER.nbytes)
    checked(Handle)().async_pwrite(BUFFER, str(path), 0)
    assert path.read_bytes() == b"x" * BUFFER.nbytes


def test_a_folder_that_went_is_told_of_by_who_writes_there_and_by_who_reads(tmp_path):
    folder = tmp_path / "swap"
    folder.mkdir()
    path, handle = str(folder / "one"), checked(Handle)()
    handle.async_pwrite(BUFFER, path, 0)
    shutil.rmtree(folder)
    handle.answer = -1
    for act in (handle.async_pwrite, handle.async_pread):
        with pytest.raises(SwapError, match=f"cannot swap to {path}: No such file or directory") as failure:
            act(BUFFER, path, 0)
        assert failure.value.exit_code is ExitCode.FAILED


def test_a_truncated_file_is_not_read(tmp_path, handle):
    (tmp_path / "one").write_bytes(b"x" * 4096)
    with pytest.raises(SwapError, match="it has 4096 of the 12288 bytes that were written"):
        handle.async_pread(BUFFER, str(tmp_path / "one"), 0)


def test_what_deepspeed_itself_refuses_is_told(tmp_path):
    with pytest.raises(SwapError, match="DeepSpeed cannot open it"):
        checked(Handle)(answer=-1).async_pwrite(BUFFER, str(tmp_path / "one"), 0)
