"""What happens before any worker exists."""

import json

import pytest
from PIL import Image

from smalti import DistributedPlan, FamilyEntry, hookimpl
from smalti.config import resolve
from smalti.errors import ConfigError, ExitCode, MissingPlugin, PreflightError, UserError
from smalti.launch.preflight import Preparation
from smalti.plugins import Selection, load_plugins, schema_of
from smalti.plugins.registry import PluginInfo
from smalti.training import Term, Turn
from smalti_testing import TinyFamily


class Sharing:
    """A strategy whose ranks share the tokens of a sample, and a family that does not say where they can be split."""

    @hookimpl
    def register_model_families(self):
        return [FamilyEntry(name="whole", title="whole", factory=f"{__name__}:whole")]

    @hookimpl
    def configure_distributed(self):
        return DistributedPlan(name="sharing", title="sharing", parallel="nowhere:at_all", context=2)


class Turning:
    """Two terms that train the adapter at strengths of their own."""

    @hookimpl
    def build_terms(self, config, family):
        found = [Term(), Term()]
        for number, term in enumerate(found, start=2):
            term.name, term.turns = f"turning {number}", (Turn(), Turn(strength=-number))
        return found


def whole(config):
    return TinyFamily()


@pytest.fixture
def wanted(configure, tmp_path):
    """wanted("--flag", ...) -> a configuration that could train, but for what the flags spoil."""
    (tmp_path / "pictures").mkdir()
    flags = ("--model_family=toy", "--max_train_steps=1", f"--instance_data_dir={tmp_path / 'pictures'}", "--use_cpu")
    return lambda *more: configure(*flags, f"--output_dir={tmp_path / 'run'}", *more)


def test_an_unknown_family_is_found_out_before_anything_is_written(wanted, plugins, tmp_path):
    with pytest.raises(UserError, match="Unknown model_family 'tyo'"):
        Preparation.of(wanted("--model_family=tyo"), plugins, write=True)
    assert not (tmp_path / "run").exists()


def test_a_family_that_cannot_share_tokens_is_refused_before_anything_is_written(wanted, plugins, tmp_path):
    plugins.register(PluginInfo(name="sharing", distribution="sharing", version="1.0"), Sharing())
    with pytest.raises(UserError, match="tiny cannot be trained with context parallelism"):
        Preparation.of(wanted("--model_family=whole", "--num_processes=2"), plugins, write=True)
    assert not (tmp_path / "run").exists()


def test_terms_at_different_strengths_are_refused_before_anything_is_written(wanted, plugins, tmp_path):
    plugins.register(PluginInfo(name="turning", distribution="turning", version="1.0"), Turning())
    with pytest.raises(UserError, match="different strengths: turning 2, turning 3") as found:
        Preparation.of(wanted(), plugins, write=True)
    assert (found.value.exit_code, (tmp_path / "run").exists()) == (ExitCode.USAGE, False)


@pytest.fixture
def one_image(tmp_path, wanted):
    Image.new("RGB", (16, 16)).save(tmp_path / "pictures/a.png")
    return ("--resolution=16", "--caption_strategy=filename", "--num_train_epochs=3", "--max_train_steps=none")


@pytest.mark.parametrize("shape", ["cosine", "linear", "polynomial", "warmup_stable_decay"])
def test_a_rate_that_would_fall_before_it_has_risen_is_refused(wanted, plugins, one_image, shape):
    flags = ("--lr_warmup_steps=3", f"--lr_scheduler={shape}")
    with pytest.raises(UserError, match="lr_warmup_steps=3, and the run has 3 steps"):
        Preparation.of(wanted(*one_image, *flags), plugins, write=False)


def test_the_first_steps_of_a_longer_run_may_all_be_warm_up_and_that_is_told(wanted, plugins, one_image):
    notices = Preparation.of(wanted(*one_image, "--lr_warmup_steps=5"), plugins, write=False).notices
    assert "the learning rate rises to 0.5 of learning_rate: lr_warmup_steps=5, and the run has 3 steps" in notices


def test_an_unknown_optimizer_is_found_out_before_anything_is_written(wanted, plugins, tmp_path):
    with pytest.raises(UserError, match=r"Unknown optimizer 'adamv'.\n  fix: did you mean adamw"):
        Preparation.of(wanted("--optimizer=adamv"), plugins, write=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("data", "run", "message"),
    [
        ("pictures", "pictures", "the output directory .* is inside the folder of the dataset 'pictures'"),
        ("pictures", "pictures/runs/first", "the output directory .* is inside the folder of the dataset 'pictures'"),
        ("pictures", ".", "the output directory .* is inside the folder of the dataset"),
        ("run/samples", "run", "the dataset 'samples' is in .*, where the run stores its own files"),
        ("pictures", "pictures/.runs/first", None),
        ("run/pictures", "run", None),
    ],
)
@pytest.mark.parametrize("write", [True, False])
def test_a_run_and_its_images_lie_apart(configure, plugins, tmp_path, data, run, message, write):
    folder = tmp_path / data
    folder.mkdir(parents=True)
    Image.new("RGB", (16, 16)).save(folder / "a.png")
    if run == ".":
        folder = folder / "linked"
        folder.symlink_to(tmp_path)
    flags = ("--model_family=toy", "--max_train_steps=1", "--resolution=16", "--use_cpu", "--caption_strategy=filename")
    config = configure(*flags, f"--instance_data_dir={folder}", f"--output_dir={tmp_path / run}")
    if message is None:
        Preparation.of(config, plugins, write=write)
    else:
        with pytest.raises(ConfigError, match=message):
            Preparation.of(config, plugins, write=write)
        assert not (tmp_path / run / "run.json").exists()


