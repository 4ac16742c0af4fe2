"""`smalti plan` on the toy family: a table, JSON, and what it says when nothing can be planned."""

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from smalti.cli.arguments import CommandLine
from smalti.cli.entry import smalti
from smalti.errors import UserError
from smalti.parallel import device_models
from smalti.plugins import choose_distributed
from smalti_plan import counted
from smalti_plan.calibration import STEPS

CRASHES = {
    "exit": (
        "printf '__attribute__((constructor)) void start() { __builtin_puts(\"no hooks\"); __builtin_exit(1); }' >crash.c\n"
        'cc -shared -fPIC crash.c -o "$out"',
        "ended with exit status 1: no hooks",
    ),
    "exception": ("printf '\\377' >&2; exit 1", "ended with exit status 1: UnicodeDecodeError: "),
    "signal": ("kill -SEGV $PPID", "ended with signal 11: it has written nothing"),
    "hang": ("exec sleep 60", "was ended after 1 s"),
}
"""What a compiler does to the process of a rehearsal that asks it for CUDA devices, and what is said of that process."""
TOY = ("--model_family=toy", "--output_dir=out", "--resolution=32", "--train_batch_size=4", "--max_train_steps=1")


@pytest.fixture(scope="module", autouse=True)
def caches(tmp_path_factory):
    """A cache of its own, and models that are counted in this process, which has torch already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(counted, "_in_process", lambda request, config: counted.count(request))
        yield


def planned(*arguments):
    return CliRunner().invoke(smalti, ["plan", *TOY, "--quick", *arguments], catch_exceptions=False, standalone_mode=False)


def test_the_best_way_is_first_and_its_options_are_given():
    result = planned("--gpu=h100-80g", "--gpus=1..8", "--json")
    found = json.loads(result.output)
    assert (result.return_value, list(found["ranks"])) == (0, ["1", "2", "4"])  # 8 ranks do not divide a batch of 4
    assert any("cannot be divided over 8 ranks" in notice for notice in found["notices"])
    for ranks, ways in found["ranks"].items():
        assert {way["micro_batch"] * way["accumulation"] * int(ranks) for way in ways} == {4}
        assert ways[0]["fit"] == "fits"
        assert f"--num_processes={ranks}" in ways[0]["flags"]
    assert {way["strategy"] for way in found["ranks"]["2"]} >= {"ddp", "fsdp2", "zero-3"}
    assert found["configured"]["strategy"] == "single"


def test_a_configuration_for_fewer_devices_is_planned_with_a_larger_batch():
    result = planned("--gpu=l4", "--gpus=8", "--json")
    found = json.loads(result.output)
    assert {way["effective_batch"] for way in found["ranks"]["8"]} == {8}
    assert "planned for an effective batch of 8 instead" in found["notices"]
    assert found["configured"] is None


def test_flags_of_each_way_switch_off_what_the_configuration_has_chosen():
    document = '{"zero_optimization": {"stage": 2}, "train_batch_size": 4, "gradient_clipping": 1.0}'
    for chosen in (["--fsdp_enable", "--fsdp_activation_checkpointing"], [f"--deepspeed_config={document}"]):
        found = json.loads(planned("--gpu=l4", "--num_processes=2", "--train_batch_size=2", *chosen, "--json").output)
        assert found["configured"]["strategy"] == ("fsdp2" if "--fsdp_enable" in chosen else "zero-2")
        for way in found["ranks"]["2"]:
            own = [word for word in chosen if word.startswith(("--fsdp", "--deepspeed"))]
            words = [word for word in shlex.split(way["flags"]) if not word.startswith("--fsdp_shard_size")]
            line = CommandLine.parse([*TOY, *own, *words])
            name = choose_distributed(line.config(), line.plugins).origin.plugin
            assert way["strategy"].startswith({"ddp": "ddp", "fsdp2": "fsdp2", "deepspeed": "zero"}[name])


@pytest.mark.parametrize(
    ("chosen", "strategy", "recompute"),
    [
        ("--fsdp_enable --gradient_checkpointing", "hsdp-2", "full"),
        ("--fsdp_enable --fsdp_activation_checkpointing", "hsdp-2", "full"),
        ("--fsdp_enable --fsdp_activation_checkpointing --fsdp_activation_checkpointing_mode=selective", "hsdp-2", "selective"),
        ("--fsdp_enable --fsdp_activation_checkpointing_mode=selective", "hsdp-2", "none"),
        ("--fsdp_enable --gradient_checkpointing --fsdp_shard_size=4 --fsdp_cpu_offload", "fsdp2-offload", "full"),
        ("--fsdp_enable --gradient_checkpointing --fsdp_version=1 --fsdp_shard_size=4", "fsdp2", "full"),
        ("--gradient_checkpointing", "ddp", "full"),
        ('--gradient_checkpointing --deepspeed_config=\'{"zero_optimization": {"stage": 2}}\'', "zero-2", "full"),
        ("", "ddp", "none"),
    ],
)
def test_the_configured_way_recomputes_as_the_options_say(chosen, strategy, recompute):
    words = ["--gpu=l4", "--nodes-of=2", "--num_processes=4", "--train_batch_size=1", *shlex.split(chosen)]
    own = json.loads(planned(*words, "--json").output)["configured"]
    assert (own["strategy"], own["recompute"]) == (strategy, recompute)
    assert CommandLine.parse([*TOY, *words[2:], *shlex.split(own["flags"])]).config().problems == ()


def test_a_deprecated_strategy_is_named_with_its_replacement():
    words = ["--fsdp_enable", "--num_processes=4", "--train_batch_size=1"]
    for version in (1, 2):
        notices = json.loads(planned("--gpu=l4", *words, f"--fsdp_version={version}", "--json").output)["notices"]
        assert any("FSDP 1 is deprecated; --fsdp_version=2" in each for each in notices) == (version == 1)


def test_the_help_says_how_many_steps_are_measured():
    help_text = " ".join(CliRunner().invoke(smalti, ["plan", "--help"]).output.split())
    assert (STEPS, "Train thirteen real steps" in help_text) == (13, True)


def test_the_keys_of_json_are_those_of_the_documentation():
    page = (Path(__file__).parents[3] / "bench/plan.md").read_text()
    section = page.partition("## As JSON")[2].partition("\n## ")[0]
    whole, way = (
        {name for row in rows.splitlines() if row.startswith("| `") for name in re.findall("`(\\w+)`", row.split("|")[1])}
        for rows in section.split("Each way to train:")
    )
    found = json.loads(planned("--gpu=l4", "--json").output)
    assert found["schema"] == 1
    assert found.keys() == whole
    assert found["configured"].keys() == way
    [own] = [each for each in found["ranks"]["1"] if each["configured"]]
    assert own == found["configured"]
    assert own["peak"] == sum(own["phases"][own["peak_phase"]].values()) - own["phases"][own["peak_phase"]]["host"]


def test_the_table_marks_what_is_configured_and_lists_the_parts():
    output = planned("--gpu=rtx4090").output
    assert re.search(r"one process +none +4x1 .* fits .*<- as configured", output)
    assert re.search(r"parameters +\d+\.\d+ GiB", output)
    assert "NCCL" not in output  # one rank


@pytest.mark.parametrize("crash", CRASHES)
def test_a_rehearsal_that_crashes_or_hangs_leaves_the_table_with_a_note(crash, tmp_path, monkeypatch):
    script, said = CRASHES[crash]
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\ncd "{tmp_path}"\nwhile [ "$1" != -o ]; do shift; done\nout=$2\n{script}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr("smalti_plan.rehearsal.rehearse._LIMIT", 1.0 if crash == "hang" else 60.0)
    arguments = ["plan", *TOY, "--gpu=h100-80g", "--rehearse"]
    result = CliRunner().invoke(smalti, arguments, catch_exceptions=False, standalone_mode=False)
    assert result.return_value == 0
    assert re.search(r"one process +none +4x1 .* fits +formula .*<- as configured", result.output)
    [note] = [line for line in result.output.splitlines() if line.startswith("note: not rehearsed")]
    assert note.startswith(f"note: not rehearsed: one process: the process of the rehearsal {said}")


def test_an_unknown_device_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="'h100' is unknown") as error:
        planned("--gpu=h100")
    assert all(name in error.value.fix for name in device_models())


@pytest.mark.parametrize("text", ["0", "8..4", "many", "1..100000000"])
def test_numbers_of_devices_that_make_no_sense_are_refused(text):
    with pytest.raises(UserError, match="is not a number of devices"):
        planned("--gpu=l4", f"--gpus={text}")


def test_a_model_that_cannot_be_built_is_reported_as_a_run_would():
    with pytest.raises(UserError, match="Unknown model_family 'nothing'"):
        CliRunner().invoke(
            smalti, ["plan", "--model_family=nothing", "--gpu=l4"], catch_exceptions=False, standalone_mode=False
        )


def test_an_option_that_does_not_exist_is_refused_before_anything_is_counted():
    with pytest.raises(UserError, match="unknown option --no-such-option"):
        planned("--gpu=l4", "--no-such-option")


def test_ranks_that_cannot_share_samples_as_configured_are_refused():
    with pytest.raises(UserError, match="1 ranks cannot be split into groups of 2") as error:
        planned("--gpu=l4", "--context_parallel_size=2")
    assert error.value.fix == "--num_processes=2"
