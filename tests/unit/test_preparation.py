"""What happens before any worker exists."""

import pytest

from smalti.errors import PreflightError, UserError
from smalti.preparation import Preparation


@pytest.fixture
def wanted(configure, tmp_path):
    """wanted("--flag", ...) -> a configuration that could train, but for what the flags spoil."""
    (tmp_path / "pictures").mkdir()
    flags = ("--model_family=toy", "--max_train_steps=1", f"--instance_data_dir={tmp_path / 'pictures'}", "--use_cpu")
    return lambda *more: configure(*flags, f"--output_dir={tmp_path / 'run'}", *more)


def test_a_machine_that_waits_in_vain_for_the_first_one_says_so(wanted, plugins, tmp_path):
    flags = ("--num_processes=2", "--num_machines=2", "--machine_rank=1", "--main_process_ip=h", "--process_group_timeout=1")
    with pytest.raises(PreflightError, match=r"machine 0 has not made the run directory .* within 1 s"):
        Preparation.of(wanted(*flags), plugins, write=True)
    assert not (tmp_path / "run").exists()


def test_an_unknown_family_is_found_out_before_anything_is_written(wanted, plugins, tmp_path):
    with pytest.raises(UserError, match="Unknown model_family 'tyo'"):
        Preparation.of(wanted("--model_family=tyo"), plugins, write=True)
    assert not (tmp_path / "run").exists()


def test_an_unknown_optimizer_is_found_out_before_anything_is_written(wanted, plugins, tmp_path):
    with pytest.raises(UserError, match=r"Unknown optimizer 'adamv'.\n  fix: did you mean adamw"):
        Preparation.of(wanted("--optimizer=adamv"), plugins, write=True)
    assert not (tmp_path / "run").exists()
