"""`smalti launch ray` before anything of Ray starts: its arguments, the command of Ray Jobs, the manifest for KubeRay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from smalti import ConfigError, UserError
from smalti.rundir import RunDirectory
from smalti_ray.launch.command import job_command, ray, worker_range
from smalti_ray.launch.manifest import ManifestOptions, manifest

OPTIONS = ManifestOptions(image="registry/smalti:1", claim="data", mount="/data", gpus=8, cpus=16, least=2, most=4)
WORDS = ["smalti", "launch", "ray", "runs/a.toml", "--workers=2:4"]


def given(tmp_path: Path, *words: str) -> list[str]:
    flags = ("--model_family=toy", f"--instance_data_dir={tmp_path}", f"--output_dir={tmp_path}/run", "--max_train_steps=9")
    return [*flags, "--use_cpu", *words]


@pytest.mark.parametrize(("text", "found"), [("8", (8, 8)), ("4:8", (4, 8)), ("1", (1, 1))])
def test_workers_are_a_number_or_a_range(text, found):
    assert worker_range(text) == found


@pytest.mark.parametrize("text", ["0", "4:2", "a", "4:", "-1", "1:2:3"])
def test_other_numbers_of_workers_are_refused(text):
    with pytest.raises(UserError, match="not a number of workers"):
        worker_range(text)


def test_a_configuration_that_no_number_of_workers_can_train_is_refused_before_ray_is_asked(tmp_path):
    words = given(tmp_path, "--workers=2", "--context_parallel_size=3", "--dry-run")
    with pytest.raises(ConfigError):
        CliRunner().invoke(ray, words, catch_exceptions=False, standalone_mode=False)
    assert not (tmp_path / "run").exists()


def test_an_address_without_a_cluster_is_named_with_what_to_do(tmp_path):
    words = given(tmp_path, "--workers=2", "--address=127.0.0.1:1")
    with pytest.raises(UserError, match=r"no Ray cluster at --address=127\.0\.0\.1:1") as raised:
        CliRunner().invoke(ray, words, catch_exceptions=False, standalone_mode=False)
    assert "ray start --head" in raised.value.fix
    assert raised.value.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_an_address_of_a_client_of_ray_is_refused(tmp_path):
    words = given(tmp_path, "--workers=2", "--address=ray://127.0.0.1:10001")
    with pytest.raises(UserError, match="that of a client"):
        CliRunner().invoke(ray, words, catch_exceptions=False, standalone_mode=False)


def test_the_command_of_ray_jobs_starts_in_this_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = job_command(["smalti", "launch", "ray", "a b.toml"])
    assert command == f"""ray job submit -- sh -c 'cd {tmp_path} && exec smalti launch ray '"'"'a b.toml'"'"''"""


def test_the_manifest_is_one_of_kuberay_and_its_pods_are_those_of_kubernetes(tmp_path):
    import jsonschema

    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    file = tmp_path / "a.toml"
    file.write_text("seed = 1\n")
    text = manifest("a", OPTIONS, file, [*WORDS[:3], str(file), WORDS[4]])
    files, job = yaml.safe_load_all(text)
    schema = json.loads((Path(__file__).parent / "rayjob_schema.json").read_text())
    jsonschema.validate(job["spec"], schema)
    for group in (job["spec"]["rayClusterSpec"]["headGroupSpec"], *job["spec"]["rayClusterSpec"]["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **group["template"]}
        validator.validate(pod, "1.37", strict=True)
    assert job["spec"]["entrypoint"] == "sh -c 'cd /data && exec smalti launch ray /etc/smalti/config.toml --workers=2:4'"
    assert files["data"] == {"config.toml": "seed = 1\n"}
    [workers] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert [workers[name] for name in ("replicas", "minReplicas", "maxReplicas")] == [4, 2, 4]
    assert job["spec"]["rayClusterSpec"]["enableInTreeAutoscaling"]


def test_a_misspelt_field_of_the_manifest_would_be_found():
    import jsonschema

    [job] = yaml.safe_load_all(manifest("a", OPTIONS, None, WORDS))
    job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["minReplica"] = 1
    schema = json.loads((Path(__file__).parent / "rayjob_schema.json").read_text())
    with pytest.raises(jsonschema.ValidationError, match="minReplica"):
        jsonschema.validate(job["spec"], schema)


def test_a_manifest_needs_an_image_and_a_claim():
    from dataclasses import replace

    with pytest.raises(UserError, match="needs --image and --claim"):
        manifest("a", replace(OPTIONS, claim=""), None, WORDS)


# --- what workers have to share ---------------------------------------------------------------------------------------


def test_a_worker_names_what_it_does_not_see(tmp_path):
    from smalti_ray.launch.driver import shared_file
    from smalti_ray.launch.worker import Worker

    worker = Worker("worker 0")
    with shared_file(tmp_path / "runs" / "a") as probe:
        [file] = probe
        assert worker.missing(probe, str(tmp_path / "runs" / "a"), str(tmp_path)) == []
        assert worker.missing({file: "of another machine"}, str(tmp_path / "runs" / "a"), str(tmp_path)) == [file]
        assert worker.missing({}, str(tmp_path / "other"), "/no/such/folder") == ["/no/such/folder", str(tmp_path / "other")]
    assert list(tmp_path.iterdir()) == [], "a run directory that was made for the check is removed"


def test_the_file_that_workers_look_for_leaves_a_run_as_it_is(tmp_path):
    from smalti_ray.launch.driver import shared_file

    (tmp_path / "events.jsonl").touch()
    with shared_file(tmp_path):
        assert len(list(tmp_path.iterdir())) == 2
    assert [each.name for each in tmp_path.iterdir()] == ["events.jsonl"]


def test_each_worker_is_a_node_of_the_group(tmp_path):
    from smalti_ray.launch.driver import Run
    from smalti_ray.launch.placement import Needs
    from smalti_ray.launch.worker import Facts

    run = Run(words=("a.toml",), processes=8, folder="/", directory=RunDirectory(tmp_path), files={}, restarts=3)
    needs = Needs(name="a", least=2, most=4, gpus=8, cpus=1, seconds=1)
    first = Facts(node="n", host="h", address="10.0.0.1", port=29501, versions={})
    words = run.arguments(needs, 3, first)
    assert words[:2] == ["a.toml", "--num_processes=32"]
    assert words[2:] == [
        *("--nodes=2:4", "--num_machines=4", "--machine_rank=3", "--main_process_ip=10.0.0.1", "--main_process_port=29501")
    ]


# --- the process of a worker --------------------------------------------------------------------------------------------


def test_the_process_of_a_worker_says_its_exit_code_through_the_pipe(tmp_path):
    from smalti_ray.launch.worker import Worker

    assert Worker("worker 0").run(["--no_such_option"], str(tmp_path), {"OMP_NUM_THREADS": "1"}) == 2
