"""Two ranks look for the checkpoint to go on from, and read it together."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from smalti.checkpoint.format.store import CheckpointStore
from smalti.checkpoint.search import find_on_all_ranks
from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.writer import save
from smalti.parallel.collective import RankError
from smalti.parallel.state import PortableState
from support.forked_ranks import Pair, SingleRank, forked_processes


def found_in(folders, choice):
    """What a rank finds below its own of two folders: its answer or error, what it reported, and how many bytes it read."""
    rank, told = dist.get_rank(), []
    os.chdir(folders[rank])
    store = CheckpointStore(Path("checkpoints"), report=told.append)
    before = bytes_read()
    try:
        answer = str(find_on_all_ranks(Pair(rank), store, choice))
    except RankError as failure:
        answer = f"refused: {failure}; {failure.fix}"
    return answer, told, bytes_read() - before


def bytes_read():
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.fixture(scope="module")
def pair():
    with forked_processes() as processes:
        yield processes


@pytest.fixture
def run(tmp_path):
    """A folder with checkpoints of steps 1 and 2, of six megabytes each."""
    for step in (1, 2):
        model = {"weight": torch.full((1000, 500), float(step))}
        moments = {"weight": {"exp_avg": torch.ones(1000, 500), "exp_avg_sq": torch.ones(1000, 500)}}
        state = PortableState(model=model, optimizer_state=moments, optimizer="AdamW")
        save(
            tmp_path / "run" / "checkpoints", Snapshot(step=step, state=state, ema=model, trainer={"step": step}), SingleRank()
        )
    return tmp_path / "run"


def files_of(run, step=2):
    return sorted(path for path in (run / "checkpoints" / f"step-{step:08d}").rglob("*") if path.is_file())


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("choice", ["latest", "2"])
def test_both_ranks_find_the_same_whole_checkpoint(pair, run, choice):
    assert [answer for answer, _, _ in pair.run(found_in, [run, run], choice)] == ["checkpoints/step-00000002"] * 2


def test_nothing_is_found_where_there_was_never_a_checkpoint(pair, tmp_path):
    assert [answer for answer, _, _ in pair.run(found_in, [tmp_path, tmp_path], "latest")] == ["None"] * 2


def test_no_rank_reads_all_of_it(pair, run):
    size = sum(path.stat().st_size for path in files_of(run))
    assert max(read for _, _, read in pair.run(found_in, [run, run], "latest")) < 0.8 * size


def test_whatever_file_is_damaged_both_fall_back_to_the_one_before(pair, run):
    for path in files_of(run):
        whole = path.read_bytes()
        flip(path)
        (answer, told, _), (other, _, _) = pair.run(found_in, [run, run], "latest")
        assert (answer, other, len(told)) == ("checkpoints/step-00000001",) * 2 + (1,), path
        path.write_bytes(whole)


def test_a_step_that_is_damaged_is_refused_on_both(pair, run):
    flip(files_of(run)[-1])
    answers = [answer for answer, _, _ in pair.run(found_in, [run, run], "2")]
    assert all("this checkpoint cannot be used" in answer for answer in answers)


def test_a_machine_that_sees_another_directory_is_named_and_no_older_checkpoint_is_taken(pair, run, tmp_path):
    shutil.copytree(run, tmp_path / "other")
    for path in files_of(tmp_path / "other"):
        flip(path)
    answers = [answer for answer, _, _ in pair.run(found_in, [run, tmp_path / "other"], "latest")]
    assert all("rank 1 sees other contents in checkpoints/step-00000002 than rank 0" in answer for answer in answers)
