"""That the harness sees what it is there to see: each fault on purpose, beside the same without it."""

import pytest

from support.forked_ranks import forked_processes


@pytest.fixture(scope="module")
def process():
    with forked_processes(ranks=1, group=False, module="accelerators") as one:
        yield one


def copied(*, waiting: bool, synchronised: bool) -> list[str]:
    """The races of a copy to the host on a stream of its own, after which the host reads it."""
    import torch

    from accelerators.ordering import races
    from accelerators.watching import Watch
    from smalti_plan.rehearsal.devices import fake_cuda

    begin = fake_cuda.trace_length()
    with Watch() as watch:
        made = torch.randn(8, device="cuda:0") * 2
        side = torch.Stream("cuda:0")
        if waiting:
            side.wait_stream(torch.accelerator.current_stream())
        host = torch.empty(8, pin_memory=True)
        with side:
            host.copy_(made, non_blocking=True)
        if synchronised:
            side.synchronize()
        host.add_(1)
    return races(fake_cuda.trace(begin), watch.operations)


def waits() -> dict[str, bool]:
    """Whether the host waits for each of these."""
    import torch

    from accelerators.watching import Watch

    with Watch() as watch:
        there, pinned, plain = torch.ones(4, device="cuda:0"), torch.empty(4, pin_memory=True), torch.empty(4)
        found = {}
        for name, act in {
            "a number": lambda: float(there.sum()),
            "to pinned memory": lambda: pinned.copy_(there, non_blocking=True),
            "to plain memory": lambda: plain.copy_(there, non_blocking=True),
            "to the device": lambda: plain.to("cuda:0"),
            "to the device, beside": lambda: plain.to("cuda:0", non_blocking=True),
        }.items():
            before = len(watch.operations)
            act()
            found[name] = any(operation.waits for operation in watch.operations[before:])
    return found


def step_with_count_on(device: str) -> None:
    """An optimizer step whose step count is there."""
    import torch

    from accelerators.watching import Watch

    with Watch():
        weight = torch.nn.Parameter(torch.zeros(4, device="cuda:0"))
        weight.grad = torch.ones(4, device="cuda:0")
        optimizer = torch.optim.AdamW([weight], fused=True)
        moments = {name: torch.zeros(4, device="cuda:0") for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[weight] = {"step": torch.zeros((), device=device), **moments}
        optimizer.step()


def test_a_copy_that_waits_for_nothing_is_found(process):
    assert process.run(copied, waiting=True, synchronised=True) == [[]]
    [early], [late] = (
        process.run(copied, waiting=False, synchronised=True),
        process.run(copied, waiting=True, synchronised=False),
    )
    assert [race.split(" for ")[0] for race in early] == ["copy_ on stream 2"]
    assert [race.split(" for ")[0] for race in late] == ["add_ on the host"] * len(late) != []


def test_waiting_of_the_host_is_told_from_work_beside_it(process):
    assert process.run(waits) == [
        {
            "a number": True,
            "to pinned memory": False,
            "to plain memory": True,
            "to the device": True,
            "to the device, beside": False,
        }
    ]


def test_a_fused_step_refuses_a_count_in_host_memory(process):
    process.run(step_with_count_on, "cuda:0")
    assert "expected all tensors to be on the same device" in process.attempt(step_with_count_on, "cpu")[0].error


def test_functions_are_told_by_the_folders_of_the_packages_whatever_a_clone_is_called():
    import torch

    from accelerators.watching import module_of
    from smalti.training import trainer

    assert module_of(trainer.__file__) == "training.trainer"
    assert module_of(torch.__file__) is None
    assert module_of("/home/me/smalti/.venv/lib/python3.11/site-packages/torch/x.py") is None
    assert module_of("/home/me/smalti/tests/accelerators/watching.py") is None
