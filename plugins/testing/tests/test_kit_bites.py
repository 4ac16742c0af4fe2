"""The contracts refuse what is wrong: one small fault at a time, and the check that has to find it."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist

from smalti.data import StoredFile
from smalti.diffusion import build_objective
from smalti.models import SeededWeights
from smalti_testing import BrokenContract, MemoryStorage, TinyFamily, check_storage
from smalti_testing.families import FAMILY
from smalti_testing.family_subject import FamilySubject
from smalti_testing.plugins import PLUGIN, PluginSubject
from smalti_testing.pytest import StorageContract
from smalti_testing.storages import STORAGE, StorageSubject
from smalti_testing.strategies import on_rank
from smalti_testing.tiny import TinyModel
from support.forked_ranks import forked_processes


def test_the_kit_is_imported_without_torch_and_pytest_and_shows_its_names():
    script = "import sys, smalti_testing as kit; print(sorted({'torch', 'pytest'} & set(sys.modules)), dir(kit) == kit.__all__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] True"


def test_a_storage_is_checked_without_torch_and_pytest():
    script = """import sys
from smalti_testing import MemoryStorage, check_storage
check_storage(lambda files, folder: MemoryStorage(files))
print(sorted({"torch", "pytest"} & set(sys.modules)))"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- storages -------------------------------------------------------------------------------------------------------


class Unsorted(MemoryStorage):
    def list(self, prefix="", *, after=""):
        yield from sorted(super().list(prefix, after=after), key=lambda file: (file.key.count("/"), file.key))


class Foldered(MemoryStorage):
    def list(self, prefix="", *, after=""):
        yield from super().list(f"{prefix}/" if prefix else "", after=after)


class StartsAtTheKey(MemoryStorage):
    def list(self, prefix="", *, after=""):
        yield from (file for file in super().list(prefix) if file.key >= after)


class KeepsDeleted(MemoryStorage):
    deletes = True

    def delete(self, key):
        self.write(key, b"")


class Replaces(MemoryStorage):
    creates_once = True

    def create(self, key, data):
        self.write(key, data)
        return True


class CutsTransfers(MemoryStorage):
    def upload(self, path, key):
        self.write(key, path.read_bytes()[:1_000_000])

    def download(self, key, path):
        path.write_bytes(self.read(key))


class ColumnsWithoutPrefix(MemoryStorage):
    def list_columns(self, prefix="", *, after=""):
        return super().list_columns(after=after)


class SizedEtags(MemoryStorage):
    def stat(self, key):
        return StoredFile(key=key, size=len(self.read(key)), etag=str(len(self.read(key))))


class PlainErrors(MemoryStorage):
    def read(self, key):
        return self._files[key]


class PaddedRanges(MemoryStorage):
    def read_range(self, key, start, length):
        return super().read_range(key, start, length).ljust(length, b"\0")


class SlowWrites(MemoryStorage):
    def write(self, key, data):
        for end in range(0, len(data) + 1, 50_000):
            super().write(key, data[:end])
            time.sleep(0.001)


STORAGES = {
    Unsorted: "it_lists_all_files_sorted_by_whole_key",
    Foldered: "a_prefix_is_text_and_no_folder",
    SizedEtags: "an_etag_changes_with_the_content",
    PlainErrors: "a_missing_file_raises_missing_file_error",
    PaddedRanges: "a_range_ends_at_the_end_of_the_file",
    SlowWrites: "a_reader_never_sees_half_a_write",
    StartsAtTheKey: "a_list_can_start_after_a_key",
    KeepsDeleted: "a_deleted_file_is_gone",
    Replaces: "a_file_is_created_only_once",
    CutsTransfers: "whole_files_are_transferred",
    ColumnsWithoutPrefix: "columns_are_the_same_list",
}


@pytest.mark.parametrize("kind", STORAGES)
def test_a_faulty_storage_is_found(kind, tmp_path):
    subject = StorageSubject(make=lambda files, folder: kind(files), root=tmp_path)
    with pytest.raises((BrokenContract, KeyError)):
        STORAGE.run(STORAGES[kind], subject)


def test_what_fails_says_what_the_check_is_for_and_how_to_mend_it():
    with pytest.raises(BrokenContract) as raised:
        check_storage(lambda files, folder: Unsorted(files))
    assert "Sort by the whole key as text" in raised.value.__notes__[0]


