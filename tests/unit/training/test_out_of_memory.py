"""Running out of memory, for real on the host, and by what other allocators say."""

import pytest
import torch

from smalti.errors import ExitCode, UserError
from smalti.training.failures.faults import is_fault
from smalti.training.failures.out_of_memory import OutOfMemory, is_out_of_memory, memory_explained
from smalti.types import World


def test_the_host_without_room_is_an_answer_instead_of_a_traceback(configure):
    with pytest.raises(OutOfMemory) as answer, memory_explained(configure("--use_cpu"), World()):
        torch.empty(10**14)
    assert answer.value.exit_code is ExitCode.FAILED
    assert answer.value.message.startswith("out of memory on cpu: no room for 372529.03 GiB more in the building of the run")
    assert "total of the device" in answer.value.message


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
    ],
)
def test_what_other_allocators_say_is_known_and_no_fault_of_the_device(error):
    assert is_out_of_memory(error)
    assert not is_fault(error)


def test_a_driver_that_refuses_what_the_allocator_is_told_to_do_names_the_way_out(configure, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(UserError, match="refuses expandable segments") as answer, memory_explained(configure(), World()):
        raise RuntimeError("CUDA driver error: operation not supported")
    assert answer.value.fix.startswith("PYTORCH_ALLOC_CONF=expandable_segments:False")


def test_other_errors_stay_what_they_are(configure):
    with pytest.raises(RuntimeError, match="other"), memory_explained(configure(), World()):
        raise RuntimeError("other")
