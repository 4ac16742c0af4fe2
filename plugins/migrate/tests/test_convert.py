"""Converting checkpoints: what comes out, what is refused, and what happens in the process that reads a foreign one."""

import json
import os

import pytest
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import load_file

from smalti import CheckpointFormat, hookimpl
from smalti.checkpoint import Contents, ConversionError
from smalti.checkpoint.format.manifest import SUSPECT, read_manifest
from smalti.checkpoint.format.safetensors_layout import StoredTensor
from smalti.checkpoint.format.verification import verify
from smalti.checkpoint.reader import load
from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.writer import save
from smalti.cli.entry import smalti
from smalti.errors import CheckpointError, ExitCode, MissingPlugin, UserError
from smalti.hookspecs import HookSpecs
from smalti.parallel.gloo import GlooCommunicator
from smalti.parallel.state import PortableState
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.registry import PluginInfo, Plugins
from smalti.types import World
from smalti_migrate.checkpoints.convert import convert, detect_format
from smalti_migrate.checkpoints.external import decoded, encoded
from support.commands import commands
from support.limits import files_limited_to

ALONE = GlooCommunicator(world=World(), group=None)
WEIGHTS = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2).bfloat16()}
TRAINER = {"step": 5, "position": 6}


def snapshot(fill=None):
    """A state with everything in it; with `fill`, every number in it is that."""

    def filled(tensor):
        return tensor.clone() if fill is None else torch.full_like(tensor, fill)

    moments = {"w": {"exp_avg": filled(torch.rand(2, 3)), "step": filled(torch.tensor(5.0))}}
    state = PortableState(
        model={name: filled(tensor) for name, tensor in WEIGHTS.items()},
        optimizer_state=moments,
        param_groups=[{"lr": 0.1}],
        optimizer="AdamW",
    )
    ema = {"w": filled(WEIGHTS["w"] * 2)}
    config = '{"_class_name": "Model"}'
    return Snapshot(step=5, state=state, ema=ema, trainer=TRAINER, plugins=("a 1",), model_config=config, flags=(SUSPECT,))


@pytest.fixture
def source(tmp_path):
    return save(tmp_path / "run" / "checkpoints", snapshot(), ALONE).path


@pytest.fixture
def plugins() -> Plugins:
    """Newly loaded, so that a test may add its own."""
    return load_plugins(Selection(only=("migrate",)))


@pytest.fixture
def formats(plugins):
    return plugins.gather(HookSpecs.register_checkpoint_formats)


# --- checkpoints of smalti ------------------------------------------------------------------------------------------


def test_plain_safetensors_hold_the_weights_and_the_config(tmp_path, source, formats):
    done = convert(source, tmp_path / "plain", formats, to="safetensors")
    found = load_file(tmp_path / "plain" / "diffusion_pytorch_model.safetensors")
    assert {name: found[name].tolist() for name in found} == {name: tensor.tolist() for name, tensor in WEIGHTS.items()}
    assert json.loads((tmp_path / "plain" / "config.json").read_text()) == {"_class_name": "Model"}
    assert (done.step, done.tensors, done.files) == (5, 2, ("config.json", "diffusion_pytorch_model.safetensors"))


def test_the_averaged_weights_take_the_place_of_those_that_were_averaged(tmp_path, source, formats):
    convert(source, tmp_path / "plain", formats, to="safetensors", use_ema=True)
    found = load_file(tmp_path / "plain" / "diffusion_pytorch_model.safetensors")
    assert {name: found[name].tolist() for name in found} == {"w": (WEIGHTS["w"] * 2).tolist(), "b": [1, 1]}


def test_a_checkpoint_of_smalti_made_from_one_is_the_same(tmp_path, source, formats):
    convert(source, tmp_path / "again", formats)
    first, second = snapshot(fill=0), snapshot(fill=0)
    trainers = [load(path, target, ALONE).trainer for path, target in ((source, first), (tmp_path / "again", second))]
    assert all(torch.equal(tensor, second.tensors()[name]) for name, tensor in first.tensors().items())
    assert trainers == [TRAINER, TRAINER]
    assert read_manifest(tmp_path / "again").flags == (SUSPECT,)


