"""Plugins that are really installed: what is found, in which order, what is left out, what is said of those that fail."""

import re

import pytest

TRAIN = (
    "train",
    "--model_family=toy",
    "--max_train_steps=1",
    "--instance_data_dir=nowhere",
    "--output_dir=nowhere",
    "--dry-run",
)


def test_an_installed_plugin_is_listed_with_its_distribution_version_and_hooks(site):
    assert site.run("good", "plugins", "--json").plugins["good"] == {
        "name": "good",
        "distribution": "smalti-good",
        "version": "1.2",
        "built_in": False,
        "state": "active",
        "hooks": ["check_config"],
        "adds": {},
        "reason": "",
    }


def test_the_list_for_people_has_the_same_facts(site):
    line = next(line for line in site.run("good", "plugins", "--hooks").out.splitlines() if line.startswith("good"))
    assert line.split() == ["good", "1.2", "active", "check_config"]


def test_plugins_are_in_one_order_however_they_lie_on_the_path(site):
    one, other = (list(site.run(path, "plugins", "--json").plugins) for path in ("good fitting other", "other good fitting"))
    assert one == other
    assert [name for name in one if name in ("fitting", "good", "other")] == ["fitting", "good", "other"]


def test_a_plugin_found_twice_on_the_path_counts_once(site):
    assert site.run("good good", "plugins", "--json").plugins["good"]["state"] == "active"


BROKEN = {
    "missing": "ModuleNotFoundError: No module named 'a_package_that_nobody_has' (at ",
    "leaving": "exits at import with status 3 (at ",
    "raising": "OSError: no licence (at ",
    "mistyped": "there is no hook 'check_konfig'; did you mean check_config?",
    "wrong_arguments": "check_config takes settings; this hook is given: config",
    "a_class": "Good is a class; a plugin is an object of it",
    "hookless": "it implements no hook; mark its functions with @smalti.hookimpl",
    "nameless": "has no attribute 'plugin'",
}


@pytest.fixture(scope="module")
def listed(site):
    """A list with many broken plugins in it."""
    return site.run(f"{' '.join(BROKEN)} good", "plugins", "--json").plugins


@pytest.mark.parametrize("package", BROKEN)
def test_a_plugin_that_cannot_be_loaded_is_listed_as_broken_with_the_reason(listed, package):
    assert (listed[package]["state"], listed[package]["hooks"]) == ("broken", [])
    assert BROKEN[package] in listed[package]["reason"]


def test_broken_plugins_do_not_spoil_the_good_one(listed):
    assert listed["good"]["state"] == "active"


@pytest.mark.parametrize("package", ["missing", "leaving", "wrong_arguments"])
def test_a_plugin_that_cannot_be_loaded_stops_a_run_with_its_name_version_and_the_way_round(site, package):
    done = site.run(package, *TRAIN)
    assert done.code == 4
    assert f"plugin {package!r} (smalti-{package.replace('_', '-')} 1.2) cannot be loaded" in done.error
    assert f"disable it with --without {package}" in done.error
    assert "Traceback" not in done.error


def test_the_way_round_works(site):
    assert "cannot be loaded" not in site.run("leaving", *TRAIN, "--without", "leaving").error


def test_a_plugin_for_another_version_of_smalti_is_incompatible(site):
    found = site.run("too_new fitting", "plugins", "--json").plugins
    assert (found["too_new"]["state"], found["fitting"]["state"]) == ("incompatible", "active")
    assert found["too_new"]["reason"].startswith("smalti-too-new 7.0 needs smalti >=99, found ")


def test_a_plugin_for_another_version_stops_a_run(site):
    done = site.run("too_new", *TRAIN)
    assert done.code == 2
    assert "plugin 'too_new': smalti-too-new 7.0 needs smalti >=99" in done.error


def test_two_packages_with_one_plugin_name_stop_a_run_and_both_are_named(site):
    done = site.run("good twin", *TRAIN)
    assert done.code == 2
    assert "plugin 'good': two packages provide it: smalti-good 1.2 and smalti-twin 0.9" in done.error


def test_two_packages_with_one_plugin_name_can_both_be_left_out(site):
    assert "two packages" not in site.run("good twin", *TRAIN, "--without=good").error


def test_the_list_tells_of_two_packages_with_one_plugin_name(site):
    found = site.run("good twin", "plugins", "--json").plugins["good"]
    assert (found["state"], found["reason"]) == ("broken", "two packages provide it: smalti-good 1.2 and smalti-twin 0.9")


