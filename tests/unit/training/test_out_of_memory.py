"""Running out of memory, for real on the host, and by what other allocators say."""

import pytest
import torch

from smalti import RankInfo, RunState, UserError, World, hookimpl
from smalti.errors import ExitCode
from smalti.plugins.registry import PluginInfo
from smalti.training.failures.faults import is_fault
from smalti.training.failures.out_of_memory import OutOfMemory, is_out_of_memory, memory_explained


class Advice:
    @hookimpl
    def explain_error(self, error, info):
        return UserError(f"no room on {info.world.device} for {error}", fix="a smaller batch")


class Broken:
    @hookimpl
    def explain_error(self, error):
        raise RuntimeError("spoiled")


@pytest.fixture
def explaining(configure, plugins, tmp_path):
    """explaining(*plugins) -> the context in which memory runs out, while a run is built."""
    info = RankInfo(id="", directory=tmp_path, world=World(), config=configure(), strategy="", plugins=())

    def give(*more):
        for each in more:
            name = type(each).__name__.lower()
            plugins.register(PluginInfo(name=name, distribution=name, version="1.0"), each)
        return memory_explained(plugins, RunState(max_steps=1), info)

    return give


def test_the_host_without_room_is_an_answer_instead_of_a_traceback(explaining):
    with pytest.raises(OutOfMemory, match=r"out of memory: .*DefaultCPUAllocator: can't allocate") as answer, explaining():
        torch.empty(10**14)
    assert (answer.value.exit_code, answer.value.fix) == (ExitCode.FAILED, "")


def test_an_error_without_a_message_is_named(explaining):
    with pytest.raises(OutOfMemory, match="out of memory: MemoryError"), explaining():
        raise MemoryError


def test_hook_explain_error_gives_the_words_and_an_explanation_that_fails_costs_no_other(explaining):
    with pytest.raises(OutOfMemory) as answer, explaining(Broken(), Advice()):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert (answer.value.message, answer.value.fix) == ("no room on cpu for CUDA out of memory.", "a smaller batch")


def test_where_every_explanation_fails_the_message_of_torch_stays(explaining):
    with pytest.raises(OutOfMemory, match="out of memory: CUDA out of memory"), explaining(Broken()):
        raise torch.OutOfMemoryError("CUDA out of memory.")


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


def test_a_driver_that_refuses_what_the_allocator_is_told_to_do_names_the_way_out(explaining, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(UserError, match="refuses expandable segments") as answer, explaining():
        raise RuntimeError("CUDA driver error: operation not supported")
    assert answer.value.fix.startswith("PYTORCH_ALLOC_CONF=expandable_segments:False")


def test_other_errors_stay_what_they_are(explaining):
    with pytest.raises(RuntimeError, match="other"), explaining(Advice()):
        raise RuntimeError("other")
