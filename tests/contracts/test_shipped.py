"""Everything that is shipped keeps its contract: plugins, storages, families, strategies, optimizers, commands, and the fakes.

Plugins are enumerated: one that is added to the core or under plugins/ is under test before anyone writes a test for it.
"""

import json
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from io import BytesIO
from pathlib import Path
from tempfile import NamedTemporaryFile

import pyarrow.parquet
import pytest
import torch
from PIL import Image
from torch.distributed import checkpoint as dcp

from smalti.checkpoint import Snapshot, save
from smalti.config import resolve
from smalti.data import DatasetSpec
from smalti.data.storage.local import LocalStorage
from smalti.hookspecs import HookSpecs
from smalti.parallel import PortableState
from smalti.parallel.gloo import GlooCommunicator
from smalti.plugins import CacheFile, create, load_plugins, schema_of
from smalti.plugins.discovery import BUILT_IN
from smalti.types import World
from smalti_testing import MemoryStorage, TinyFamily, check_cache, check_checkpoint_format, check_metadata_backend
from smalti_testing.commands import COMMAND, CommandSubject
from smalti_testing.optimizers import OPTIMIZER, OptimizerSubject
from smalti_testing.plugins import PLUGIN, PluginSubject, environment_for
from smalti_testing.pytest import FamilyContract, StorageContract
from smalti_toy.family import ToyFamily, ToyShape
from support.forked_ranks import ForkedContract, forked_processes
from support.whole import some

ROOT = Path(__file__).parents[2]


def shipped() -> list[str]:
    """The built-in plugins, and the entry points of all packages of this repository."""
    projects = [tomllib.loads(path.read_text())["project"] for path in sorted(ROOT.glob("plugins/*/pyproject.toml"))]
    return [*BUILT_IN, *(name for project in projects for name in project.get("entry-points", {}).get("smalti.plugins", ()))]


@cache
def subject(name: str) -> PluginSubject:
    return PluginSubject(name)


EACH = [(name, check) for name in shipped() for check in PLUGIN.checks]
IN_A_PROCESS = ("it_sets_up_without_torch", "the_help_still_works")
"""What a process of its own sees of a plugin. Of all of them together: tests/unit/cli/test_entry.py."""
BEGUN = ("core", "diffusers", "deepspeed", "webui")
KEPT = [(name, check) for name, check in EACH if check not in IN_A_PROCESS or name in BEGUN]


@pytest.mark.parametrize(("name", "check"), some(EACH, *KEPT))
def test_a_shipped_plugin_keeps_the_contract(name, check):
    PLUGIN.run(check, subject(name))


OPTIMIZERS = [
    (name, entry.name)
    for name in shipped()
    if name != "deepspeed"  # its entries only hold the groups, until DeepSpeed makes the optimizer itself
    for entry in subject(name).answer(HookSpecs.register_optimizers) or ()
]


@pytest.fixture(scope="module")
def ranks():
    with forked_processes() as pair:
        yield pair


@pytest.mark.parametrize("check", OPTIMIZER.checks)
@pytest.mark.parametrize(("plugin", "optimizer"), OPTIMIZERS)
def test_a_shipped_optimizer_keeps_the_contract(plugin, optimizer, check, tmp_path, ranks):
    OPTIMIZER.run(check, OptimizerSubject(plugin, optimizer, folder=tmp_path, ranks=ranks))


REFUSED = {
    "commands": (("no-such-command",), ("config", "no-such-command"), ("train",), ("config", "explain", "no_such_option")),
    "cache": (("cache", "clear", "no-such-cache"),),
    "testing": (("plugin", "new", "Not A Name", "--kind=family"),),
}


WALKS = """
import json, os, sys, traceback
from io import StringIO
import pydantic, smalti.cli.pages.help, smalti.config, smalti.hookspecs, smalti.plugins.schema
from smalti_testing.command_walk import main

for line in sys.stdin:
    output, environment, asked = json.loads(line)
    if (process := os.fork()) == 0:
        try:
            os.environ.clear()
            os.environ.update(environment)
            sys.stdin, sys.stdout = StringIO(asked), open(output, "w")
            main()
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""
"""A process without torch, in which the core is imported once. From it the one that walks each plugin's commands is forked."""


@pytest.fixture(scope="module")
def walks() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WALKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.stdin.close()


@dataclass(frozen=True)
class Walked(CommandSubject):
    """As the kit has it, but for the start of a process."""

    walks: subprocess.Popen[str] | None = None

    @cached_property
    def seen(self) -> dict[str, object]:
        with NamedTemporaryFile("r") as output:
            self.walks.stdin.write(json.dumps([output.name, environment_for(self.plugin), json.dumps(self.asked())]) + "\n")
            self.walks.stdin.flush()
            assert self.walks.stdout.readline() == "0\n"
            return json.loads(output.read().splitlines()[-1])


@cache
def commands(plugin: str, walks: subprocess.Popen[str]) -> CommandSubject:
    refused = REFUSED.get(plugin, ())
    return CommandSubject(plugin, refused) if plugin == "commands" else Walked(plugin, refused, walks)


@pytest.mark.parametrize("check", COMMAND.checks)
@pytest.mark.parametrize(
    "plugin", ["commands", *(name for name in shipped() if "register_commands" in subject(name).info.hooks)]
)
def test_shipped_commands_keep_the_contract(plugin, check, walks):
    COMMAND.run(check, commands(plugin, walks))


