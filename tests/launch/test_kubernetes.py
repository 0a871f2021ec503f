"""The objects of a run on Kubernetes, against the schemas of Kubernetes and of JobSet."""

import copy
import json
import pathlib
import re
import stat

import pytest

from jaxagent.config import ConfigError
from launch import kubernetes

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema checks what is printed")

FLAGS = ["--config=configs/search_r1.py", "--config.workdir=/runs/a", "--name=a", "--image=registry/jaxagent:1"]
JOBSET = json.loads((pathlib.Path(__file__).parent / "jobset_schema.json").read_text())


MORE = pathlib.Path(__file__).parent / "pod_spec.json"


def objects(*flags: str) -> dict[str, dict]:
    listing, _ = kubernetes.listing([*FLAGS, *flags])
    assert (listing["kind"], listing["apiVersion"]) == ("List", "v1")
    return {item["kind"]: item for item in json.loads(json.dumps(listing))["items"]}


def check(item: dict) -> None:
    """Raises what the validator raises."""
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate has the schemas")
    if item["kind"] != "JobSet":
        validator.validate(item, "1.35", strict=True)
        return
    assert item["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    jsonschema.validate(item["spec"], JOBSET["spec"])
    for job in item["spec"]["replicatedJobs"]:
        named = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
        validator.validate(named, "1.35", strict=True)


@pytest.mark.slow  # reading the schemas takes seconds
@pytest.mark.parametrize(
    ("flags", "kinds"),
    [
        (
            f"--engines=4 --gpus=8 --engine_gpus=1 --pod_spec={MORE} --pod_spec=engine:{MORE}",
            "Secret PersistentVolumeClaim Service StatefulSet JobSet Deployment",
        ),
        ("--pvc=runs --secret=mine --engines_kind=job --mount=base:/models", "Service StatefulSet JobSet Job"),
        (
            "--config.fleet=on --config.fleet.trainers=4 --config.mesh.fsdp=16 --tpu=tpu-v5p-slice:2x2x4:4 "
            "--storage_class=nfs",
            "Secret PersistentVolumeClaim Service StatefulSet JobSet Deployment",
        ),
    ],
)
def test_every_object_is_what_its_schema_wants(flags, kinds):
    made = objects(*flags.split())
    assert list(made) == kinds.split()
    for item in made.values():
        check(item)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("StatefulSet", ("spec", "replica"), 1),
        ("StatefulSet", ("spec", "replicas"), "one"),
        ("JobSet", ("spec", "failurePolicy", "restartStrategy"), "Restart"),
        ("JobSet", ("spec", "network", "subDomain"), "x"),
        ("JobSet", ("spec", "replicatedJobs", 0, "template", "spec", "completion"), 2),
        ("Deployment", ("spec", "template", "spec", "containers", 0, "resources", "limit"), 3),
    ],
)
def test_the_check_sees_a_field_that_is_wrong(kind, path, value):
    """Else the test above would say nothing."""
    item = copy.deepcopy(objects()[kind])
    at = item
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    with pytest.raises(Exception, match=re.escape(str(path[-1])) + "|" + re.escape(repr(value))):
        check(item)


def test_a_file_is_for_its_owner_alone(tmp_path):
    assert kubernetes.main([*FLAGS, f"--out={tmp_path / 'run.json'}"]) == 0
    assert stat.S_IMODE((tmp_path / "run.json").stat().st_mode) == 0o600
    assert json.loads((tmp_path / "run.json").read_text())["items"][0]["kind"] == "Secret"


