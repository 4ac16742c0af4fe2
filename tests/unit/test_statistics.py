"""Running statistics, of which every rank has its own, are those of the first rank where the model is saved or judged."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from torch import nn

from smalti.saving import save
from smalti.testing import TinyFamily, two_processes
from smalti.testing.strategy_subject import open_family
from smalti.validation import at_rest


class Normed(TinyFamily):
    def build_model(self):
        model = super().build_model()
        model.norm = nn.BatchNorm2d(3)
        model.register_forward_hook(normed)
        return model


def normed(model, _, prediction):
    return model.norm(prediction)


def statistics(act: str) -> tuple[dict[str, list], dict[str, list]]:
    """This rank's after a step, and when the model is saved or judged."""
    subject = open_family("ddp", (), 2, Normed())
    subject.step(1)

    def now() -> dict[str, list]:
        return {name: tensor.tolist() for name, tensor in subject.parallel.unwrap(subject.model).named_buffers()}

    own, seen = now(), []
    run = SimpleNamespace(parallel=subject.parallel, model=subject.model, config=subject.config, state=MagicMock(), ema=None)
    run.saver, run.snapshot = MagicMock(), lambda: seen.append(now())
    run.saver.landed.return_value = None
    if act == "saved":
        save(run, last=False)
    else:
        with at_rest(run):
            seen.append(now())
    return own, seen[0]


@pytest.fixture(scope="module")
def ranks():
    with two_processes(group=False) as processes:
        yield processes


@pytest.mark.parametrize("act", ["saved", "judged"])
def test_all_ranks_take_those_of_the_first(ranks, act):
    (first, one), (second, other) = ranks.run(statistics, act)
    assert first != second
    assert one == other == first
