"""The manifest of a job for Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from smalti import ExitCode, UserError
from smalti_cluster.jobs.job import Job, comment, yaml_of

PORT = 29500
_CONFIG_FOLDER = "/etc/smalti"
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]i?)?")
_RETRIES = 10
_NOT_COUNTED = (ExitCode.PREEMPTED,)
"""Exit codes after which a pod is started again, however often."""
_COUNTED = (ExitCode.GPU_FAULT, ExitCode.KILLED, ExitCode.TAKEN_OVER, ExitCode.UNAVAILABLE)
"""Exit codes after which a pod is started again, up to a limit."""


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """What a pod needs. `claim` is a persistent volume claim that all pods mount at `mount`, where they start.

    `memory` and `cpu` are requests, `shm` is the size of /dev/shm, `resources` are further limits by name, such as those of
    network devices. `secret` has variables for the pods, such as access keys. Empty: not in the manifest.
    """

    image: str
    claim: str
    mount: str = "/data"
    namespace: str = ""
    memory: str = ""
    cpu: str = ""
    shm: str = "16Gi"
    secret: str = ""
    resources: Mapping[str, str] = field(default_factory=dict)


def manifest(job: Job, options: KubernetesOptions, *, config: tuple[str, str] | None, title: str) -> str:
    """The manifest as YAML. `config` is the name and the content of the configuration file, the first of the job's words.

    Raises UserError for values that Kubernetes would refuse, and for a run directory that is not on the volume.
    """
    _check(job, options)
    documents = [] if config is None else [_config_map(job, options, *config)]
    documents += [_service(job, options)] if job.nodes > 1 else []
    documents.append(_job(job, options, None if config is None else config[0]))
    return f"# {comment(title)}\n{yaml_of(documents)}"


def _check(job: Job, options: KubernetesOptions) -> None:
    names = {"claim": options.claim, "namespace": options.namespace, "secret": options.secret}
    for option, name in names.items():
        if name and not _NAME.fullmatch(name):
            raise UserError(f"Kubernetes has no name {name!r}", fix=f"--{option}=NAME of lower-case letters, digits, - and .")
    quantities = {"memory": options.memory, "cpu": options.cpu, "shm": options.shm, **options.resources}
    for option, quantity in quantities.items():
        if quantity and not _QUANTITY.fullmatch(quantity):
            raise UserError(f"{quantity!r} is not a quantity of {option}", fix="a number with its unit, as in 64Gi")
    mount = PurePosixPath(options.mount)
    if not mount.is_absolute():
        raise UserError(f"{options.mount} is not an absolute path", fix="--mount=/data")
    if (place := PurePosixPath(job.directory)).is_absolute() and not place.is_relative_to(mount):
        raise UserError(
            f"--output_dir={place} is not on the volume, which is mounted at {mount}: checkpoints would be lost with the pod",
            fix=f"--output_dir={mount / place.name}, or another --mount",
        )


def _meta(job: Job, options: KubernetesOptions) -> dict[str, object]:
    return {
        "name": job.name,
        **({"namespace": options.namespace} if options.namespace else {}),
        "labels": {"app.kubernetes.io/name": "smalti", "app.kubernetes.io/instance": job.name},
    }


def _config_map(job: Job, options: KubernetesOptions, name: str, content: str) -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _meta(job, options), "data": {name: content}}


def _service(job: Job, options: KubernetesOptions) -> dict[str, object]:
    """Gives pods names, by which they find each other. They need them before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(job, options),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"app.kubernetes.io/instance": job.name},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


def _job(job: Job, options: KubernetesOptions, config: str | None) -> dict[str, object]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _meta(job, options),
        "spec": {
            "completions": job.nodes,
            "parallelism": job.nodes,
            "completionMode": "Indexed",
            "backoffLimit": _RETRIES * job.nodes,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": _rules()},
            "template": {"metadata": {"labels": _meta(job, options)["labels"]}, "spec": _pod(job, options, config)},
        },
    }


def _rules() -> list[dict[str, object]]:
    """What the exit codes mean: start the pod again, or end the job. A job that succeeds has exit code 0 on all pods."""
    known = {int(code) for code in ExitCode} - {0, *map(int, (*_NOT_COUNTED, *_COUNTED))}

    def rule(action: str, codes: set[int] | list[int]) -> dict[str, object]:
        return {"action": action, "onExitCodes": {"containerName": "smalti", "operator": "In", "values": sorted(codes)}}

    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        rule("Ignore", [int(code) for code in _NOT_COUNTED]),
        rule("FailJob", known),
        rule("Count", [int(code) for code in _COUNTED]),
    ]


def _pod(job: Job, options: KubernetesOptions, config: str | None) -> dict[str, object]:
    requests = {name: value for name, value in (("cpu", options.cpu), ("memory", options.memory)) if value}
    limits = {**({"nvidia.com/gpu": str(job.gpus)} if job.gpus else {}), **options.resources}
    words = [*job.words, f"--num_machines={job.nodes}", f"--num_processes={job.processes}"]
    mounts = [{"name": "data", "mountPath": options.mount}, {"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, object]] = [
        {"name": "data", "persistentVolumeClaim": {"claimName": options.claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}},
    ]
    if config is not None:
        words[0] = f"{_CONFIG_FOLDER}/{config}"
        mounts.append({"name": "config", "mountPath": _CONFIG_FOLDER})
        volumes.append({"name": "config", "configMap": {"name": job.name}})
    environment = {"NNODES": str(job.nodes), "MASTER_ADDR": f"{job.name}-0.{job.name}", "MASTER_PORT": str(PORT)}
    container: dict[str, object] = {
        "name": "smalti",
        "image": options.image,
        "command": ["smalti", "train"],
        "args": [word.replace("$", "$$") for word in words],  # else a variable of Kubernetes
        "workingDir": options.mount,
        "env": [{"name": name, "value": value} for name, value in environment.items()] if job.nodes > 1 else [],
        **({"envFrom": [{"secretRef": {"name": options.secret}}]} if options.secret else {}),
        "resources": {**({"requests": requests} if requests else {}), **({"limits": limits} if limits else {})},
        "volumeMounts": mounts,
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace,
        **({"subdomain": job.name} if job.nodes > 1 else {}),
        "containers": [{name: value for name, value in container.items() if value or value == 0}],
        "volumes": volumes,
    }
