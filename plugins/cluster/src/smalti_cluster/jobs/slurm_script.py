"""The job script for SLURM."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from smalti import UserError
from smalti_cluster.jobs.job import Job, comment

_PLAIN = re.compile(r"[A-Za-z0-9_.,:@/+=*%\[\]|&-]+")
"""What the value of a directive may contain; sbatch has its own rules for quotes."""
_TEMPLATE = """\
#!/bin/bash
# {title}
{directives}

cd -- {folder} || exit 3
{setup}smalti=({program})
run={directory}
script={file}
nodes={nodes}
spares={spares}
requeues={requeues} # the job is queued again at most this often
failures={failures} # and at most this often after a failure

# Whether somebody has cancelled this job: it is ending, but neither by its time limit nor for another job.
cancelled() {{
    local job
    job=$(scontrol --oneliner show job "$SLURM_JOB_ID") || return 1
    [[ " $job " =~ " JobState="(COMPLETING|CANCELLED)" " ]] || return 1
    [[ " $job " =~ " Reason=TimeLimit "|" PreemptTime="[0-9] ]] && return 1
    echo "smalti: job $SLURM_JOB_ID was cancelled, so it is not queued again" >&2
}}

# Queue this job again, at most $1 times.
requeue() {{
    [ "${{SLURM_RESTART_COUNT:-0}}" -lt "$1" ] && ! cancelled && scontrol requeue "$SLURM_JOB_ID"
}}

# Queue a job of the same kind, without the nodes on which the run has failed or that SLURM drains.
submit_elsewhere() {{
    local unusable
    [ "$1" -lt "$failures" ] && ! cancelled || return 1
    unusable=$("${{smalti[@]}}" launch nodes "$run" --unusable) || return 1
    sbatch ${{unusable:+--exclude="$unusable"}} "$script" "$(($1 + 1))"
}}

trap : TERM # the ranks get it too: wait for their checkpoint
submitted=${{1:-0}}
tries=0
while :; do
    usable=$("${{smalti[@]}}" launch nodes "$run" --count="$nodes")
    if [ "$?" -eq 9 ]; then # fewer than that
        submit_elsewhere "$submitted"
        exit 5
    fi
    begun=$(date +%s)
    # shellcheck disable=SC2016 # each node has its own SLURM_NODEID
    srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 ${{usable:+--nodelist="$usable"}} \\
        --cpu-bind=none --kill-on-bad-exit=0{no_kill} \\
        bash -c 'exec "$@" --machine_rank="$SLURM_NODEID"' smalti \\
        "${{smalti[@]}}" train {words}
    status=$?
    # srun can return 0 after a node has failed. The run directory has the result.
    code=$("${{smalti[@]}}" launch result "$run" --status="$status" --since="$begun") || code=$status
    case $code in
        5 | 9 | 137) [ "$tries" -lt "$spares" ] && ! cancelled || break ;; # else again on other nodes of this job
        *) break ;;
    esac
    tries=$((tries + 1))
done

case $code in
    6)
        "${{smalti[@]}}" launch progress "$run"
        [ "$?" -eq 10 ] || requeue "$requeues" # 10: several launches without a new step
        ;;
    75) requeue "$requeues" ;;
    9 | 137) requeue "$failures" ;;
    5) submit_elsewhere "$submitted" ;;
esac
exit "$code"
"""


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What SLURM is asked for beyond nodes and GPUs. Empty or None: not asked for.

    `directives` are further lines of #SBATCH, as in "--constraint=h100". `setup` are lines of shell that run first. `spares` is
    the number of nodes beyond those that the run trains on.
    """

    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""
    mem: str = ""
    cpus_per_task: int | None = None
    spares: int = 0
    requeues: int = 100
    failures: int = 10
    directives: Sequence[str] = ()
    setup: Sequence[str] = ()


def job_script(job: Job, options: SlurmOptions, *, program: Sequence[str], folder: Path, file: Path, title: str) -> str:
    """The script. `program` is how nodes call smalti, `folder` where they start, `file` where the script will lie.

    Raises UserError for a value that a directive cannot have.
    """
    words = [*job.words, f"--num_machines={job.nodes}", f"--num_processes={job.processes}"]
    cpus, kept = options.cpus_per_task, options.spares or job.elastic
    # --overlap: the step that has lost a node may still hold the cores of the others.
    exports = f"export SRUN_CPUS_PER_TASK={cpus}\n" if cpus else ""  # srun does not take it from the job
    return _TEMPLATE.format(
        title=comment(title),
        directives="\n".join(f"#SBATCH {each}" for each in _directives(job, options)),
        folder=shlex.quote(str(folder)),
        setup=exports + "".join(f"{line}\n" for line in options.setup),
        program=shlex.join(program),
        directory=shlex.quote(job.directory),
        file=shlex.quote(str(file)),
        nodes=job.nodes,
        spares=options.spares,
        requeues=options.requeues,
        failures=options.failures,
        no_kill=(" --no-kill" if kept else "") + (" --overlap" if options.spares else ""),
        words=shlex.join(words),
    )


def _directives(job: Job, options: SlurmOptions) -> list[str]:
    by_gres = any(line.startswith("--gres") for line in options.directives)
    values: dict[str, object] = {
        "job-name": job.name,
        "nodes": job.nodes + options.spares,
        "ntasks-per-node": 1,
        "gpus-per-node": "" if by_gres else job.gpus or "",
        "cpus-per-task": options.cpus_per_task or "",
        "mem": options.mem,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "time": options.time,
        "signal": f"USR1@{job.grace}",  # with "B:" it would reach this script only
    }
    if bad := [f"{name}={value}" for name, value in values.items() if value != "" and not _PLAIN.fullmatch(str(value))]:
        raise UserError(f"a directive of SLURM cannot have this value: --{bad[0]}", fix="give it without spaces and quotes")
    if bad := [line for line in options.directives if not line.startswith("-") or "\n" in line]:
        raise UserError(f"not a directive of SLURM: {bad[0]!r}", fix='as in --sbatch="--constraint=h100"')
    whole = ["--exclusive"] if options.cpus_per_task is None and job.nodes + options.spares > 1 else []
    if whole and not options.mem:
        whole.append("--mem=0")  # all of each node; without it the partition's default
    kept = ["--no-kill"] if options.spares or job.elastic else []  # the job stays when one of its nodes fails
    named = [f"--{name}={value}" for name, value in values.items() if value != ""]
    return [*named, *whole, *kept, "--requeue", "--open-mode=append", *options.directives]