def test_names_lead_from_one_object_to_the_other():
    trainers = "--config.fleet=on", "--config.fleet.trainers=3", "--config.mesh.fsdp=24"
    made = objects("--gpus=8", *trainers, "--port=9000", "--engines=2")
    jobset, coordinator, engines = made["JobSet"], made["StatefulSet"], made["Deployment"]
    (job,) = jobset["spec"]["replicatedJobs"]
    trainer = job["template"]["spec"]["template"]["spec"]["containers"][0]
    # The first pod of a JobSet: <set>-<job>-<index>-<pod>, in the subdomain that the set makes.
    host = f"{jobset['metadata']['name']}-{job['name']}-0-0.{jobset['spec']['network']['subdomain']}"
    shell = trainer["command"][-1]
    assert f"--meet={host}:$((9001 + ${{RESTART:-0}} % 100))" in shell and "--processes=3" in shell
    assert '--rank="$JOB_COMPLETION_INDEX"' in shell and '--host="$POD_IP"' in shell
    assert job["template"]["spec"]["completions"] == job["template"]["spec"]["parallelism"] == 3
    service = made["Service"]
    url = f"--coordinator=http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert url in shell and url in engines["spec"]["template"]["spec"]["containers"][0]["command"]
    template = coordinator["spec"]["template"]
    assert (
        service["spec"]["selector"] == coordinator["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    )
    for command in (shell.split(), engines["spec"]["template"]["spec"]["containers"][0]["command"]):
        assert "jaxagent.launch.keep" in command and "--folder=/tmp/jaxagent" in command
    assert "--listen=0.0.0.0:9000" in template["spec"]["containers"][0]["command"]
    claim, secret = made["PersistentVolumeClaim"]["metadata"]["name"], made["Secret"]["metadata"]["name"]
    for pod in (template, job["template"]["spec"]["template"]):
        assert pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim
    for pod in (template, job["template"]["spec"]["template"], engines["spec"]["template"]):
        environment = pod["spec"]["containers"][0]["env"]
        assert environment[0]["valueFrom"]["secretKeyRef"] == {"name": secret, "key": "token"}
        assert pod["spec"]["containers"][0]["volumeMounts"][0] == {"name": "workdir", "mountPath": "/runs/a"}
    assert trainer["resources"]["limits"] == {"nvidia.com/gpu": "8"}


def test_a_pod_spec_is_merged_into_the_pods_of_its_role():
    made = objects(f"--pod_spec={MORE}", f"--pod_spec=engine:{MORE}", "--mount=base:/models")
    more = json.loads(MORE.read_text())
    pods = {
        "coordinator": made["StatefulSet"]["spec"]["template"]["spec"],
        "trainer": made["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"],
        "engine": made["Deployment"]["spec"]["template"]["spec"],
    }
    for role, pod in pods.items():
        assert pod["tolerations"] == more["tolerations"] * (2 if role == "engine" else 1), role
        assert pod["securityContext"] == more["securityContext"] and pod["hostNetwork"] is True
        assert [volume["name"] for volume in pod["volumes"]][:3] == ["workdir", "shm", "data-0"]
        assert pod["volumes"][3:], "what is there already stays"
        assert len(pod["containers"]) == 1


def test_a_pod_spec_changes_the_container_of_its_name_and_adds_others(tmp_path):
    path = tmp_path / "more.json"
    variables = [{"name": "POD_IP", "value": "10.0.0.1"}, {"name": "NCCL_DEBUG", "value": "INFO"}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm", "readOnly": True}, {"name": "shm", "mountPath": "/scratch"}]
    own = {"name": "engine", "env": variables, "volumeMounts": mounts, "resources": {"limits": {"memory": "64Gi"}}}
    path.write_text(json.dumps({"containers": [own, {"name": "exporter", "image": "registry/exporter:1"}]}))
    made = objects(f"--pod_spec=engine:{path}", "--engine_gpus=1")
    engine, exporter = made["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert exporter == {"name": "exporter", "image": "registry/exporter:1"} and engine["image"] == "registry/jaxagent:1"
    assert engine["resources"]["limits"] == {"nvidia.com/gpu": "1", "memory": "64Gi"}
    names = [variable["name"] for variable in engine["env"]]
    assert names.count("POD_IP") == 1 and names[-1] == "NCCL_DEBUG"
    assert [(mount["name"], mount["mountPath"]) for mount in engine["volumeMounts"]] == [
        ("workdir", "/runs/a"), ("shm", "/dev/shm"), ("shm", "/scratch"),
    ]  # fmt: skip


def test_a_token_is_new_and_stays_out_of_commands():
    one, other = (objects()["Secret"]["stringData"]["token"] for _ in range(2))
    assert one != other and len(one) == 64
    made = objects()
    token = made.pop("Secret")["stringData"]["token"]
    assert token not in json.dumps(made)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config.workdir=runs/a"], "config.workdir .'runs/a'. must be an absolute path"),
        (["--name=A_b"], "--name: must be a name such as run-1, got 'A_b'"),
        (["--tpu=v5p"], "--tpu: must be type, topology, and chips"),
        (["--tpu=tpu-v5p-slice:2x2x4:4"], "this slice has 4 hosts, which is not config.fleet.trainers .1."),
        (["--engine_tpu=tpu-v5p-slice:2x2x4:4"], "4 hosts, which is not an engine's one host"),
        (["--gpus=1", "--tpu=t:2x2:4"], "--tpu and --gpus exclude each other"),
        (["--mount=models"], "--mount=models must look like CLAIM:/PATH"),
        (["--engins=2"], "Unknown flag '--engins=2'. Did you mean '--engines'"),
        (["--config.rl.stepz=2"], "stepz"),
        (["--memory=lots"], "--memory: must be a quantity"),
        ([f"--pod_spec={__file__}"], "is no JSON"),
        (["--config.mesh.fsdp=4", "--gpus=2"], "Each trainer process needs 4 devices .config.mesh., and would have 2"),
        (["--config.mesh.fsdp=4", "--gpus=4", "--engine_gpus=1"], "Each engine process needs 4 devices"),
    ],
)
def test_a_mistake_is_one_line(flags, message):
    with pytest.raises(ConfigError, match=message) as error:
        kubernetes.listing([*FLAGS, *flags])
    assert "\n" not in str(error.value)