def test_progress_is_told_up_to_the_last_byte(tmp_path, source, formats):
    told = []
    convert(source, tmp_path / "plain", formats, to="safetensors", progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (28, 28)


def test_a_source_that_is_damaged_is_refused(tmp_path, source, formats):
    file = next((source / "model").iterdir())
    file.write_bytes(file.read_bytes()[:-1] + b"\x07")
    with pytest.raises(CheckpointError, match="does not match its digest"):
        convert(source, tmp_path / "plain", formats)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_target_that_is_there_is_left_alone(tmp_path, source, formats):
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="already exists, and nothing is overwritten"):
        convert(source, tmp_path / "there", formats)
    assert list((tmp_path / "there").iterdir()) == []


def test_averages_that_are_not_there_are_asked_for_in_vain(tmp_path, formats):
    bare = save(tmp_path / "bare", Snapshot(step=1, state=PortableState(model=WEIGHTS)), ALONE).path
    with pytest.raises(UserError, match="has no EMA weights"):
        convert(bare, tmp_path / "plain", formats, to="safetensors", use_ema=True)


def test_the_name_of_a_step_must_be_that_of_the_checkpoint(tmp_path, source, formats):
    with pytest.raises(UserError, match="a checkpoint of step 5 cannot have the name step-00000006"):
        convert(source, tmp_path / "step-00000006", formats)


def test_a_full_disk_leaves_nothing_and_is_no_wrong_call(tmp_path, formats):
    large = save(tmp_path / "run", Snapshot(step=1, state=PortableState(model={"w": torch.ones(50_000)})), ALONE).path
    with files_limited_to(100_000), pytest.raises(ConversionError, match="File too large") as caught:
        convert(large, tmp_path / "plain", formats)
    assert (caught.value.exit_code, [path.name for path in tmp_path.iterdir()]) == (ExitCode.FAILED, ["run"])


# --- telling formats apart ------------------------------------------------------------------------------------------


def test_what_no_format_recognises_is_told_with_what_was_looked_for(tmp_path, formats):
    with pytest.raises(CheckpointError, match=r"smalti \(smalti's own\): manifest\.json") as caught:
        detect_format(tmp_path, formats)
    assert "smalti-fsdp2 reads what torch and Accelerate save" in caught.value.fix


@pytest.mark.parametrize("mark", [".metadata", "pytorch_model_fsdp.bin", "step_3/mp_rank_00_model_states.pt"])
def test_a_format_whose_package_is_not_installed_names_the_package(tmp_path, formats, mark, monkeypatch):
    monkeypatch.setattr("smalti.config.known_packages.installed", lambda name: False)
    (tmp_path / mark).parent.mkdir(exist_ok=True)
    (tmp_path / mark).touch()
    with pytest.raises(MissingPlugin) as caught:
        detect_format(tmp_path, formats)
    assert caught.value.fix.startswith("pip install ")
    wanted = "deepspeed" if "mp_rank" in mark else "fsdp2"
    assert wanted in [word.rpartition("/")[2] for word in caught.value.fix.split()]


def test_a_folder_of_two_formats_is_taken_for_neither(tmp_path):
    (tmp_path / "x").touch()
    twins = [CheckpointFormat(name=name, title="", marks=("x",), factory="") for name in ("one", "two")]
    with pytest.raises(CheckpointError, match="of one and two at once"):
        detect_format(tmp_path, twins)


# --- formats of plugins ---------------------------------------------------------------------------------------------

READER = """
import os
from smalti import CheckpointError
from smalti.checkpoint import Contents, StoredTensor


class Reader:
    def __init__(self, folder):
        self.kind = (folder / "counting").read_text()
        if self.kind == "refused":
            raise CheckpointError("it is too old", fix="count again")
        if self.kind == "broken":
            {}["missing"]
        print("words that are in nobody's way")
        types = {"torch": "torch.bfloat16", "numpy": "float32", "strange": "words"}
        tensor = StoredTensor(dtype=types.get(self.kind, "U8"), shape=(4,), chunks=1)
        self.contents = Contents(tensors={"model/count": tensor}, step=4, notices=("counted by hand",))

    def read(self, name):
        if self.kind == "crash":
            os.abort()
        yield b"" if self.kind == "short" else bytes([1, 2])
        yield bytes([3, 4])
"""


