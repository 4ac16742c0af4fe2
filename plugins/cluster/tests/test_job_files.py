"""Job scripts for SLURM, which run here with stand-ins for its commands, and manifests for Kubernetes, which are validated."""

import json
import os
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import HealthCheck, Phase, example, given, settings, strategies as st

from smalti.errors import ExitCode, UserError
from smalti.rundir import acquire
from smalti.rundir.directory import RunDirectory
from smalti_cluster.elastic.excluded import exclude
from smalti_cluster.jobs.commands import launch
from smalti_cluster.jobs.job import Job, job_name, job_of
from smalti_cluster.jobs.kubernetes_manifest import KubernetesOptions, manifest
from smalti_cluster.jobs.nodes_of_job import launches_without_step, nodes_with_faults, result_of
from smalti_cluster.jobs.sky_task import SkyOptions, gpus_of, sky_task
from smalti_cluster.jobs.slurm_script import SlurmOptions, job_script
from smalti_health import CircuitFault
from smalti_health.circuits import open_circuit

_STAND_INS = {
    "smalti": """
        case "$1 $2" in
            "launch nodes") case $4 in --unusable) echo bad ;; *) cat usable; exit $(cat too_few) ;; esac ;;
            "launch progress") exit $(cat progress) ;;
            "launch result") echo "${4#--status=}" ;;
            *) printf '%s\\0' "$@" >> words; exit $(cat status) ;;
        esac""",
    "srun": """echo "srun $*" | head -n 1 >> asked
        while [ "$1" != bash ]; do shift; done; SLURM_NODEID=1 "$@" """,
    "scontrol": """if [ "$1" = requeue ]; then echo "scontrol $*" >> asked; else cat job; fi""",
    "sbatch": 'echo "sbatch $*" >> asked',
}
"""Commands of a scheduler with one node, which write down what they are asked."""
PLAIN = Job(name="first", words=("config.toml",), directory="runs/first", nodes=2, processes=16, gpus=8, grace=300)
POD = KubernetesOptions(image="registry/smalti:1", claim="data")


