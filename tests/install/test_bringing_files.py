"""Files that users of other trainers bring along: they work as they stand, or are refused with what to do about it."""

import json

import pytest

NEEDED = {
    "config-zero2.json": ["smalti-deepspeed"],
    "config-zero3-nvme.json": ["smalti-deepspeed"],
    "accelerate-4x8-zero1.yaml": ["smalti-deepspeed"],
    "accelerate-zero1.yaml": ["smalti-deepspeed"],
    "accelerate-fsdp.yaml": ["smalti-fsdp2"],
}


@pytest.mark.parametrize("name", NEEDED)
def test_a_file_for_plugins_that_are_left_out_names_them(site, data, name, tmp_path):
    (tmp_path / "images").mkdir()
    given = ("--model_family=toy", "--max_train_steps=1", f"--instance_data_dir={tmp_path / 'images'}")
    done = site.run("", "train", str(data / name), "--dry-run", "--without=all", *given, f"--output_dir={tmp_path / 'run'}")
    assert done.code == 4
    for package in NEEDED[name]:
        assert f"the plugin {package.removeprefix('smalti-')!r} is installed but disabled" in done.error


def test_an_accelerate_yaml_for_plugins_that_are_not_installed_is_refused_beside_a_configuration_too(site, data):
    done = site.run("", "config", "show", "--without=all", "--accelerate_config", str(data / "accelerate-fsdp.yaml"))
    assert (done.code, "fsdp_config needs smalti-fsdp2" in done.error) == (4, True)


def test_an_accelerate_yaml_for_four_machines_works_as_it_stands(site, data, tmp_path):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    flags = ("--model_family=toy", "--max_train_steps=1", f"--instance_data_dir={pictures}", f"--output_dir={tmp_path / 'run'}")
    file = data / "accelerate-4x8.yaml"
    told = json.loads(site.run("", "config", "show", str(file), *flags, "--json").out)
    values = {
        name: told["values"][name]["value"] for name in ("num_processes", "num_machines", "dynamo_backend", "dynamo_mode")
    }
    assert values == {"num_processes": 32, "num_machines": 4, "dynamo_backend": "inductor", "dynamo_mode": "max-autotune"}
    assert told["values"]["num_processes"]["source"] == f"Accelerate YAML (num_processes in {file})"
    assert told["notices"] == []