def test_a_folder_without_captions_names_the_ways_out(wanted, plugins, tmp_path):
    for name in ("a", "b"):
        Image.new("RGB", (16, 16)).save(tmp_path / f"pictures/{name}.png")
    with pytest.raises(PreflightError, match=r"none of the 2 images in .*(?s:.*)--caption_strategy=filename, or") as caught:
        Preparation.of(wanted("--resolution=16"), plugins, write=False)
    assert "--caption_strategy=instanceprompt with --instance_prompt=TEXT" in str(caught.value)
    (tmp_path / "pictures/a.txt").write_text("one has a caption")
    with pytest.raises(PreflightError, match="1 samples cannot be used"):
        Preparation.of(wanted("--resolution=16", "--data_error_budget=0"), plugins, write=False)


def test_one_prompt_captions_all_images(wanted, plugins, tmp_path):
    Image.new("RGB", (16, 16)).save(tmp_path / "pictures/a.png")
    flags = ("--resolution=16", "--instance_prompt=a photo of zwx cat")
    config = wanted(*flags, "--caption_strategy=instanceprompt")
    assert Preparation.of(config, plugins, write=False).data.datasets[0].index.captions(0) == ("a photo of zwx cat",)
    with pytest.raises(ConfigError, match=r"no dataset uses it\n.*--caption_strategy=instanceprompt"):
        Preparation.of(wanted(*flags), plugins, write=False)


def test_entries_of_caches_that_do_nothing_are_told(configure, plugins, tmp_path, write):
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / "pictures/a.png")
    pictures = {"id": "a", "instance_data_dir": str(tmp_path / "pictures"), "caption_strategy": "filename"}
    texts = {"dataset_type": "text_embeds", "cache_dir": "texts"}
    own = {**pictures, "id": "b", "instance_data_dir": str(tmp_path / "others"), "text_embeds": "own"}
    (tmp_path / "others").mkdir()
    Image.new("RGB", (16, 16), "red").save(tmp_path / "others/b.png")
    entries = [{**pictures, "cache_dir_vae": "c"}, {"id": "te", **texts, "default": True}, {"id": "more", **texts}]
    entries += [{**own, "cache_dir_vae": "c"}, {"id": "own", "dataset_type": "text_embeds", "cache_dir": "own"}]
    data = write("data.json", json.dumps(entries))
    flags = ("--model_family=toy", "--max_train_steps=1", "--resolution=16", "--use_cpu", f"--output_dir={tmp_path / 'run'}")
    config = configure(*flags, f"--data_backend_config={data}")
    [notice] = Preparation.of(config, plugins, write=False).notices
    assert "without effect: more;" in notice


def test_datasets_that_only_a_package_uses_are_refused_without_it(tmp_path, write):
    (tmp_path / "pictures").mkdir()
    folder, plugins = {"instance_data_dir": str(tmp_path / "pictures")}, load_plugins(Selection(only=("toy",)))
    entries = [{"id": "a", **folder}, {"id": "b", **folder, "is_regularisation_data": True}]
    data = write("data.json", json.dumps([*entries, {"id": "c", **folder, "dataset_type": "eval"}]))
    flags = ("--model_family=toy", "--max_train_steps=1", f"--data_backend_config={data}", f"--output_dir={tmp_path / 'run'}")
    with pytest.raises(ConfigError) as caught:
        Preparation.of(resolve(schema_of(plugins), flags, environment={}), plugins, write=False)
    told = {problem.where: problem.message for problem in caught.value.problems}
    assert "is_regularisation_data needs smalti-objectives" in told["dataset 'b'"]
    assert "the dataset_type eval needs smalti-validation" in told["dataset 'c'"]


class Encoding(TinyFamily):
    """A family whose images and texts are encoded ahead."""

    def encoder_identity(self, kind):
        return {}

    def release_encoder(self, kind):
        pass


class Encodes:
    @hookimpl
    def register_model_families(self):
        return [FamilyEntry(name="encoding", title="encoding", factory=f"{__name__}:encoding")]


def encoding(config):
    return Encoding()


def test_a_run_that_encodes_ahead_needs_the_package_that_does_it(wanted, plugins, tmp_path, one_image):
    plugins.register(PluginInfo(name="encodes", distribution="encodes", version="1.0"), Encodes())
    flags = (*one_image, "--model_family=encoding")
    with pytest.raises(
        MissingPlugin, match="tiny encodes images and captions before training, which needs smalti-cache"
    ) as caught:
        Preparation.of(wanted(*flags), plugins, write=True)
    assert caught.value.fix == (
        "the plugin 'cache' is installed but disabled: remove it from `without`, or add it to `plugins`; "
        "or encode in every step: --vae_cache_disable --text_cache_disable"
    )
    assert not (tmp_path / "run").exists()
    with pytest.raises(MissingPlugin):
        Preparation.of(wanted(*flags, "--vae_cache_disable"), plugins, write=False)
    Preparation.of(wanted(*flags, "--vae_cache_disable", "--text_cache_disable"), plugins, write=False)


class Noticing:
    @hookimpl
    def notices_before_launch(self, plan, kind):
        return [f"{plan.title} on {kind}"]


class Broken:
    @hookimpl
    def notices_before_launch(self):
        raise RuntimeError("spoiled")


def test_hook_notices_before_launch_adds_notes_and_a_failure_in_it_does_not_stop_the_launch(wanted, plugins, one_image, caplog):
    for plugin in (Noticing(), Broken()):
        name = type(plugin).__name__.lower()
        plugins.register(PluginInfo(name=name, distribution=name, version="1.0"), plugin)
    assert Preparation.of(wanted(*one_image), plugins, write=False).notices[-1] == "single process on cpu"
    assert "plugin 'broken' (broken 1.0) failed in hook 'notices_before_launch': RuntimeError: spoiled" in caplog.text