class Counting:
    @hookimpl
    def register_checkpoint_formats(self):
        return [CheckpointFormat(name="counting", title="Counting", marks=("counting",), factory="counting_reader:Reader")]


@pytest.fixture
def count(plugins, tmp_path, monkeypatch):
    """Convert a checkpoint in the format of a plugin; `kind` is what is special about it."""
    plugins.register(PluginInfo(name="counting", distribution="smalti-counting", version="1"), Counting())
    (tmp_path / "counting_reader.py").write_text(READER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    (tmp_path / "foreign").mkdir()

    def go(kind):
        (tmp_path / "foreign" / "counting").write_text(kind)
        return convert(tmp_path / "foreign", tmp_path / "target", plugins.gather(HookSpecs.register_checkpoint_formats))

    return go


@pytest.mark.parametrize(("kind", "right"), [("torch", "'BF16'"), ("numpy", "'F32'"), ("strange", "one of BOOL, U8, ")])
def test_a_type_that_there_is_not_names_the_plugin_and_the_right_one(count, kind, right):
    with pytest.raises(CheckpointError, match="the checkpoint format 'counting' of plugin 'counting'") as caught:
        count(kind)
    assert "model/count" in caught.value.message
    assert f"its StoredTensor needs dtype={right}" in caught.value.fix
    assert "--without counting" in caught.value.fix


def test_hook_register_checkpoint_formats_gives_a_reader_that_works_in_a_process_of_its_own(count):
    done = count("sound")
    assert (done.source_format, done.step, done.notices) == ("counting", 4, ("counted by hand",))
    assert load_file(done.path / "model" / "rank-00000-part-00000.safetensors")["count"].tolist() == [1, 2, 3, 4]
    assert verify(done.path).ok


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("refused", "it is too old"),
        ("broken", "cannot be read: KeyError: 'missing'"),
        ("crash", "cannot be read: "),
        ("short", "model/count does not have the size of its shape"),
    ],
)
def test_a_reader_that_fails_is_told_and_leaves_nothing(count, tmp_path, kind, told):
    with pytest.raises(CheckpointError) as caught:
        count(kind)
    assert told in caught.value.message
    assert [path.name for path in tmp_path.iterdir() if "target" in path.name] == []


# --- the command ----------------------------------------------------------------------------------------------------


def call(*arguments):
    return CliRunner().invoke(smalti, ["checkpoint", "convert", *map(str, arguments)])


def test_a_run_stands_for_its_newest_checkpoint_and_the_way_on_is_told(tmp_path, source):
    done = call(source.parents[1], "--to", tmp_path / "new")
    assert done.exit_code == 0, done.output
    assert f"{tmp_path / 'new'}: step 5 from smalti, 5 tensors" in done.output
    assert f"--resume_from_checkpoint={tmp_path / 'new'}" in done.output


def test_the_command_tells_machines_what_it_made(tmp_path, source):
    done = call(source, "--to", tmp_path / "new", "--format=safetensors", "--ema", "--json")
    told = json.loads(done.stdout)
    assert (told["path"], told["format"], told["source_format"], told["tensors"]) == (
        str(tmp_path / "new"),
        "safetensors",
        "smalti",
        2,
    )


def test_averages_are_no_choice_for_a_checkpoint_that_keeps_both(tmp_path, source, capsys):
    code, _, errors = commands(capsys)("checkpoint", "convert", source, "--to", tmp_path / "new", "--ema")
    assert (code, "--ema needs --format=safetensors" in errors) == (2, True)


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
stored = st.builds(
    StoredTensor,
    dtype=st.sampled_from(["F32", "BF16"]),
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    chunks=st.just(1),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.builds(
        Contents,
        tensors=st.dictionaries(names, stored, max_size=3),
        step=st.integers(0, 9),
        optimizer=names,
        param_groups=st.lists(st.dictionaries(names, st.integers() | names, max_size=2), max_size=2),
        model_config=st.none() | st.dictionaries(names, names, max_size=2),
        flags=st.lists(names, max_size=2).map(tuple),
        notices=st.lists(names, max_size=2).map(tuple),
    )
)
def test_contents_come_over_to_another_process_as_they_were(contents):
    assert decoded(encoded(contents)) == contents
