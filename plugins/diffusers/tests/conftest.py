"""A data set of a few pictures, and real runs on tiny pipelines."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from adapters import Adapter, make_adapter
from diffusers.models.transformers import transformer_cosmos
from kinds import EVERY
from pictured import PROMPT
from torch.nn.functional import interpolate

from smalti.config.resolution import resolve
from smalti.plugins.discovery import load_plugins
from smalti.plugins.lookup import find_family
from smalti.plugins.schema import schema_of
from support.images import images_in
from support.warm_processes import warm_processes

OPTIONS = {
    "resolution": 16,
    "resolution_type": "pixel",
    "train_batch_size": 4,
    "mixed_precision": "no",
    "learning_rate": 1e-2,
    "max_train_steps": 2,
    "checkpoint_step_interval": 0,
    "validation_step_interval": 2,
    "validation_prompt": PROMPT,
    "validation_num_inference_steps": 2,
    "use_cpu": True,
}


@pytest.fixture(scope="session")
def adapter(tmp_path_factory):
    """adapter(FAMILY) -> a tiny trained adapter and its base, made once. Tests must not write into them."""
    made: dict[str, Adapter] = {}

    def of(name: str) -> Adapter:
        if name not in made:
            made[name] = make_adapter(tmp_path_factory.mktemp(name), name)
        return made[name]

    return of


@pytest.fixture(scope="session")
def pictures(tmp_path_factory) -> Path:
    """Four pictures with captions."""
    return images_in(tmp_path_factory.mktemp("pictures"), 4, (16, 16))


@pytest.fixture(scope="session")
def train(pictures):
    """A run to its end: train(directory, option=value ...) gives the exit code and the output. None leaves an option out."""

    def start(directory: Path, **options) -> tuple[int, str]:
        values = {**OPTIONS, "instance_data_dir": pictures, "output_dir": directory, **options}
        words = [f"--{name}={value}" for name, value in values.items() if value is not None]
        return warm_processes().train(words, {"HF_HOME": str(directory.parent / "hf"), "SMALTI_CONTEXT_PARALLEL_ON_CPU": "1"})

    return start


class Transforms:
    """What diffusers' own transformer takes from torchvision, for a mask that is the same everywhere."""

    InterpolationMode = type("InterpolationMode", (), {"NEAREST": "nearest"})

    class functional:  # noqa: N801
        @staticmethod
        def resize(mask, size, interpolation):
            return interpolate(mask, size, mode=interpolation)


@pytest.fixture(scope="module")
def torchvision():
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("torchvision") is None:
            patch.setattr(transformer_cosmos, "transforms", Transforms, raising=False)
        yield


@pytest.fixture(scope="session")
def family_of(tmp_path_factory):
    """family_of(kind, "--flag=1", ...) -> the family over a tiny pipeline, which is made once."""
    plugins, folders = load_plugins(), {}
    schema, root = schema_of(plugins), tmp_path_factory.mktemp("pipelines")

    def give(kind, *flags):
        name, make, more = EVERY[kind]
        if kind not in folders:
            with torch.random.fork_rng():
                torch.manual_seed(len(kind))  # the same weights whichever tests run before
                folders[kind] = make(root / kind.replace(" ", "-"), **more)
        given = (f"--model_family={name}", f"--pretrained_model_name_or_path={folders[kind]}", *flags)
        return find_family(resolve(schema, given, environment={}), plugins)

    return give