def test_a_storage_that_says_it_cannot_write_must_not_write(tmp_path):
    subject = StorageSubject(make=lambda files, folder: MemoryStorage(files), root=tmp_path, writes=False)
    with pytest.raises(BrokenContract, match="did not raise StorageError"):
        STORAGE.run("what_was_written_is_there_at_once", subject)


def test_a_check_that_is_overridden_is_found():
    class Cheating(StorageContract):
        def test_an_empty_storage_lists_nothing(self):
            pass

    with pytest.raises(AssertionError, match="overridden: test_an_empty_storage_lists_nothing"):
        Cheating().test_no_check_is_overridden()


def test_an_exemption_from_what_is_no_check_is_found():
    class Careless(StorageContract):
        exempt = MappingProxyType({"it_flies": "it does not"})

    with pytest.raises(AssertionError, match="it_flies"):
        Careless().test_no_check_is_overridden()


# --- families -------------------------------------------------------------------------------------------------------


class Forgetful(TinyFamily):
    def encode_captions(self, captions):
        return {"words": torch.randint(0, 30, (len(captions),))}


class Deaf(TinyFamily):
    def forward(self, model, noisy, timesteps, conditioning):
        return model(noisy, timesteps, torch.zeros_like(conditioning["words"]))


class Timeless(TinyFamily):
    def forward(self, model, noisy, timesteps, conditioning):
        return model(noisy, torch.zeros_like(timesteps), conditioning["words"])


class Echoing(TinyFamily):
    def encode_size_conditioning(self, size_conditioning, width, height):
        return {"words": torch.zeros(len(size_conditioning))}


class Sociable(TinyFamily):
    def forward(self, model, noisy, timesteps, conditioning):
        return super().forward(model, noisy - noisy.mean(0), timesteps, conditioning)


class Meddling(TinyFamily):
    def forward(self, model, noisy, timesteps, conditioning):
        return super().forward(model, noisy.mul_(2), timesteps, conditioning)


class Unseeded(TinyFamily):
    def weights(self, seed):
        return super().weights(int(torch.randint(2**31, ())))


class Unnamed(TinyFamily):
    def weights(self, seed):
        return SeededWeights(lambda: torch.nn.ModuleDict({"model": self.build_model()}), seed)


class Eager(TinyFamily):
    def build_model(self):
        model = super().build_model()
        model.leave._parameters["bias"] = torch.nn.Parameter(torch.zeros(3))
        return model


class Idle(TinyFamily):
    class Model(TinyModel):
        def __init__(self, width, depth):
            super().__init__(width, depth)
            self.spare = torch.nn.Linear(2, 2)

    def build_model(self):
        return self.Model(self.width, self.depth)


class Lucky(TinyFamily):
    def sample(self, model, request):
        return torch.rand(len(request.prompts), 3, request.height, request.width)


class Unmoved(TinyFamily):
    """It encodes prompts again, whatever it is given."""

    def request_conditioning(self, request):
        return super().request_conditioning(replace(request, conditioning=None))

    def encoder_identity(self, kind):
        return {}

    def release_encoder(self, kind):
        pass


class Unscaled(TinyFamily):
    def raw_latents(self, pixels):
        return self.encode_images(pixels)

    def normalise_latents(self, raw):
        return 2 * raw


class Misnamed(TinyFamily):
    def block_classes(self):
        return ("TinyBlok",)


class Boasting(TinyFamily):
    def flops_per_sample(self, width, height):
        return 3 * super().flops_per_sample(width, height)


class Skewed(TinyFamily):
    """It trains with linear betas, and samples with those of Stable Diffusion."""

    prediction = "epsilon"
    beta_schedule = "linear"

    def sample(self, model, request):
        return super().sample(model, replace(request, objective=build_objective("epsilon")))


class Mistaken(TinyFamily):
    """It trains velocities, and samples as if they were noise."""

    prediction = "v_prediction"

    def sample(self, model, request):
        return super().sample(model, replace(request, objective=build_objective("epsilon")))


class Mistargeted(TinyFamily):
    def lora_targets(self):
        return ("nowhere",)

    def adapter(self, seed):
        return None


class Stubborn(TinyFamily):
    """Its adapter, which is the model itself, has one strength."""

    def lora_targets(self):
        return ()

    def adapter(self, seed):
        return {}

    def adapter_strength(self, model, strength):
        return nullcontext()


