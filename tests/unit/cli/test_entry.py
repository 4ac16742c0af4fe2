"""The command line as a user meets it: real processes, exit codes, and what is not imported."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import commands
from support.forked_popen import run_forked


@pytest.fixture
def run(capsys, monkeypatch):
    """run("config", "show") -> (exit code, output, errors), in this process."""
    monkeypatch.setenv("COLUMNS", "200")
    return commands(capsys)


WITHOUT_TORCH = {
    "help": ["--help"],
    "plugins": ["plugins"],
    "show": ["config", "show", "--seed=3"],
    "explain": ["config", "explain", "seed"],
    "options": ["train", "--help-all"],
    "a mistake": ["train", "--sede=3"],
}


@pytest.mark.parametrize("words", WITHOUT_TORCH.values(), ids=WITHOUT_TORCH)
def test_what_only_reads_and_checks_options_imports_nothing_heavy(words):
    code = f"""
import sys
from smalti.cli.entry import main
try:
    main({words!r})
except SystemExit:
    pass
heavy = ["torch", "accelerate", "diffusers", "transformers", "numpy", "matplotlib", "pyarrow", "PIL", "yaml"]
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout


def test_the_list_of_commands_needs_no_options():
    """pydantic and the options of all packages would take a third of the time of `smalti --help`."""
    code = "import sys; from smalti.cli.entry import _run; _run(['--help']); print('pydantic' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stderr, "Train diffusion models" in done.stdout) == ("False\n", True)


