"""What is swapped to a drive lies on whole pages, and comes back as it went."""

import json
from pathlib import Path
from shutil import rmtree

import pytest
import torch
from hypothesis import given, strategies as st

from smalti_deepspeed.checks import has_libaio
from smalti_deepspeed.swapping import split_at_pages, swap_whole_pages
from smalti_testing import TinyFamily
from support.forked_ranks import forked_processes
from support.whole import some


@given(offset=st.integers(0, 10_000), length=st.integers(1, 10_000), page=st.sampled_from((1, 64, 1024)))
def test_pieces_fill_the_range_and_all_but_its_ends_are_whole_pages(offset, length, page):
    pieces = list(split_at_pages(offset, length, page))
    assert [start for start, _ in pieces] == [sum(size for _, size in pieces[:number]) for number in range(len(pieces))]
    assert sum(size for _, size in pieces) == length
    others = [(start, size) for start, size in pieces if (offset + start) % page or size % page]
    assert all(size < page for _, size in others)
    assert len(others) <= 2


class Swapper:
    """As much of DeepSpeed's as is used."""

    numel_alignment = 256

    def is_swappable_tensor(self, tensor):
        return tensor.numel() >= 2048


def test_a_gradient_that_begins_within_a_page_is_cut_and_a_small_one_is_not():
    swapper, gradients = Swapper(), [torch.arange(5000.0), torch.arange(7.0)]
    swap_whole_pages(swapper)
    pieces, places = swapper._adjust_for_misaligned_lengths(tensors=gradients, offsets=[1000, 6000])
    assert places == [1000, 1024, 5120, 6000]
    assert torch.equal(torch.cat(pieces), torch.cat(gradients))


# --- a folder -------------------------------------------------------------------------------------------------------

WIDTH = 270
"""Of a model whose largest parameter is swapped by each of two ranks; DeepSpeed leaves what is below 1 MiB in memory."""


def swapping(offloaded: tuple[str, ...], folder: Path) -> str:
    """The flag for it."""
    offload = {f"offload_{each}": {"device": "nvme", "nvme_path": str(folder)} for each in offloaded}
    document = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **offload}}
    return f"--deepspeed_config={json.dumps(document)}"


def train_with_a_folder(offloaded: tuple[str, ...], folder: Path) -> tuple[set[str], bool]:
    """Which kinds of files came, and whether steps from the same state are the same to the last bit.

    The state after three steps is compared with that of one process, which makes them too.
    """
    from smalti_testing.strategy_subject import open_family

    subject = open_family("deepspeed", (swapping(offloaded, folder),), 2, TinyFamily(width=WIDTH))
    reference = subject.reference()
    for number in range(3):
        subject.step(number)
        reference.step(number, 2, 0.0)
    subject.follows(reference, "after three steps")
    state, ends = subject.state(), []
    for _ in range(2):
        subject.parallel.state.load(state)
        subject.step(3)
        ends.append(subject.whole())
    kinds = {path.relative_to(folder / "zero_stage_3").parts[0] for path in folder.rglob("*.swp")}
    return kinds, all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


@pytest.mark.skipif(not has_libaio(), reason="DeepSpeed swaps to a drive with libaio, which is not here")
@pytest.mark.parametrize("offloaded", some([("param",), ("param", "optimizer")], ("param", "optimizer")))
def test_what_lies_in_a_folder_is_trained_as_by_one_process(tmp_path, offloaded):
    # Without what `make test` compiles before, this is too short:
    with forked_processes(group=False, seconds=300, imports=["support.zero_ranks"]) as ranks:
        kinds, same = ranks.run(train_with_a_folder, offloaded, tmp_path)[0]
    assert same
    assert len(kinds) == len(offloaded)


def train_without_its_folder(folder: Path) -> str:
    """What a step says after the folder was removed by somebody."""
    from smalti_deepspeed.swap_files import SwapError
    from smalti_testing.strategy_subject import open_family

    subject = open_family("deepspeed", (swapping(("param", "optimizer"), folder),), 2, TinyFamily(width=WIDTH))
    subject.step(0)
    subject.parallel.barrier()
    rmtree(folder, ignore_errors=True)
    subject.parallel.barrier()
    try:
        subject.step(1)
    except SwapError as error:
        return error.message
    return "trained on"


@pytest.mark.skipif(not has_libaio(), reason="DeepSpeed swaps to a drive with libaio, which is not here")
def test_a_folder_that_is_removed_meanwhile_is_named(tmp_path):
    with forked_processes(group=False, seconds=300, imports=["support.zero_ranks"]) as ranks:
        told = ranks.run(train_without_its_folder, tmp_path / "swap")
    assert any(each.startswith(f"cannot swap to {tmp_path / 'swap'}") for each in told)
