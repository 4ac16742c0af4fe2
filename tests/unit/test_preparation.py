"""What happens before any worker exists."""

import json
from pathlib import Path

import pytest
from PIL import Image

from smalti import DistributedPlan, FamilyEntry, hookimpl
from smalti.dataplan import CacheFolders, cache_folders
from smalti.errors import PreflightError, UserError
from smalti.plugins import PluginInfo
from smalti.preparation import Preparation
from smalti.testing import TinyFamily


class Sharing:
    """A strategy whose ranks share the tokens of a sample, and a family that does not say where they can be split."""

    @hookimpl
    def register_model_families(self):
        return [FamilyEntry(name="whole", title="whole", factory=f"{__name__}:whole")]

    @hookimpl
    def configure_distributed(self):
        return DistributedPlan(name="sharing", title="sharing", parallel="nowhere:at_all", context=2)


def whole(config):
    return TinyFamily()


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


def test_a_family_that_cannot_share_tokens_is_refused_before_anything_is_written(wanted, plugins, tmp_path):
    plugins.register(PluginInfo(name="sharing", distribution="sharing", version="1.0"), Sharing())
    with pytest.raises(UserError, match="tiny cannot be trained with context parallelism"):
        Preparation.of(wanted("--model_family=whole", "--num_processes=2"), plugins, write=True)
    assert not (tmp_path / "run").exists()


def test_an_unknown_optimizer_is_found_out_before_anything_is_written(wanted, plugins, tmp_path):
    with pytest.raises(UserError, match=r"Unknown optimizer 'adamv'.\n  fix: did you mean adamw"):
        Preparation.of(wanted("--optimizer=adamv"), plugins, write=True)
    assert not (tmp_path / "run").exists()


def test_entries_of_caches_that_do_nothing_are_told(configure, plugins, tmp_path, write):
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / "pictures/a.png")
    pictures = {"id": "a", "instance_data_dir": str(tmp_path / "pictures"), "caption_strategy": "filename"}
    texts = {"dataset_type": "text_embeds", "cache_dir": "texts"}
    entries = [{**pictures, "cache_dir_vae": "c"}, {"id": "te", **texts, "default": True}, {"id": "more", **texts}]
    data = write("data.json", json.dumps(entries))
    flags = ("--model_family=toy", "--max_train_steps=1", "--resolution=16", "--use_cpu", f"--output_dir={tmp_path / 'run'}")
    config = configure(*flags, f"--data_backend_config={data}")
    [notice] = Preparation.of(config, plugins, write=False).notices
    assert "without effect: more;" in notice
    assert cache_folders(config, plugins) == CacheFolders(texts=Path("texts").absolute(), latents={"a": Path("c").absolute()})
