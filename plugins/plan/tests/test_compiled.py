"""--compile=auto compiles where an earlier run has left its code, and says what it has done."""

from pathlib import Path

import pytest

from smalti.config import draft
from smalti.plugins import load_plugins, schema_of
from smalti_plan import compiled
from smalti_plan.compiled import BACKEND, CompiledCode, Keeping, completed, notice
from support.images import images_in
from support.warm_processes import warm_processes

AUTO = "--compile=auto"


@pytest.fixture
def config(tmp_path, monkeypatch):
    """config("--option=1", ...) -> the configuration of a run; what was compiled is kept in a folder of the test."""
    monkeypatch.setenv(compiled.FOLDER, str(tmp_path / "code"))
    schema = schema_of(load_plugins())

    def make(*words):
        made = draft(schema, ["--model_family=toy", "--use_cpu", *words], environment={})
        assert not made.problems
        return made

    return make


def leave_code(config, steps=3):
    keeping = Keeping(config, "cpu", notes=True)
    for _ in range(steps):
        keeping.step()


def backend(config):
    return completed(config).value("dynamo_backend")


def test_a_launch_compiles_once_a_run_with_its_settings_has_passed_its_first_steps(config):
    assert backend(config(AUTO)) is None
    assert "--dynamo_backend=inductor does" in notice(completed(config(AUTO)))
    leave_code(config("--dynamo_backend=inductor"), steps=2)
    assert backend(config(AUTO)) is None, "it may have failed in the first steps"
    leave_code(config("--dynamo_backend=inductor", "--learning_rate=1e-3", "--max_train_steps=7"))
    made = completed(config(AUTO))
    assert made.value("dynamo_backend") == BACKEND
    assert "with the code of an earlier run" in notice(made)
    assert backend(config()) is None
    assert notice(completed(config())) is None


@pytest.mark.parametrize(
    "words",
    [
        ("--resolution=96",),
        ("--train_batch_size=3",),
        ("--dynamo_mode=default", "--dynamo_backend=no"),
        ("--num_processes=2", "--num_machines=2"),
    ],
)
def test_other_settings_and_what_is_set_are_left_alone(config, words):
    leave_code(config("--dynamo_backend=inductor"))
    assert backend(config(AUTO, *words)) is None


def test_a_cleared_cache_compiles_nothing(config):
    leave_code(config("--dynamo_backend=inductor"))
    code = CompiledCode()
    foreign = Path(code.place) / "of-others"
    foreign.touch()
    assert code.clear().count == 1
    assert (code.entries(), code.size(), code.clear().count) == (0, 0, 0)
    assert foreign.exists(), "the folder is not smalti's own"
    assert backend(config(AUTO)) is None


def test_a_second_run_takes_the_code_of_the_first(tmp_path):
    images = images_in(tmp_path / "images", 4, (16, 16))
    options = {"model_family": "toy", "instance_data_dir": images, "resolution": 16, "resolution_type": "pixel"}
    options |= {"toy_width": 8, "toy_depth": 1, "toy_heads": 1, "max_train_steps": 3, "mixed_precision": "no"}
    options |= {"checkpoint_step_interval": 0, "without": "plots"}
    variables = {compiled.FOLDER: str(tmp_path / "code"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}

    def run(name, *more):
        words = [f"--{key}={value}" for key, value in {**options, "output_dir": tmp_path / name}.items()]
        code, output, *_ = warm_processes().train([*words, "--use_cpu", *more], variables)
        assert code == 0, output
        return output, sorted(path.relative_to(tmp_path) for path in (tmp_path / "code").rglob("*.so"))

    first, made = run("first", "--dynamo_backend=inductor")
    assert made
    assert AUTO not in first
    second, found = run("second", AUTO)
    assert "--compile=auto: compiled, with the code of an earlier run" in second
    assert found == made, "nothing was compiled again"
