"""Pages of help: what fits 80 columns, what a topic shows, and what only a terminal gets."""

import json
import os
import pty
import re
import subprocess
import sys
import termios

import pytest

from smalti.cli.pages import help as help_pages
from support.commands import commands

ESCAPE = "\x1b["


@pytest.fixture
def out(capsys, monkeypatch):
    """out("train", "--help") -> what is printed, in this process, at 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words: str, code: int = 0) -> str:
        found, output, errors = commands(capsys)(*words)
        assert found == code, errors
        return output if code == 0 else errors

    return call


@pytest.fixture
def on_terminal(tmp_path):
    """on_terminal("--help", LINES="24", ...) -> what a terminal of 80 columns shows."""

    def call(*words: str, **environment: str) -> str:
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(ours, (24, 80))
        kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR", "PAGER")}
        process = subprocess.Popen(
            [sys.executable, "-m", "smalti", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**kept, "TERM": "xterm", **environment},
            cwd=tmp_path,
        )
        os.close(theirs)
        text = b""
        try:
            while part := os.read(ours, 65536):
                text += part
        except OSError:
            pass  # the other end was closed
        finally:
            os.close(ours)
        assert process.wait(timeout=60) == 0, text.decode()
        return text.decode().replace("\r\n", "\n")

    return call


@pytest.mark.parametrize("words", [["train", "--help-all"], ["train", "--help", "run"], ["--help"], ["plugins", "--help"]])
def test_help_fits_80_columns_and_has_no_colours_in_a_pipe(out, words):
    text = out(*words)
    assert (max(map(len, text.splitlines())) <= 80, ESCAPE in text) == (True, False)
    assert not re.search(r"--$", text, re.MULTILINE), "a flag is broken"


def test_switches_choices_defaults_and_conditions_are_visible(out):
    text = " ".join(out("train", "--help-all", "--without=all").split())
    assert "--[no_]use_ema Keep an exponential moving average (EMA) of the weights in fp32. Default: off." in text
    assert "--model_type=full|lora " in text
    assert "One of: pixel, area, pixel_area. Default: pixel_area." in text
    assert "Only with --timestep_distribution=logit_normal." in text
    assert "--[no_]seed" not in text


def test_help_of_a_section_has_all_its_options_with_all_that_is_known_of_them(out):
    text = " ".join(out("train", "--help", "fsdp").split())
    assert text.startswith("FSDP: --[no_]fsdp_enable ")
    assert "Also accepted: --fsdp_offload_params. Accelerate YAML: fsdp_config.fsdp_offload_params." in text
    assert "lora_rank" not in text


@pytest.mark.parametrize("words", [["--help", "lora_dropout"], ["--help=lora_dropout"], ["--seed=3", "-h", "LoRA-dropout"]])
def test_help_of_an_option_is_that_option(out, words):
    text = out("train", *words)
    assert (text.splitlines()[0], text.count("\n  --")) == ("LoRA:", 1)


def test_the_file_after_help_is_a_configuration_not_a_topic(out, write):
    assert "FSDP:" not in out("train", "--help", str(write("run.toml", 'without = ["fsdp2"]')))


def test_help_of_what_is_not_there_says_where_to_look(out):
    assert "did you mean lora_rank?" in out("train", "--help", "lora_rnak", code=2)
    assert "a section: run, model, data" in out("train", "--help", "xyzzy", code=2)
    assert "these options belong to smalti-fsdp2" in out("train", "--help", "fsdp", "--without=fsdp2", code=4)


def test_commands_are_grouped(out):
    text = out("--help")
    places = [text.index(f"\n{title}:\n") for title in ("Training", "Data", "Configuration", "From plugins", "Examples")]
    assert places == sorted(places)
    assert places[0] < text.index("\n  run ") < places[1]
    assert text.index("\n  detect-blocks ") > places[3]


def test_plugins_are_listed_with_what_they_add_and_hooks_on_request(out):
    lines = {line.split()[0]: line for line in out("plugins").splitlines()}
    assert "families: anima, auraflow, bria, chroma, " in lines["diffusers"]
    assert "commands: detect-blocks; " not in lines["diffusers"]
    assert "commands: detect-blocks" in lines["fsdp2"]
    assert "commands: checkpoint export" in lines["export"]
    assert " options" in lines["fsdp2"]
    assert "storages: local" in lines["core"]
    assert "register_model_families" not in "".join(lines.values())
    assert "register_model_families" in out("plugins", "--hooks")
    assert json.loads(out("plugins", "--json"))["plugins"][0]["adds"]["options"][0] == "output_dir"


def test_a_terminal_gets_colours_unless_it_says_no(on_terminal):
    assert ESCAPE in on_terminal("--help")
    assert ESCAPE not in on_terminal("--help", NO_COLOR="1")


def test_a_long_page_goes_through_the_pager_of_a_terminal(on_terminal):
    text = on_terminal("train", "--help-all", PAGER="tr a-z A-Z")
    assert ("OUTPUT_DIR" in text, "output_dir" in text, ESCAPE in text) == (True, False, False)
    assert "output_dir" in on_terminal("config", "reference", PAGER="cat")
    assert "output_dir" in on_terminal("train", "--help-all", PAGER="less 'unbalanced"), "printed without a pager"


def test_a_page_in_a_pipe_meets_no_pager(smalti):
    done = subprocess.run(
        [*smalti, "config", "reference"], env={**os.environ, "PAGER": "false"}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.startswith("# Options")) == (0, True)


def test_a_terminal_breaks_lines_of_a_table_between_words(on_terminal):
    lines = on_terminal("plugins", NO_COLOR="1").splitlines()
    assert max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines).split()).count("qwen_image, qwen_image21, sana, sd1x, sd2x, sd3, sdxl, z_image") == 1


def test_plugins_are_looked_for_once_on_the_way_to_a_command_below_another(out, monkeypatch):
    looked, own = [], help_pages.load_plugins

    def counted(*arguments, **options):
        looked.append(arguments)
        return own(*arguments, **options)

    monkeypatch.setattr(help_pages, "load_plugins", counted)
    out("config", "new", "--help")
    assert len(looked) == 1
