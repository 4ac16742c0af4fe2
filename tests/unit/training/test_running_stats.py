"""Running statistics, of which every rank has its own, are those of the first rank where the model is saved or judged."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file
from torch import nn

from smalti.checkpoint.async_saver import Saver
from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.writer import save as write_checkpoint
from smalti.parallel.protocol import Communicator
from smalti.rundir.phases import Phases
from smalti.training.checkpointing import save
from smalti.types import Checkpoint, RunState
from smalti_testing import TinyFamily
from smalti_testing.strategy_subject import open_family
from smalti_validation.eval_mode import eval_mode
from support.forked_ranks import forked_processes


class Normed(TinyFamily):
    def build_model(self):
        model = super().build_model()
        model.norm = nn.BatchNorm2d(3)
        model.register_forward_hook(normed)
        return model


def normed(model, _, prediction):
    return model.norm(prediction)


def statistics(act: str, folder: Path) -> tuple[dict[str, list], dict[str, list]]:
    """This rank's after a step, and when the model is saved or judged."""
    subject = open_family("ddp", (), 2, Normed())
    subject.step(1)

    def now() -> dict[str, list]:
        return {name: tensor.tolist() for name, tensor in subject.parallel.unwrap(subject.model).named_buffers()}

    own = now()
    parallel = subject.parallel

    def write(snapshot: Snapshot, communicator: Communicator) -> Checkpoint:
        return write_checkpoint(folder, snapshot, communicator)

    run = SimpleNamespace(parallel=parallel, world=parallel.world, model=subject.model, config=subject.config, ema=None)
    run.phases = Phases()
    run.saver = Saver(write=write, communicator=parallel, background=parallel.background_communicator())
    if act == "judged":
        with eval_mode(run):
            return own, now()
    run.state = RunState(max_steps=2, save_requested=True)
    run.state.step, run.effective_batch, run.data_changes, run.adapter, run.model_config = 1, 2, None, None, {}
    run.info = SimpleNamespace(timesteps="uniform", family="normed", strategy="DDP")
    run.plugins = SimpleNamespace(versions=())
    run.ownership = SimpleNamespace(check=lambda: None, confirm=lambda: True)
    run.data = SimpleNamespace(identity=SimpleNamespace(as_json=dict), order=SimpleNamespace(beginning=None))
    save(run, last=False)
    saved = run.saver.poll(finish=True)
    run.saver.close()
    files = [load_file(path) for path in (saved.path / "model").glob("*.safetensors")]
    return own, {name: file[name].tolist() for file in files for name in own.keys() & file.keys()}


@pytest.fixture(scope="module")
def ranks():
    with forked_processes(group=False) as processes:
        yield processes


@pytest.mark.parametrize("act", ["saved", "judged"])
def test_all_ranks_take_those_of_the_first(ranks, tmp_path, act):
    (first, one), (second, other) = ranks.run(statistics, act, tmp_path)
    assert first != second
    assert one == other == first
