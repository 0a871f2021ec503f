"""The objects of a run on Kubernetes, as plain values: what each role needs, and what happens when it fails."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from jaxagent.launch.processes import OURS, TOKEN, Run

_SIGNS = "/tmp/jaxagent"  # goes with its container, so that no container reads another one's
_RESTART = "jobset.sigs.k8s.io/restart-attempt"  # label of a JobSet's pods
_TOLD = [1, 2]  # exit codes of a trainer that has said what is wrong: another start would come to the same


@dataclasses.dataclass(frozen=True)
class Tpu:
    """A slice as GKE names it."""

    kind: str  # of cloud.google.com/gke-tpu-accelerator
    topology: str  # such as 2x2x4
    chips: int  # of a host
    hosts: int


@dataclasses.dataclass(frozen=True)
class Devices:
    """What one pod computes on."""

    gpus: int = 0
    tpu: Tpu | None = None


@dataclasses.dataclass(frozen=True)
class Pods:
    """What all pods of a run have in common."""

    name: str
    namespace: str
    image: str
    run: Run
    workdir: str  # absolute
    claim: str  # mounted there
    mounts: tuple[tuple[str, str], ...]  # claim, path; read only
    secret: str
    port: int
    cpus: str
    memory: str
    start_s: int
    more: Mapping[str, Sequence[Mapping[str, Any]]]  # role, or "" for all -> what is merged into the spec of its pods

    @property
    def url(self) -> str:
        """Of the coordinator."""
        return f"http://{self.name}-coordinator:{self.port}"

    def meta(self, role: str) -> dict[str, Any]:
        """Name and labels of an object."""
        return {"name": f"{self.name}-{role}", "namespace": self.namespace, "labels": self.labels(role)}

    def labels(self, role: str) -> dict[str, str]:
        """By which an object finds its pods."""
        return {"app.kubernetes.io/name": "jaxagent", "jaxagent/run": self.name, "jaxagent/role": role}


def secret(pods: Pods, token: str) -> dict[str, Any]:
    """The run's secret."""
    meta = {**pods.meta("token"), "name": pods.secret}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "Opaque", "stringData": {"token": token}}


def claim(pods: Pods, size: str, storage_class: str) -> dict[str, Any]:
    """The workdir: ledger, weights and checkpoints."""
    spec: dict[str, Any] = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": size}}}
    if storage_class:
        spec["storageClassName"] = storage_class
    meta = {**pods.meta("workdir"), "name": pods.claim}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": spec}


def service(pods: Pods) -> dict[str, Any]:
    """The coordinator's name. Without an address of its own: a call always reaches the pod that is there."""
    ports = [{"name": "http", "port": pods.port}]
    spec = {"clusterIP": "None", "selector": pods.labels("coordinator"), "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": pods.meta("coordinator"), "spec": spec}


def coordinator(pods: Pods) -> dict[str, Any]:
    """One pod, which is never there twice: a new one starts when the old one is known to be gone."""
    command = [*_keep(pods, "coordinator", grace_s=30), *pods.run.coordinator(f"0.0.0.0:{pods.port}")]
    pod = _pod(pods, "coordinator", command, Devices(), grace_s=30, cpus="1", memory="4Gi")
    container = pod["spec"]["containers"][0]
    container["ports"] = [{"name": "http", "containerPort": pods.port}]
    container["readinessProbe"] = {"tcpSocket": {"port": "http"}, "periodSeconds": 2}
    spec = {
        "serviceName": f"{pods.name}-coordinator",
        "replicas": 1,
        "selector": {"matchLabels": pods.labels("coordinator")},
        "template": pod,
    }
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": pods.meta("coordinator"), "spec": spec}


def trainers(pods: Pods, processes: int, devices: Devices, restarts: int) -> dict[str, Any]:
    """A gang: when one pod fails all are made anew, with another port for JAX's coordination."""
    name = f"{pods.name}-trainer"
    port = f"$(({pods.port + 1} + ${{RESTART:-0}} % {OURS}))"
    first = f"--meet={name}-trainer-0-0.{name}:"
    words = pods.run.trainer(pods.url, "POD_IP", 0, processes)
    of_a_shell = {
        "--host=POD_IP": '--host="$POD_IP"',
        "--name=trainer-0": '--name="trainer-$JOB_COMPLETION_INDEX"',
        "--rank=0": '--rank="$JOB_COMPLETION_INDEX"',
        "--meet=": f"{first}{port}",
    }
    shell = " ".join(of_a_shell.get(word) or shlex.quote(word) for word in words)
    keep = shlex.join(_keep(pods, "trainer", grace_s=180, restarts=0))
    pod = _pod(pods, "trainer", ["bash", "-c", f"exec {keep} {shell}"], devices, grace_s=180)
    pod["spec"]["restartPolicy"] = "Never"
    pod["spec"]["containers"][0]["env"].append(
        {"name": "RESTART", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{_RESTART}']"}}}
    )
    told = {"action": "FailJob", "onExitCodes": {"containerName": "trainer", "operator": "In", "values": _TOLD}}
    job = {
        "completionMode": "Indexed",
        "completions": processes,
        "parallelism": processes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [told]},
        "template": pod,
    }
    final = {"name": "told", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": restarts, "restartStrategy": "BlockingRecreate", "rules": [final]},
        "replicatedJobs": [{"name": "trainer", "replicas": 1, "template": {"spec": job}}],
    }
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": pods.meta("trainer"), "spec": spec}


