"""The manifest of a RayJob, with which KubeRay starts a cluster for one run and ends it after that."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from smalti import UserError
from smalti_cluster.jobs.job import yaml_of

_CONFIG_FOLDER = "/etc/smalti"


@dataclass(frozen=True, kw_only=True)
class ManifestOptions:
    """The pods: `least` to `most` workers with these GPUs and cores, and a head that has none of them.

    `claim` is a persistent volume claim that all pods mount at `mount`, where they start.
    """

    image: str
    claim: str
    mount: str
    gpus: int
    cpus: int
    least: int
    most: int


def manifest(name: str, options: ManifestOptions, file: Path | None, words: Sequence[str]) -> str:
    """The manifest as YAML; `words` is the command on the head. Raises UserError without an image or a claim."""
    for option, value in (("image", options.image), ("claim", options.claim)):
        if not value:
            raise UserError("a manifest needs --image and --claim", fix=f"--{option}=NAME")
    documents: list[dict[str, Any]] = []
    meta = {"name": name, "labels": {"app.kubernetes.io/name": "smalti", "app.kubernetes.io/instance": name}}
    inside = list(words)
    if file is not None:
        content = {f"config{file.suffix}": file.read_text(encoding="utf-8")}
        documents.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": content})
        inside = [f"{_CONFIG_FOLDER}/config{file.suffix}" if word == str(file) else word for word in inside]
    command = f"cd {shlex.quote(options.mount)} && exec {shlex.join(inside)}"
    worker = {
        "groupName": "workers",
        "replicas": options.most,
        "minReplicas": options.least,
        "maxReplicas": options.most,
        "rayStartParams": {},
        "template": _template(name, options, mounted=file is not None, worker=True),
    }
    head = {"rayStartParams": {"num-cpus": "0"}, "template": _template(name, options, mounted=file is not None, worker=False)}
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": meta,
        "spec": {
            "entrypoint": f"sh -c {shlex.quote(command)}",
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "rayVersion": version("ray"),
                "enableInTreeAutoscaling": options.least < options.most,
                "headGroupSpec": head,
                "workerGroupSpecs": [worker],
            },
        },
    }
    return yaml_of([*documents, job]).rstrip("\n")


def _template(name: str, options: ManifestOptions, *, mounted: bool, worker: bool) -> dict[str, Any]:
    """A pod. That of a worker has /dev/shm in memory for the ranks, and the time to save when it is ended."""
    mounts = [{"name": "data", "mountPath": options.mount}, {"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [
        {"name": "data", "persistentVolumeClaim": {"claimName": options.claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}},
    ]
    if mounted:
        mounts.append({"name": "config", "mountPath": _CONFIG_FOLDER})
        volumes.append({"name": "config", "configMap": {"name": name}})
    amounts = {"cpu": str(options.cpus), **({"nvidia.com/gpu": str(options.gpus)} if options.gpus else {})}
    container = {
        "name": "ray-worker" if worker else "ray-head",
        "image": options.image,
        "workingDir": options.mount,
        **({"resources": {"requests": amounts, "limits": dict(amounts)}} if worker else {}),
        "volumeMounts": mounts,
    }
    grace = {"terminationGracePeriodSeconds": 300} if worker else {}
    return {"spec": {**grace, "containers": [container], "volumes": volumes}}