FAMILIES = {
    Stubborn: "its_adapter_can_be_weaker",
    Skewed: "it_samples_with_the_objective_that_is_trained",
    Mistaken: "it_samples_with_the_objective_that_is_trained",
    Forgetful: "captions_mean_the_same_each_time",
    Deaf: "the_caption_and_the_time_matter",
    Timeless: "the_caption_and_the_time_matter",
    Echoing: "size_conditioning_has_rows_and_names_of_its_own",
    Sociable: "a_prediction_does_not_depend_on_its_neighbours",
    Meddling: "the_prediction_has_the_shape_of_its_input",
    Unseeded: "its_first_weights_are_a_function_of_the_seed",
    Unnamed: "its_weights_fit_its_model",
    Eager: "it_builds_a_model_without_weights",
    Idle: "every_parameter_that_trains_gets_a_gradient",
    Lucky: "an_image_depends_on_its_prompt_and_seed_alone",
    Unmoved: "an_image_is_sampled_from_what_was_encoded_before",
    Unscaled: "stored_latents_become_those_of_every_step",
    Misnamed: "its_blocks_and_adapter_targets_are_in_the_model",
    Mistargeted: "its_blocks_and_adapter_targets_are_in_the_model",
    Boasting: "its_flops_are_those_that_torch_counts",
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_faulty_family_is_found(kind):
    with pytest.raises(BrokenContract):
        FAMILY.run(FAMILIES[kind], FamilySubject(kind()))


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample", "flow_matching"])
@pytest.mark.parametrize("schedule", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_a_family_that_samples_as_it_trains_is_taken(prediction, schedule):
    family = TinyFamily()
    family.prediction, family.beta_schedule = prediction, schedule
    FAMILY.run("it_samples_with_the_objective_that_is_trained", FamilySubject(family))


# --- plugins --------------------------------------------------------------------------------------------------------


def install(folder: Path, body: str, requires: str = "smalti>=0.2,<0.3") -> None:
    """A package on the path with one plugin, `faulty`, whose class has this body."""
    info = folder / "smalti_faulty-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: smalti-faulty\nVersion: 1.0\nRequires-Dist: {requires}\n")
    (info / "entry_points.txt").write_text("[smalti.plugins]\nfaulty = smalti_faulty:plugin\n")
    (folder / "smalti_faulty.py").write_text(f"{HEAD}\nclass Faulty:\n{body}\n\nplugin = Faulty()\n")


@contextmanager
def installed(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch, requires: str = "smalti>=0.2,<0.3"):
    """The faulty plugin, on the path of this process and of those that it starts."""
    install(folder / "site", body, requires)
    monkeypatch.syspath_prepend(folder / "site")
    monkeypatch.setenv("PYTHONPATH", str(folder / "site"))
    try:
        yield PluginSubject("faulty")
    finally:
        sys.modules.pop("smalti_faulty", None)


HEAD = "from smalti import *\n"
OPTIONS = """
    class Mine(Options):
        {field}

    @hookimpl
    def declare_options(self):
        return [OptionGroup(name="faulty", title="Faulty", options=self.Mine)]
"""
ENTRY = """
    @hookimpl
    def register_storage(self):
        return [StorageEntry(name="{name}", title="A place", factory="{factory}")]
"""
CHECK = "    @hookimpl\n    def check_config(self, config):\n        "

PLUGINS = {
    "unmarked": ("every_hook_that_it_defines_is_marked", CHECK + "return []\n    def on_step_end(self, state):\n        pass"),
    "heavy": ("it_sets_up_without_torch", "    import torch\n" + CHECK + "return []"),
    "mistyped": ("it_is_installed_and_active", CHECK.replace("check_config", "check_konfig") + "return []"),
    "misnamed argument": ("it_is_installed_and_active", CHECK.replace("config)", "settings)") + "return []"),
    "default argument": ("its_hooks_take_arguments_of_the_right_names", CHECK.replace("config)", "config=None)") + "return []"),
    "help": ("its_options_are_declared_well", OPTIONS.format(field='faulty_x: int = option(1, help="no sentence")')),
    "level": ("its_options_are_declared_well", OPTIONS.format(field='faulty_x: int = option(1, help="It is.", level="hard")')),
    "condition": (
        "its_options_are_declared_well",
        OPTIONS.format(field='faulty_x: int = option(1, help="It is.", when="y == 2")'),
    ),
    "twice": ("it_registers_nothing_twice", OPTIONS.format(field='learning_rate: float = option(1.0, help="It is.")')),
    "local": ("it_registers_nothing_twice", ENTRY.format(name="local", factory="smalti.data.storage.local:open_local")),
    "nowhere": (
        "what_it_registers_can_be_found_and_imported",
        ENTRY.format(name="far", factory="smalti.data.storage.local:opne"),
    ),
    "capital": (
        "what_it_registers_can_be_found_and_imported",
        ENTRY.format(name="S4", factory="smalti.data.storage.protocol:Storage"),
    ),
    "unopened": (
        "what_it_registers_can_be_found_and_imported",
        ENTRY.format(name="far", factory='smalti.data.storage.protocol:Storage", schemes=("far",), open_run="nowhere'),
    ),
    "raising": ("it_finds_its_way_in_a_configuration_that_says_nothing", CHECK + "return config.value('output_dir').name"),
    "no fix": ("it_finds_its_way_in_a_configuration_that_says_nothing", CHECK + "return [Problem(message='bad')]"),
    "greedy": (
        "it_claims_no_run_that_did_not_ask_for_it",
        CHECK.replace("check_config", "configure_distributed")
        + "return DistributedPlan(name='faulty', title='Faulty', parallel='smalti.training.ddp_parallel:DdpParallel')",
    ),
    "optimizer that does not take what it says": (
        "its_optimizers_can_be_built",
        "    @hookimpl\n    def register_optimizers(self):\n"
        "        return [OptimizerEntry(name='lbfgs', title='L-BFGS', factory='torch.optim:LBFGS')]",
    ),
    "failing command": (
        "the_help_still_works",
        "    @hookimpl\n    def register_commands(self, commands):\n        import click\n"
        "        commands.add_command(click.Command('train'))",
    ),
}


@pytest.mark.parametrize("fault", PLUGINS)
def test_a_faulty_plugin_is_found(fault, tmp_path, monkeypatch):
    check, body = PLUGINS[fault]
    with installed(tmp_path, body, monkeypatch) as subject, pytest.raises((Exception,)) as raised:
        PLUGIN.run(check, subject)
    assert check in raised.value.__notes__[-1]


def test_a_package_that_takes_any_smalti_is_found(tmp_path, monkeypatch):
    faulty, complaint = installed(tmp_path, CHECK + "return []", monkeypatch, requires="smalti>=0.1"), "takes any later smalti"
    with faulty as subject, pytest.raises(BrokenContract, match=complaint):
        PLUGIN.run("its_package_says_which_smalti_it_needs", subject)


# --- strategies -----------------------------------------------------------------------------------------------------

STRATEGIES = {
    "Unaveraged": "steps_are_those_of_one_process",
    "Unscaled": "steps_are_those_of_one_process",
    "OwnNorm": "the_norm_is_that_of_the_whole_gradient",
    "OwnValues": "values_are_clipped_one_by_one",
    "Hopeful": "the_mean_is_over_ranks_and_keeps_what_is_not_finite",
    "Backwards": "gather_gives_every_ranks_tensor_in_order",
    "Rounding": "the_largest_code_is_agreed_on",
    "Impatient": "a_barrier_waits_for_everyone",
    "Hoarding": "discarded_gradients_are_gone",
    "Clinging": "weights_that_are_replaced_are_used_at_once",
    "Amnesiac": "a_restored_state_continues_bit_for_bit",
    "Crowded": "a_rank_that_saves_alone_has_the_full_state",
    "Prefixed": "it_fills_the_model_with_the_first_weights",
}


def caught(folder):
    """On each rank: the faults that were found, all in one launch."""
    found = []
    for fault, check in STRATEGIES.items():
        try:
            on_rank(check, "faulty_strategies", (f"--strategy_fault={fault}",), 2, folder)
        except BrokenContract:
            found.append(fault)
        dist.barrier()  # a fault may be seen on one rank only
    return found


def test_every_faulty_strategy_is_found_by_some_rank(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "faulty"), prepend=os.pathsep)
    with forked_processes(group=False) as pair:
        one, other = pair.run(caught, tmp_path)
    assert set(one) | set(other) == set(STRATEGIES)