@pytest.mark.parametrize("command", ["smalti", "smalti-train"])
def test_the_installed_commands_answer(command):
    path = Path(sys.executable).parent / command
    done = subprocess.run([str(path), "--help"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "Usage: smalti" in done.stdout) == (0, True)


def test_the_version_is_told(run):
    code, out, _ = run("--version")
    assert (code, out.startswith("smalti, version 0.")) == (0, True)


def test_help_lists_the_commands(run):
    _, out, _ = run("--help")
    assert [
        name for name in ("train", "plugins", "config", "dataset", "cache", "checkpoint", "run") if f"  {name} " not in out
    ] == []


def test_a_mistyped_command_gets_the_nearest_one(run):
    assert run("trian")[::2] == (2, "smalti: error: unknown command 'trian'\n  fix: did you mean train?\n")


MISTAKES = {
    "run ls nowhere": ("run ls: invalid value for '[ROOT]...': Directory 'nowhere' does not exist", "check the path; relative"),
    "checkpoint verify nowhere": ("there is no folder nowhere", "check the path; relative paths start at"),
    "checkpoint verify .": ("no checkpoint found in .", "give a run directory or one of its checkpoints"),
    "checkpoint export": ("checkpoint export: missing argument 'PATH'", "smalti checkpoint export [OPTIONS] PATH; smalti ch"),
    "checkpoint export . --format=onnx": ("checkpoint export: invalid value for '--format': 'onnx' is not one", "smalti ch"),
    "checkpoint export . --to=x --max_shard_size=5X": ("--max_shard_size: '5X' is not a size", "--max_shard_size=5GB"),
    "run ls --jsn": ("run ls: no such option '--jsn'. Did you mean '--json'?", "smalti run ls [OPTIONS] [ROOT]...; smalti r"),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_in_the_words_of_a_subcommand_are_errors_like_all_others(run, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    code, out, errors = run(*words.split())
    what, fix = MISTAKES[words]
    assert (code, out) == (2, "")
    assert errors.startswith(f"smalti: error: {what}"), errors
    assert errors.splitlines()[-1].startswith(f"  fix: {fix}"), errors
    assert len(errors.splitlines()) == 2


def test_a_mistyped_subcommand_gets_the_nearest_one(run):
    assert run("config", "shw")[::2] == (2, "smalti: error: unknown command 'config shw'\n  fix: did you mean show?\n")
    assert run("run")[::2][0] == 2  # its help


def test_a_command_of_a_plugin_that_is_left_out_names_its_package(run, monkeypatch):
    monkeypatch.setenv("SMALTI_WITHOUT", "all")
    code, _, errors = run("detect-blocks")
    assert (code, "the plugin 'fsdp2' is installed but disabled" in errors, "pip install" in errors) == (4, True, False)
    code, _, errors = run("checkpoint", "export", "run", "--to=made")
    assert (code, "the command 'checkpoint export' belongs to smalti-export" in errors) == (4, True)


def test_without_any_family_the_packages_that_have_some_are_named(run, monkeypatch):
    monkeypatch.setenv("SMALTI_WITHOUT", "all")
    monkeypatch.setattr("smalti.config.known_packages.installed", lambda name: False)
    refused, listed = run("train", "--dry-run", "--output_dir=run")[2], run("plugins")[1]
    assert "no model family installed" in refused
    for said in (refused, listed):
        assert re.search(
            r"sdxl, z_image: pip install .*diffusers'? .*cache'? .*export'?; or toy: pip install .*toy'?$",
            said,
            flags=re.MULTILINE,
        )


def test_short_help_has_the_options_that_most_runs_need_and_full_help_all(run, schema):
    short, full = (
        run("train", each, "--plugins=toy,trackers,validation")[1].replace("--[no_]", "--") for each in ("--help", "--help-all")
    )
    levels = {option.name: option.level for option in schema.options.values()}
    assert [name for name, level in levels.items() if (f"  --{name}" in short) != (level == "basic")] == []
    assert [name for name in levels if f"  --{name}" not in full] == []


def test_help_has_a_heading_for_each_section(run, schema):
    full = run("train", "--help-all")[1]
    assert [group.title for group in schema.groups if f"\n{group.title}:\n" not in full] == []


def test_all_problems_are_printed_and_the_exit_code_is_2(run):
    code, out, errors = run("train", "--sede=1", "--adam_beta1=7")
    assert (code, out) == (2, "")
    assert errors.startswith("smalti: error: the configuration has 6 problems:\n  - command line: unknown option --sede\n")


MANY = {
    "--sede=1": "unknown option --sede",
    "--adam_beta1=7": "--adam_beta1: cannot be '7'",
    "--optimizer=adamv": "Unknown optimizer 'adamv'",
    "--report_to=wandbb": "unknown tracker 'wandbb'",
    "--validation_resolution=33x31": "this model samples multiples of 4 pixels, which 33x31 is not",
    "--snr_gamma=5": "snr_gamma has no meaning for rectified flow",
    "--prediction_type=flow_matching": "",
    "--validation_prompt=a cat": "",
    "--resume_from_checkpoint=nowhere": "nowhere is neither a checkpoint nor a run directory",
    "--lr_scheduler=cosine": "",
    "--lr_warmup_steps=400": "lr_warmup_steps=400, and the run has 100 steps",
    "--num_machines=2": "num_processes=1 does not divide over num_machines=2",
}


@pytest.mark.parametrize("way", [["--dry-run"], []])
def test_every_kind_of_problem_is_told_in_one_round(run, write, tmp_path, way):
    data = write("data.json", json.dumps([{"id": "a", "instance_data_dir": "x", "croop": True}, {"id": "b", "type": "nfs"}]))
    told = (*filter(None, MANY.values()), "unknown key 'croop'", "type: 'nfs' is unknown")
    words = [
        "train",
        *way,
        "--plugins=toy,trackers,validation",
        "--model_family=toy",
        "--max_train_steps=100",
        f"--output_dir={tmp_path / 'run'}",
    ]
    code, _, errors = run(*words, f"--data_backend_config={data}", *MANY)
    assert (code, [each for each in told if each not in errors]) == (2, [])
    assert f"the configuration has {len(told) + 1} problems" in errors  # several machines need an address as well
    assert not (tmp_path / "run").exists()


def test_what_depends_on_something_wrong_is_not_complained_about(run, tmp_path):
    words = ["--plugins=toy", "--model_family=toy", "--max_train_steps=many", "--output_dir", f"--instance_data_dir={tmp_path}"]
    code, _, errors = run("train", *words, "--toy_width=wide", "--toy_heads=7", "--lr_warmup_steps=9")
    assert (code, errors.count("\n  - ")) == (2, 3), errors


REFUSED = {
    "--validation_resolution=0x0": "at least one pixel",
    "--validation_resolution=1000000x1000000": "at least one pixel and at most 89 million",
    "--validation_resolution=64x64,33x31": "--validation_resolution=64x64,32x32",
    "--validation_num_inference_steps=100000000": "<= 1000",
    "--seed=18446744073709551616": "9223372036854775807",
    "--max_train_steps=1000000000000000000000000000000": "9223372036854775807",
    "--process_group_timeout=99999999999999": "<= 31536000",
    "--toy_width=10000000": "<= 16384",
    "--gradient_accumulation_steps=1000000000": "<= 65536",
    "--resume_from_checkpoint=-5": "-5 is neither a checkpoint nor a run directory",
    "--resume_from_checkpoint=/etc/passwd": "/etc/passwd is neither a checkpoint nor a run directory",
    "--resume_from_checkpoint=7": "there is no checkpoint of step 7",
    f"--pretrained_model_name_or_path={'n' * 3000}": "more than 255 bytes",
    f"--resume_from_checkpoint={'n' * 3000}": "more than 255 bytes",
    f"--output_dir={'n' * 3000}": "more than 255 bytes",
    "--output_dir=\udcff": "not valid UTF-8",
    "--output_dir=~nobody-at-all/run": "there is no user nobody-at-all",
    "--resume_from_checkpoint=~nobody-at-all": "there is no user nobody-at-all",
    "--accelerate_config=~nobody-at-all/a.yaml": "there is no user nobody-at-all",
    "--model_family=" + "n" * 3000: "Unknown model_family",
}


@pytest.mark.parametrize("flag", REFUSED, ids=[flag[:40].encode(errors="replace").decode() for flag in REFUSED])
def test_a_dry_run_refuses_what_the_run_cannot_do(run, tmp_path, flag):
    words = [
        "--plugins=toy,validation",
        "--model_family=toy",
        "--max_train_steps=4",
        f"--output_dir={tmp_path / 'run'}",
        "--use_cpu",
    ]
    images = [f"--instance_data_dir={tmp_path / 'images'}", "--validation_prompt=a cat", "--resolution=32"]
    code, _, errors = run("train", "--dry-run", *words, *images, flag)
    expected = 8 if "a checkpoint" in REFUSED[flag] or "no checkpoint" in REFUSED[flag] else 2
    assert (code, REFUSED[flag] in errors, "problems" in errors) == (expected, True, False), errors


def test_a_dry_run_finds_weights_that_were_cut_off(run, tmp_path):
    (tmp_path / "weights.safetensors").write_bytes(b"cut off")
    words = ["--plugins=toy", "--model_family=toy", "--max_train_steps=4", f"--output_dir={tmp_path / 'run'}", "--use_cpu"]
    start = f"--pretrained_model_name_or_path={tmp_path / 'weights.safetensors'}"
    code, _, errors = run("train", "--dry-run", *words, start, f"--instance_data_dir={tmp_path / 'images'}")
    assert (code, "weights.safetensors is not a valid safetensors file: too short" in errors) == (2, True), errors


def test_problems_of_a_dry_run_are_json_if_that_is_asked_for(run):
    code, out, errors = run("train", "--dry-run", "--json", "--plugins=toy", "--sede=1", "--model_family=toy")
    said = json.loads(out)
    assert (code, said["exit_code"]) == (2, 2)
    assert said["problems"][0] == {
        "message": "unknown option --sede",
        "fix": "did you mean --seed?",
        "where": "command line",
        "option": "seed",
    }
    assert len(said["problems"]) == 4
    assert "unknown option --sede" in errors


def test_show_prints_toml_with_sources_and_differences(run, write, monkeypatch):
    monkeypatch.setenv("SMALTI_SEED", "4")
    file = write("run.toml", "seed = 5\nuse_ema = true")
    assert run("config", "show", str(file))[1] == (
        f"# seed: '4' from SMALTI_SEED wins over 5 from seed in {file}\n"
        "# Run\n"
        "seed = 4 # environment (SMALTI_SEED)\n"
        "\n"
        "# Training\n"
        f"use_ema = true # file (use_ema in {file})\n"
        "\n"
    )


def test_show_has_every_value_with_its_source_for_machines(run, schema):
    shown = json.loads(run("config", "show", "--json", "--seed=5", "--plugins=toy,trackers,validation")[1])
    assert shown["values"]["seed"] == {"value": 5, "source": "flag (--seed)"}
    assert shown["values"].keys() == schema.options.keys()


def test_show_all_prints_defaults_too(run):
    assert "adam_beta2 = 0.999\n" in run("config", "show", "--all")[1]


def test_explain_tells_value_source_meaning_and_default(run):
    lines = run("config", "explain", "--EMA-decay", "--ema_decay=0.9")[1].splitlines()
    assert lines == [
        "ema_decay    0.9",
        "source       flag (--ema_decay)",
        "meaning      Decay of the EMA, warmed up from (1+step)/(10+step).",
        "type         number, >= 0, < 1",
        "default      0.995",
        "only with    --use_ema",
        "environment  SMALTI_EMA_DECAY",
        "section      Training",
        "note         ema_decay has no effect unless use_ema",
    ]


def test_explain_tells_which_source_won(run, write):
    out = run("config", "explain", "seed", str(write("run.toml", "seed = 5")), "--seed=6")[1]
    assert "note         seed: '6' from --seed wins over 5 from seed in " in out


def test_explain_of_an_unknown_key_gets_the_nearest(run):
    code, _, errors = run("config", "explain", "sede")
    assert (code, "did you mean seed?" in errors) == (2, True)


def test_explain_for_machines_has_the_declaration_and_the_value(run):
    told = json.loads(run("config", "explain", "lr_scheduler", "--json", "--lr-scheduler=COSINE")[1])
    assert (told["value"], told["source"], told["section"]) == ("cosine", "flag (--lr-scheduler)", "Optimizer")
    assert "polynomial" in told["choices"]


def test_an_unknown_flag_of_plugins_is_refused(run):
    assert run("plugins", "--jsn")[0] == 2


def test_a_defect_ends_with_its_traceback_and_one_last_line(smalti, tmp_path):
    (tmp_path / "click_breaker.py").write_text("import smalti.cli.plugins as p\np.load_plugins = None\n")
    code = "import click_breaker\nfrom smalti.cli.entry import main\nmain(['plugins'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1] == "smalti: error: TypeError: 'NoneType' object is not callable"


def test_ctrl_c_during_a_command_exits_with_130(smalti):
    code = "import smalti.cli.plugins as p\ndef wait(*a, **k):\n    raise KeyboardInterrupt\np.load_plugins = wait\n"
    code += "from smalti.cli.entry import main\nmain(['plugins'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (130, "smalti: interrupted")


def test_a_dry_run_writes_nothing_and_shows_the_launch(smalti, tmp_path):
    from PIL import Image

    (tmp_path / "pictures").mkdir()
    for number in range(4):
        Image.new("RGB", (32, 32)).save(tmp_path / "pictures" / f"{number}.png")
        (tmp_path / "pictures" / f"{number}.txt").write_text("a picture")
    words = ["train", "--model_family=toy", "--max_train_steps=3", "--resolution=32", "--resolution_type=pixel", "--dry-run"]
    words += ["--instance_data_dir=pictures", "--output_dir=a run", "--num_processes=2", "--use_cpu", "--json"]
    done = run_forked([*smalti, *words], cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["timesteps"] == "logit-normal(0, 1)"
    assert (shown["launch"]["launcher"], shown["launch"]["ranks"], shown["effective_batch"]) == ("elastic", [0, 1], 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pictures"]
    text = run_forked([*smalti, *words[:-1]], cwd=tmp_path, timeout=120).stdout
    assert "'a run'" in text
    assert "timesteps     logit-normal(0, 1)\n" in text
    assert 'model_family = "toy" # flag (--model_family)' in text


@pytest.mark.parametrize("end", [">&-", "| true"])
def test_a_command_whose_output_nobody_takes_ends_without_complaint(smalti, end):
    line = f'"$@" {end}'
    done = subprocess.run(["sh", "-c", line, "sh", *smalti, "--help"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_a_library_would_do_at_the_very_end_cannot_change_how_a_process_ended():
    code = "import atexit, os, sys\natexit.register(os.abort)\nfrom smalti.cli import main\nsys.argv[1:] = [{word!r}]\nmain()"
    ends = []
    for word in ("--version", "nonsense"):
        done = subprocess.run([sys.executable, "-c", code.format(word=word)], capture_output=True, text=True, timeout=60)
        ends.append((done.returncode, done.stdout + done.stderr))
    assert [code for code, _ in ends] == [0, 2]
    assert ends[0][1].startswith("smalti, version")
    assert "unknown command 'nonsense'" in ends[1][1]


TALKING = """
import click
from smalti import hookimpl
print("imported")
@hookimpl
def declare_options():
    print("declares")
    return []
@hookimpl
def check_config(config):
    print("checks")
    return []
@hookimpl
def register_commands(commands):
    print("registers")
    commands.add_command(click.Command("talk", params=[click.Option(["--json"])], callback=lambda json: print(json)))
"""


@pytest.mark.parametrize(
    "words", [("plugins", "--json"), ("config", "show", "--json"), ("train", "--dry-run", "--json"), ("talk", "--json", "{}")]
)
def test_json_stands_alone_on_stdout_whatever_plugins_print(run, words, tmp_path, monkeypatch):
    (tmp_path / "talking.py").write_text(TALKING)
    package = tmp_path / "smalti_talking-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: smalti-talking\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[smalti.plugins]\ntalking = talking\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "talking", raising=False)
    monkeypatch.setenv("SMALTI_PLUGINS", "talking")
    _, out, err = run(*words)
    assert json.loads(out) is not None
    assert {"imported", "registers" if words[0] in ("talk", "plugins") else "declares"} <= set(err.split())