def engine_deployment(pods: Pods, engines: int, devices: Devices, restarts: int) -> dict[str, Any]:
    """Any number, at any time: `kubectl scale`, or an autoscaler. `restarts` is Kubernetes' own: without end."""
    spec = {
        "replicas": engines,
        "selector": {"matchLabels": pods.labels("engine")},
        "strategy": {"type": "Recreate"},  # a new one would wait for the devices of an old one
        "template": _engine(pods, devices),
    }
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": pods.meta("engine"), "spec": spec}


def engine_job(pods: Pods, engines: int, devices: Devices, restarts: int) -> dict[str, Any]:
    """Engines that end with the run and give their devices back. A node that is taken away does not count."""
    pod = _engine(pods, devices)
    pod["spec"]["restartPolicy"] = "Never"
    mistake = {"action": "FailIndex", "onExitCodes": {"containerName": "engine", "operator": "In", "values": [2]}}
    taken = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    spec = {
        "completionMode": "Indexed",
        "completions": engines,
        "parallelism": engines,
        "backoffLimitPerIndex": restarts,
        "podFailurePolicy": {"rules": [taken, mistake]},
        "template": pod,
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": pods.meta("engine"), "spec": spec}


def _engine(pods: Pods, devices: Devices) -> dict[str, Any]:
    command = [*_keep(pods, "engine", grace_s=30), *pods.run.engine(pods.url, "$(POD_IP)", "$(POD_NAME)")]
    return _pod(pods, "engine", command, devices, grace_s=30)


def _keep(pods: Pods, role: str, grace_s: int, restarts: int = 100) -> list[str]:
    """What watches a pod's process, and starts it again by the rule of all launchers; Kubernetes sees what is final."""
    words = [f"--name={role}", f"--folder={_SIGNS}", f"--restarts={restarts}", f"--start_s={pods.start_s}"]
    return ["python", "-m", "jaxagent.launch.keep", *words, f"--grace_s={grace_s - 10}", "--"]


def _pod(
    pods: Pods, role: str, command: list[str], devices: Devices, grace_s: int, cpus: str = "", memory: str = ""
) -> dict[str, Any]:
    """A pod's template."""
    shared = role != "engine"
    volumes: list[dict[str, Any]] = [
        {"name": "workdir", **({"persistentVolumeClaim": {"claimName": pods.claim}} if shared else {"emptyDir": {}})},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # collectives between the GPUs of a host
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "workdir", "mountPath": pods.workdir},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    for number, (name, path) in enumerate(pods.mounts):
        volumes.append({"name": f"data-{number}", "persistentVolumeClaim": {"claimName": name, "readOnly": True}})
        mounts.append({"name": f"data-{number}", "mountPath": path, "readOnly": True})
    limits: dict[str, str] = {}
    if devices.gpus:
        limits["nvidia.com/gpu"] = str(devices.gpus)
    if devices.tpu:
        limits["google.com/tpu"] = str(devices.tpu.chips)
    container: dict[str, Any] = {
        "name": role,
        "image": pods.image,
        "command": command,
        "env": [
            {"name": TOKEN, "valueFrom": {"secretKeyRef": {"name": pods.secret, "key": "token"}}},
            # Compiled programs outlive the container: with the run's claim, or in an engine's folder with its pod.
            {"name": "XDG_CACHE_HOME", "value": f"{pods.workdir}/.cache"},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        ],
        "resources": {"requests": {"cpu": cpus or pods.cpus, "memory": memory or pods.memory}, "limits": limits},
        "volumeMounts": mounts,
    }
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": grace_s,
        "shareProcessNamespace": True,  # what an environment leaves behind is reaped, and SIGTERM is nobody's to ignore
        "containers": [container],
        "volumes": volumes,
    }
    if devices.tpu:
        spec["nodeSelector"] = {
            "cloud.google.com/gke-tpu-accelerator": devices.tpu.kind,
            "cloud.google.com/gke-tpu-topology": devices.tpu.topology,
        }
    for more in (*pods.more.get("", ()), *pods.more.get(role, ())):
        spec = merged(spec, more)
    return {"metadata": {"labels": pods.labels(role)}, "spec": spec}


def merged(spec: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`spec` with what `more` has besides: objects key by key, other values in place.

    Lists come one behind the other, but objects of one name (containers, volumes, variables) become one object, and so
    do mounts of one path.
    """
    out = dict(spec)
    for name, value in more.items():
        was = out.get(name)
        if isinstance(was, Mapping) and isinstance(value, Mapping):
            out[name] = merged(was, value)
        elif isinstance(was, list) and isinstance(value, list):
            items = list(was)
            for item in value:
                same = next((i for i, other in enumerate(items) if _key(item) and _key(other) == _key(item)), None)
                if same is None:
                    items.append(item)
                else:
                    items[same] = merged(items[same], item)
            out[name] = items
        else:
            out[name] = value
    return out


def _key(item: Any) -> Any:
    """By what Kubernetes tells an object of a list from the others; None where it does not."""
    return item.get("mountPath", item.get("name")) if isinstance(item, Mapping) else None