class TestLocalStorage(StorageContract):
    def make(self, files, folder):
        for key, data in files.items():
            path = folder / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return LocalStorage(folder)


class TestMemoryStorage(StorageContract):
    def make(self, files, folder):
        return MemoryStorage(files)


class TestToyFamily(FamilyContract):
    def family(self):
        return ToyFamily(ToyShape(width=16, depth=2, heads=2))


class TestTinyFamily(FamilyContract):
    def family(self):
        return TinyFamily()


class TestOneProcess(ForkedContract):
    plugin = "ddp"
    ranks = 1


class TestReplicas(ForkedContract):
    plugin = "ddp"


# --- metadata backends, checkpoint formats, caches -------------------------------------------------------------------------


def picture(shade: int) -> bytes:
    held = BytesIO()
    Image.new("RGB", (8 + shade, 8), (shade, 0, 0)).save(held, "PNG")
    return held.getvalue()


def folder_of_images(folder: Path) -> None:
    for shade, name in enumerate(("b/x.png", "b-a.png", "a.png")):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(picture(shade))
        (folder / name).with_suffix(".txt").write_text(f"shade {shade}")


def json_lines(folder: Path) -> None:
    folder_of_images(folder)
    rows = ({"filename": name, "caption": name, "width": 8, "height": 8} for name in ("b/x.png", "a.png", "b-a.png"))
    (folder / "metadata.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def parquet_table(folder: Path) -> None:
    folder_of_images(folder)
    names = ["b/x.png", "a.png", "b-a.png"]
    table = pyarrow.table({"filename": names, "caption": names, "width": [8] * 3, "height": [8] * 3})
    pyarrow.parquet.write_table(table, folder / "metadata.parquet")


def tar_shard(folder: Path) -> None:
    with tarfile.open(folder / "a.tar", "w") as shard:
        for name, data in (("b.png", picture(1)), ("b.txt", b"two"), ("a.png", picture(2)), ("a.txt", b"one")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            shard.addfile(member, BytesIO(data))


BACKENDS = {"discovery": folder_of_images, "json": json_lines, "parquet": parquet_table, "webdataset": tar_shard}
WITH_A_SERVER = {"csv", "huggingface"}  # plugins/data/tests checks them


def registered(hook):
    return {entry.name: entry for name in shipped() for entry in subject(name).answer(hook) or ()}


def test_every_shipped_metadata_backend_is_checked():
    assert registered(HookSpecs.register_metadata_backends).keys() == BACKENDS.keys() | WITH_A_SERVER


@pytest.mark.parametrize("name", BACKENDS)
def test_a_shipped_metadata_backend_keeps_the_contract(name, tmp_path):
    BACKENDS[name](tmp_path)
    entry = registered(HookSpecs.register_metadata_backends)[name]
    spec = DatasetSpec(id="all", instance_data_dir=tmp_path, metadata_backend=name)
    check_metadata_backend(lambda: create(entry, entry.factory, spec, LocalStorage(tmp_path)))


def own_checkpoint(folder: Path) -> Path:
    state = PortableState(model={"w": torch.ones(2, 3)}, optimizer_state={}, param_groups=[{"lr": 0.1}], optimizer="SGD")
    snapshot = Snapshot(step=5, state=state, ema={}, trainer={"step": 5})
    return save(folder / "checkpoints", snapshot, GlooCommunicator(world=World(), group=None)).path


def of_torch(folder: Path) -> Path:
    dcp.save({"w": torch.ones(2, 3)}, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def of_accelerate(folder: Path) -> Path:
    (folder / "accelerate").mkdir()
    torch.save({"w": torch.ones(2, 3)}, folder / "accelerate" / "pytorch_model_fsdp.bin")
    return folder / "accelerate"


FORMATS = {"smalti": own_checkpoint, "dcp": of_torch, "accelerate-fsdp": of_accelerate}


def test_every_shipped_checkpoint_format_is_checked():
    found = registered(HookSpecs.register_checkpoint_formats)
    assert found.keys() == FORMATS.keys() | {"deepspeed"}  # plugins/deepspeed/tests/test_conversion.py checks it


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", FORMATS)
def test_a_shipped_checkpoint_format_keeps_the_contract(name, tmp_path):
    entry = registered(HookSpecs.register_checkpoint_formats)[name]
    checkpoint = FORMATS[name](tmp_path)
    (tmp_path / "room").mkdir()
    check_checkpoint_format(lambda folder: create(entry, entry.factory, folder), checkpoint, tmp_path / "room")


CACHES = {name: entry for name, entry in registered(HookSpecs.register_caches).items() if entry.factory}


@pytest.mark.parametrize("name", CACHES)
def test_a_shipped_cache_keeps_the_contract(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    settings = ()
    if CACHES[name].configured:
        flags = (f"--offload_param_path={tmp_path}", "--accelerate_config=none")
        settings = (resolve(schema_of(load_plugins()), flags, environment={}),)

    def fill(cache):
        if isinstance(cache, CacheFile):
            cache.put("key", 1)
        elif name == "compiled":
            Path(cache.place).mkdir(parents=True)
            (Path(cache.place) / "run-1").write_text("torch")
            (Path(cache.place) / "code.so").write_bytes(b"1234")
        else:
            swap = tmp_path / "zero_stage_3" / "bfloat16params" / "rank0"
            swap.mkdir(parents=True)
            (swap / "0_param.tensor.swp").write_bytes(b"1234")

    check_cache(lambda: create(CACHES[name], CACHES[name].factory, *settings), fill)