def test_no_package_can_take_the_name_of_a_built_in_plugin(site):
    assert "plugin 'console': smalti-impostor 0.9 has a plugin of the same name" in site.run("impostor", *TRAIN).error
    assert site.run("impostor", "plugins", "--json").plugins["console"]["distribution"] == "smalti"


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        (("--without", "noisy"), {}),
        (("--without=noisy,other",), {}),
        (("--without", "all"), {}),
        (("--plugin", "good"), {}),
        ((), {"SMALTI_WITHOUT": "noisy"}),
        ((), {"SMALTI_PLUGINS": "good,other"}),
        ((), {"SMALTI_PLUGIN": "good"}),
    ],
)
def test_a_plugin_that_is_left_out_is_not_imported(site, tmp_path, words, environment):
    noise = tmp_path / "noise"
    done = site.run("noisy good other", "plugins", "--json", *words, NOISE=str(noise), **environment)
    assert done.plugins["noisy"]["state"] in ("blocked", "not selected")
    assert not noise.exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.toml", 'without = ["noisy"]'),
        ("run.toml", '[plugins]\nwithout = ["noisy"]'),
        ("run.toml", 'plugins = "good"'),
        ("run.json", '{"--plugin": ["good"]}'),
        ("run.yaml", "without: '{env:LEFT_OUT}'"),
    ],
)
def test_the_file_can_leave_a_plugin_out_too(site, write, tmp_path, name, text):
    noise = tmp_path / "noise"
    done = site.run("noisy good", "config", "show", str(write(name, text)), NOISE=str(noise), LEFT_OUT="noisy")
    assert done.code == 0, done.error
    assert not noise.exists()


def test_flags_select_before_the_environment_and_that_before_the_file(site, write, tmp_path):
    noise, file = tmp_path / "noise", str(write("run.toml", 'without = ["good"]'))
    site.run("noisy good", "config", "show", file, "--without=noisy", NOISE=str(noise), SMALTI_WITHOUT="other")
    assert not noise.exists()


def test_help_does_not_import_what_the_environment_leaves_out(site, tmp_path):
    noise = tmp_path / "noise"
    assert site.run("noisy", "--help", NOISE=str(noise), SMALTI_WITHOUT="noisy").code == 0
    assert not noise.exists()


def test_a_mistyped_plugin_gets_the_nearest_name(site):
    done = site.run("good", *TRAIN, "--plugin=goood")
    assert done.code == 4
    assert "unknown plugin 'goood'" in done.error
    assert "did you mean good or" in done.error


def test_asking_for_a_plugin_and_leaving_it_out_is_an_error(site):
    assert "both selected and disabled" in site.run("good", "plugins", "--plugin=good", "--without=good").error


def test_the_essential_plugins_cannot_be_left_out(site):
    done = site.run("", "plugins", "--without=ddp")
    assert (done.code, "ddp cannot be disabled" in done.error) == (2, True)


def test_an_exception_in_a_hook_keeps_its_type_and_names_the_plugin(site):
    done = site.run("failing", *TRAIN)
    assert done.code == 1
    assert done.error.splitlines()[-3:] == [
        "smalti: error: ZeroDivisionError: division by zero",
        "  raised by plugin 'failing' (smalti-failing 1.2) in hook 'check_config'",
        "  fix: update smalti-failing, or disable the plugin with --without failing",
    ]


def test_a_plugin_cannot_declare_an_option_again(site):
    done = site.run("declaring", "config", "show")
    assert done.code == 2
    assert "the option 'learning_rate' is declared by plugin 'core' (smalti " in done.error
    assert "and by plugin 'declaring' (smalti-declaring 1.2)" in done.error


def test_a_plugin_adds_a_command(site):
    assert site.run("commanding", "greet").out == "hello\n"
    assert "Say hello." in site.run("commanding", "--help").out


def test_a_plugin_adds_a_subcommand_to_a_group_of_the_core_which_is_imported_when_it_is_used(site):
    done = site.run("deepening", "config", "greet")
    assert (done.out, done.error) == ("hello\n", "")
    assert re.search(r"^  greet +Say hello.$", site.run("deepening", "config", "--help").out, flags=re.MULTILINE)
    overview = site.run("deepening", "--help").out
    assert "Not imported for help." in overview.partition("Data:")[2].partition("\n\n")[0]


def test_a_plugin_cannot_replace_a_command(site):
    done = site.run("usurping commanding", "--help")
    assert "the command 'train' already exists" in done.error
    assert "raised by plugin 'usurping'" in done.error
    assert (done.code, "Say hello." in done.out) == (0, True)


def test_a_plugin_cannot_replace_a_subcommand(site):
    done = site.run("usurping_below deepening", "config", "--help")
    assert "the command 'config show' already exists" in done.error
    assert "raised by plugin 'usurping_below'" in done.error
    assert (done.code, "Say hello." in done.out, done.out.count("\n  show ")) == (0, True, 1)


def test_two_claims_to_one_run_are_refused_with_both_titles(site, tmp_path):
    (tmp_path / "pictures").mkdir()
    words = ("--instance_data_dir", str(tmp_path / "pictures"), "--output_dir", str(tmp_path / "run"))
    done = site.run("claiming rival", "train", "--model_family=toy", "--max_train_steps=1", *words)
    assert done.code == 2
    assert "Rival and Claiming cannot be enabled simultaneously." in done.error
    assert not (tmp_path / "run").exists()