class Cluster:
    """A folder with the commands of a scheduler, in which job scripts run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, body in _STAND_INS.items():
            (folder / name).write_text(f"#!/bin/bash\n{body}\n")
            (folder / name).chmod(0o755)

    def run(
        self,
        job: Job = PLAIN,
        *arguments: str,
        code: int = 0,
        too_few: bool = False,
        restarts: str = "",
        state: str = "JobState=RUNNING Reason=None",
        progress: int = 0,
        **options,
    ):
        """Run a script. Returns its exit code, what was asked of SLURM, and the words of the first `smalti train`.

        `state` is what SLURM says of the job, `progress` the exit code of the question whether it has made steps.
        """
        for name in ("asked", "words"):
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / "status").write_text(str(code))
        (self.folder / "too_few").write_text("9" if too_few else "0")
        (self.folder / "usable").write_text("gpu-1,gpu-2")
        (self.folder / "job").write_text(f"JobId=41007 JobName=first {state} Dependency=(null)\n")
        (self.folder / "progress").write_text(str(progress))
        script = self.folder / "train.sbatch"
        script.write_text(
            job_script(
                job,
                SlurmOptions(**options),
                program=(str(self.folder / "smalti"),),
                folder=self.folder,
                file=script,
                title="a test",
            )
        )
        environment = {**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "41007"}
        environment |= {"SLURM_RESTART_COUNT": restarts} if restarts else {}
        done = subprocess.run(
            ["bash", str(script), *arguments], cwd="/", env=environment, capture_output=True, text=True, timeout=60
        )
        asked, words = self.folder / "asked", self.folder / "words"
        return (
            done.returncode,
            asked.read_text().splitlines() if asked.exists() else [],
            words.read_bytes().decode().split("\0")[:-1] if words.exists() else [],
        )


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def test_each_node_is_told_its_index_and_the_number_of_nodes(cluster):
    code, asked, words = cluster.run()
    assert (code, words) == (
        0,
        ["train", "config.toml", "--num_machines=2", "--num_processes=16", "--machine_rank=1"],
    )
    assert asked[0].startswith("srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --nodelist=gpu-1,gpu-2 ")


_TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
_ONCE = settings(
    max_examples=6,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@_ONCE
@example(words=['it\'s $HOME `x` "y"', "\n", ""], directory="a b/$(x)'")
@given(words=st.lists(_TEXTS, max_size=4), directory=_TEXTS.filter(bool))
def test_words_and_paths_arrive_as_they_are_at_slurm(cluster, words, directory):
    job = Job(name="x", words=tuple(words), directory=directory, nodes=1, processes=1, gpus=1, grace=1)
    assert cluster.run(job)[2] == ["train", *words, "--num_machines=1", "--num_processes=1", "--machine_rank=1"]


@given(words=st.lists(_TEXTS, max_size=4), content=_TEXTS)
def test_words_and_files_arrive_as_they_are_at_kubernetes(words, content):
    job = Job(name="x", words=("c.toml", *words), directory="runs/x", nodes=1, processes=1, gpus=1, grace=1)
    text = manifest(job, POD, config=("c.toml", content), title="\n".join(words))
    config, made = yaml.safe_load_all(text)
    [container] = made["spec"]["template"]["spec"]["containers"]
    escaped = [word.replace("$", "$$") for word in words]
    assert (container["args"][1:-2], config["data"]) == (escaped, {"c.toml": content})


def expected(code: int, *, few_restarts: bool) -> list[str]:
    match code:
        case 6 | 75:
            return ["scontrol requeue 41007"]
        case 9 | 137:
            return ["scontrol requeue 41007"] if few_restarts else []
        case 5:
            return ["sbatch --exclude=bad "]
    return []


@pytest.mark.parametrize("code", [*ExitCode, 137])
def test_a_job_is_queued_again_exactly_when_the_table_says_so(cluster, code):
    for restarts in ("3", "30"):
        left, asked, _ = cluster.run(code=int(code), restarts=restarts)
        found = [line.partition(str(cluster.folder))[0] for line in asked if not line.startswith("srun")]
        assert (left, found) == (int(code), expected(int(code), few_restarts=restarts == "3"))


def test_a_job_is_queued_again_a_limited_number_of_times(cluster):
    assert len(cluster.run(code=6, restarts="100")[1]) == 1
    assert len(cluster.run(PLAIN, "10", code=5)[1]) == 1
    assert cluster.run(PLAIN, "4", code=5)[1][1].endswith("train.sbatch 5")


@pytest.mark.parametrize("code", [5, 6, 9, 75, 137])
@pytest.mark.parametrize(
    ("state", "cancelled"),
    [
        ("JobState=COMPLETING Reason=None PreemptEligibleTime=2026-01-01T00:00:00 PreemptTime=None", True),
        ("JobState=CANCELLED Reason=None", True),
        ("JobState=COMPLETING Reason=TimeLimit PreemptTime=None", False),
        ("JobState=COMPLETING Reason=None PreemptTime=2026-01-01T00:00:00", False),
        ("JobState=RUNNING Reason=None", False),
    ],
)
def test_a_cancelled_job_is_not_queued_again(cluster, code, state, cancelled):
    asked = [line for line in cluster.run(code=code, state=state, spares=1)[1] if not line.startswith("srun")]
    assert (len(asked) == 0) is cancelled
    assert bool(cluster.run(too_few=True, state=state)[1]) is not cancelled


def test_a_job_without_new_steps_is_not_queued_again(cluster):
    assert len(cluster.run(code=6, progress=10)[1]) == 1
    assert len(cluster.run(code=6, progress=1)[1]) == 2, "a failure of the question is no answer"


def test_launches_without_a_new_step_are_counted(tmp_path):
    def train(*steps: int) -> int:
        writer = acquire(RunDirectory(tmp_path), config_digest="d", world_size=1)
        for step in steps:
            writer.events.append("step", step=step)
        writer.end(max(steps, default=0), "preempted", "stopped", 6)
        writer.close()
        return launches_without_step(tmp_path)

    assert launches_without_step(tmp_path) == 0
    assert [train(1, 2), train(), train(2), train(), train(3), train()] == [0, 1, 2, 3, 0, 1]
    for code, more in ((0, ()), (10, (None, None))):
        for _ in more:
            train()
        assert CliRunner().invoke(launch, ["progress", str(tmp_path)]).exit_code == code


@pytest.mark.parametrize("line", ["--array=0-1", "-a 0-1", "--array 0-1"])
def test_a_job_array_is_refused(line):
    with pytest.raises(UserError, match="same run directory"):
        CliRunner().invoke(launch, ["slurm", "c.toml", f"--sbatch={line}"], catch_exceptions=False)


def test_a_job_on_nodes_that_the_run_cannot_use_is_queued_elsewhere(cluster):
    code, asked, words = cluster.run(too_few=True)
    assert (code, words, [line.partition(" ")[0] for line in asked]) == (5, [], ["sbatch"])


@pytest.mark.parametrize(("code", "starts"), [(5, 3), (9, 3), (137, 3), (6, 1), (0, 1), (1, 1)])
def test_spare_nodes_take_the_place_of_failed_ones_within_the_job(cluster, code, starts):
    _, asked, _ = cluster.run(code=code, spares=2)
    tries = [line for line in asked if line.startswith("srun")]
    assert (len(tries), all("--no-kill" in line for line in tries)) == (starts, True)


def test_a_range_of_nodes_asks_for_the_most_of_them_and_keeps_the_job_when_one_is_lost(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--model_family=toy", "--instance_data_dir=p", "--output_dir=run", "--max_train_steps=4", "--use_cpu"]
    called = CliRunner().invoke(launch, ["slurm", *flags, "--nodes=2:3", "--dry-run"], catch_exceptions=False)
    assert {"#SBATCH --nodes=3", "#SBATCH --no-kill"} <= set(called.output.splitlines())
    assert "--kill-on-bad-exit=0 --no-kill \\\n" in called.output
    assert "--nodes=2:3 --grace_seconds=300 --num_machines=3 --num_processes=3" in called.output
    with pytest.raises(UserError, match="is not a number of nodes"):
        CliRunner().invoke(launch, ["slurm", *flags, "--nodes=2-3"], catch_exceptions=False)


def directives(job: Job = PLAIN, **options) -> list[str]:
    script = job_script(job, SlurmOptions(**options), program=("smalti",), folder=Path("/w"), file=Path("/w/f"), title="x")
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]


def test_directives_say_what_the_job_needs():
    assert directives(partition="gpu", time="24:00:00", mem="0", cpus_per_task=64, directives=["--constraint=h100"]) == [
        "--job-name=first",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--cpus-per-task=64",
        "--mem=0",
        "--partition=gpu",
        "--time=24:00:00",
        "--signal=USR1@300",
        "--requeue",
        "--open-mode=append",
        "--constraint=h100",
    ]
    assert {"--exclusive", "--mem=0", "--no-kill", "--nodes=4"} <= set(directives(spares=2))
    assert {"--exclusive", "--mem=500G"} <= set(directives(mem="500G"))
    assert "--mem=0" not in directives(mem="500G")
    by_gres = directives(directives=["--gres=gpu:8"])
    assert ("--gres=gpu:8" in by_gres, "--gpus-per-node=8" in by_gres) == (True, False)


@pytest.mark.parametrize("options", [{"partition": "a b"}, {"account": "x\n#SBATCH --nice"}, {"directives": ["rm -r"]}])
def test_a_directive_cannot_be_anything(options):
    with pytest.raises(UserError, match="directive of SLURM"):
        directives(**options)


@pytest.mark.parametrize(
    ("text", "name"),
    [("First Run", "first-run"), ("12b", "smalti-12b"), ("__", "smalti"), ("a" * 80, "a" * 50), ("Ü", "smalti")],
)
def test_names_of_jobs_are_names_of_hosts(text, name):
    assert job_name(text) == name


# --- what a configuration needs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "nodes", "gpus", "expected"),
    [
        ((), 1, None, (1, 1, 1)),
        ((), 2, 8, (2, 16, 8)),
        (("--num_processes=16",), 2, None, (2, 16, 8)),
        (("--num_machines=2", "--num_processes=16", "--main_process_ip=h"), None, None, (2, 16, 8)),
        (("--use_cpu",), 2, None, (2, 2, 0)),
        (("--use_cpu", "--num_processes=4"), 2, None, (2, 4, 0)),
    ],
)
def test_nodes_and_gpus_come_from_the_options(configure, flags, nodes, gpus, expected):
    job = job_of(configure("--output_dir=runs/a b", *flags), ["c"], nodes=nodes, gpus=gpus, name=None)
    assert ((job.nodes, job.processes, job.gpus), job.name) == (expected, "a-b")


@pytest.mark.parametrize(
    ("flags", "match"), [((), "GPUs of a node is unknown"), (("--num_processes=3",), "is not 1 on each of 2")]
)
def test_a_number_of_gpus_that_is_not_known_or_does_not_fit_is_refused(configure, flags, match):
    with pytest.raises(UserError, match=match):
        job_of(configure("--output_dir=r", *flags), [], nodes=2, gpus=None, name=None)


# --- Kubernetes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_manifest_is_valid(nodes):
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    job = Job(name="a", words=("c.toml",), directory="runs/a", nodes=nodes, processes=8, gpus=0 if nodes == 1 else 4, grace=600)
    options = KubernetesOptions(
        image="r/s:1", claim="data", namespace="ml", memory="500Gi", cpu="64", secret="keys", resources={"rdma/hca": "1"}
    )
    made = list(yaml.safe_load_all(manifest(job, options, config=("config.toml", "a = 1\nb = '${x}'\n"), title="x")))
    for each in made:
        validator.validate(each, "1.37", strict=True)
    kinds = [each["kind"] for each in made]
    assert kinds == (["ConfigMap", "Service", "Job"] if nodes > 1 else ["ConfigMap", "Job"])
    assert made[0]["data"] == {"config.toml": "a = 1\nb = '${x}'\n"}


def test_each_exit_code_has_one_rule():
    *_, made = yaml.safe_load_all(manifest(PLAIN, POD, config=None, title="x"))
    rules = [(rule["action"], rule["onExitCodes"]["values"]) for rule in made["spec"]["podFailurePolicy"]["rules"][1:]]
    assert sorted(code for _, codes in rules for code in codes) == sorted({int(code) for code in ExitCode} - {0})
    actions = {code: action for action, codes in rules for code in codes}
    assert [actions[code] for code in (6, 5, 9, 75, 1, 2, 3, 4, 8, 10)] == ["Ignore", *["Count"] * 3, *["FailJob"] * 6]


def test_pods_have_names_memory_and_time_to_save():
    *_, made = yaml.safe_load_all(manifest(PLAIN, POD, config=("config.toml", "x"), title="x"))
    pod = made["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert (pod["subdomain"], pod["terminationGracePeriodSeconds"]) == ("first", 300)
    assert container["args"] == ["/etc/smalti/config.toml", "--num_machines=2", "--num_processes=16"]
    assert {"name": "MASTER_ADDR", "value": "first-0.first"} in container["env"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}} in pod["volumes"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"claim": "A B"}, "no name 'A B'"),
        ({"shm": "much"}, "is not a quantity of shm"),
        ({"mount": "data"}, "not an absolute"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_first(options, match):
    with pytest.raises(UserError, match=match):
        manifest(PLAIN, KubernetesOptions(**{"image": "i", "claim": "c", **options}), config=None, title="x")


def test_a_run_directory_outside_of_the_volume_is_refused():
    job = Job(name="a", words=("c",), directory="/home/runs/a", nodes=1, processes=1, gpus=1, grace=1)
    with pytest.raises(UserError, match="checkpoints would be lost with the pod"):
        manifest(job, POD, config=None, title="x")


# --- what the script asks ---------------------------------------------------------------------------------------------


def test_nodes_whose_accelerators_have_failed_within_a_week_are_left_out(tmp_path):
    for host, days in (("gpu-1.cluster", 1.0), ("gpu-2", 8.0)):
        fault = CircuitFault(kind="ecc", time=time.time() - days * 86400, step=1, host=host, rank=0)
        open_circuit(tmp_path, 0, fault)
    assert nodes_with_faults(tmp_path) == {"gpu-1"}
    exclude(tmp_path, 1, None)
    assert nodes_with_faults(tmp_path) == {"gpu-1", socket.gethostname().partition(".")[0]}


def test_srun_is_not_believed_when_it_returns_0(tmp_path):
    since = time.time()
    assert (result_of(tmp_path, 0, since), result_of(tmp_path, 137, since), result_of(tmp_path, 3, since)) == (9, 137, 3)
    writer = acquire(RunDirectory(tmp_path), config_digest="d", world_size=1)
    assert result_of(tmp_path, 0, since) == 9
    writer.end(5, "finished", "trained 5 steps", 0)
    writer.close()
    assert (result_of(tmp_path, 0, since), result_of(tmp_path, 137, since)) == (0, 0)
    assert result_of(tmp_path, 0, since + 3600) == 9


def test_a_job_is_written_once_and_submitted_with_the_nodes_to_leave_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Cluster(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "c.toml").write_text('model_family = "toy"\ninstance_data_dir = "p"\noutput_dir = "run"\nmax_train_steps = 4\n')
    (tmp_path / "run").mkdir()
    open_circuit(tmp_path / "run", 0, CircuitFault(kind="ecc", time=time.time(), step=1, host="gpu-9", rank=0))
    words = ["slurm", "c.toml", "--nodes=2", "--gpus_per_node=4", "--seed=3"]
    called = [CliRunner().invoke(launch, [*words, "--submit"], catch_exceptions=False) for _ in range(2)]
    assert [each.exit_code for each in called] == [0, 0]
    assert (tmp_path / "asked").read_text().splitlines() == [f"sbatch --exclude=gpu-9 {tmp_path / 'run.sbatch'}"] * 2
    assert (
        "train c.toml --seed=3 --grace_seconds=300 --num_machines=2 --num_processes=8" in (tmp_path / "run.sbatch").read_text()
    )
    with pytest.raises(UserError, match="exists and has other content"):
        CliRunner().invoke(launch, [*words, "--time=1:00:00"], catch_exceptions=False)


def test_a_configuration_that_cannot_train_is_not_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no dataset given"):
        CliRunner().invoke(launch, ["slurm", "--model_family=toy", "--output_dir=run"], catch_exceptions=False)
    assert json.dumps([path.name for path in tmp_path.iterdir()]) == "[]"


# --- SkyPilot ---------------------------------------------------------------------------------------------------------


SKY = SkyOptions(gpus="H100:8", bucket="s3://b/first", folder=Path("/home/a"), spot=True, mounts={"/data": "s3://b/images"})


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_task_is_one_of_skypilot_and_resumes_by_itself_after_the_codes_that_say_again(nodes):
    """The schema is in a file: SkyPilot needs an older click than smalti."""
    import jsonschema

    task = yaml.safe_load(sky_task(replace(PLAIN, nodes=nodes, processes=8 * nodes), SKY, title="x"))
    jsonschema.validate(task, json.loads((Path(__file__).parent / "sky_schema.json").read_text()))
    assert (task["num_nodes"], task["resources"]["accelerators"], task["resources"]["use_spot"]) == (nodes, "H100:8", True)
    again = task["resources"]["job_recovery"]["recover_on_exit_codes"]
    assert again == [5, 6, 9, 75]
    assert task["run"].startswith(f"exec smalti train config.toml --output_dir=s3://b/first --num_processes={8 * nodes}")
    assert ("--machine_rank=$SKYPILOT_NODE_RANK" in task["run"]) == (nodes > 1)


def test_the_command_of_the_task_asks_each_machine_which_node_it_is(tmp_path):
    task = yaml.safe_load(sky_task(PLAIN, SKY, title="x"))
    (tmp_path / "smalti").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "smalti").chmod(0o755)
    variables = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
    words = subprocess.run(["bash", "-c", task["run"]], env=environment, capture_output=True, text=True, check=True).stdout
    assert words.split()[-4:] == [
        "--no_shared_output_dir",
        "--num_machines=2",
        "--machine_rank=1",
        "--main_process_ip=10.0.0.4",
    ]


def test_a_task_whose_checkpoints_would_be_lost_or_that_names_no_gpus_is_refused():
    with pytest.raises(UserError, match="is not in a bucket"):
        sky_task(PLAIN, replace(SKY, bucket="/data/first"), title="x")
    with pytest.raises(UserError, match="--gpus=8 names no GPUs"):
        gpus_of("8")
    assert [gpus_of(text) for text in ("H100:8", "A10G")] == [8, 1]
