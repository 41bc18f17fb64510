"""The chart of launch/helm: what helm makes of it is valid Kubernetes, and a pod's command trains.

It is run here as two nodes would run it.

The templates go through helm itself (`tests/run.sh` fetches it), so no test stands in for its template language.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

import walk
from minitron.config import cli, rules
from minitron.supervise.lead import REQUEUE
from ports import free_port
from slurm_cluster import until

ROOT = Path(__file__).parents[2]
CHART = ROOT / "launch" / "helm"
BIN = Path(sys.executable).parent
HELM = shutil.which("helm", path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
pytestmark = pytest.mark.skipif(HELM is None, reason="no helm; get one by: bash tests/get_helm.sh FOLDER_ON_PATH")

SETTINGS = {"workload.image": "registry/minitron:1", "workload.gcsBucketForDataCataPath": "bucket"}
TINY = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "model.num_heads=2",
    "model.vocab_size=64",
    "parallel.tp=1",
    "parallel.pp=2",
    "parallel.vp=1",
    "train.seq_len=32",
    "train.steps=3",
    "train.global_batch_size=4",
    "precision.dtype=fp32",
]


def helm(*args, config="gpt3_175b", release="me-gpt3", **settings) -> subprocess.CompletedProcess:
    """`helm template` with SETTINGS and more; __ in a keyword stands for the dot."""
    values = SETTINGS | {key.replace("__", "."): value for key, value in settings.items()}
    command = [HELM, "template", release, str(CHART), *args]
    command += [arg for key, value in values.items() for arg in ("--set", f"{key}={value}")]
    command += ["--set-file", f"config={ROOT}/configs/{config}.yaml"] if config else []
    return subprocess.run(command, capture_output=True, text=True)


def rendered(*args, **settings) -> dict[str, dict]:
    """The manifests by kind."""
    result = helm(*args, **settings)
    assert result.returncode == 0, result.stderr
    return {document["kind"]: document for document in yaml.safe_load_all(result.stdout)}


def pod_of(documents: dict) -> dict:
    return documents["Job"]["spec"]["template"]["spec"]


def environment(container: dict) -> dict[str, str]:
    """Variables of a container. Every one occurs once: a second one would hide the first."""
    assert len({entry["name"] for entry in container["env"]}) == len(container["env"])
    return {entry["name"]: entry.get("value", "a secret") for entry in container["env"]}


VOLUMES = [
    {"name": "data", "mountPath": "/data", "readOnly": True, "persistentVolumeClaim": {"claimName": "pile"}},
    {"name": "ssd", "mountPath": "/ssd", "hostPath": {"path": "/mnt/disks/ssd0"}},
    {"name": "shared", "mountPath": "/nfs", "nfs": {"server": "filer", "path": "/rounds"}},
]
NAMED = {"name": "ssd", "mountPath": "/ssd"}
OF_A_POD = {"emptyDir.medium": "Memory"}
ENV = [
    {"name": "NCCL_NVLS_ENABLE", "value": 1},
    {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}},
]
A3MEGA = ("-f", str(CHART / "a3mega.yaml"))
CASES = {
    "a3mega": (A3MEGA, {}),
    "restarts": (
        ("--set-json", f"workload.volumes={json.dumps(VOLUMES)}"),
        {"workload__restarts": 9, "workload__spareNodes": 1, "workload__rounds": "/nfs/rounds", "workload__gpus": 16},
    ),
    "one GPU": ((), {"workload__gpus": 1, "workload__serviceAccount": "trainer"}),
    "elsewhere": (
        (),
        {
            "workload__gcsBucketForDataCataPath": "",
            "queue": "research",
            "nodeSelector.pool": "h200",
            r"nodeSelector.node\.kubernetes\.io/instance-type": "a3-ultragpu-8g",
            "workload__volume.persistentVolumeClaim.claimName": "runs",
        },
    ),
    "a cluster of its own": (
        ("--set-json", f"workload.volumes={json.dumps(VOLUMES)}", "--set-json", f"workload.env={json.dumps(ENV)}"),
        {
            "workload__resources.rdma/hca": 8,
            "imagePullSecrets": "{registry,mirror}",
            "priorityClass": "research",
            "tolerations[0].operator": "Exists",
            "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0]"
            ".matchExpressions[0].key": "h200",
            "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0]"
            ".matchExpressions[0].operator": "Exists",
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_manifests_follow_the_schemas_of_kubernetes(name):
    args, settings = CASES[name]
    documents = rendered(*args, **settings)
    assert set(documents) == {"ConfigMap", "Secret", "Service", "Job"}
    for document in documents.values():
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    pod = pod_of(documents)
    volumes = [volume["name"] for volume in pod["volumes"]]
    for container in pod["containers"] + pod.get("initContainers", []):
        assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
    subprocess.run(
        [
            HELM,
            "lint",
            "--strict",
            str(CHART),
            *args,
            "--set",
            "workload.image=i",
            "--set",
            "config=c",
            "--set",
            "workload.gcsBucketForDataCataPath=b",
        ],
        check=True,
        capture_output=True,
    )


def test_what_a_cluster_adds_reaches_the_pod():
    """PVC and local SSD, environment that wins over the chart's, rdma, pull secrets, priority, affinity."""
    args, settings = CASES["a cluster of its own"]
    pod = pod_of(rendered(*args, **settings))
    (container,) = pod["containers"]
    sources = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert sources[mounts["/data"]["name"]]["persistentVolumeClaim"] == {"claimName": "pile"}
    assert mounts["/data"]["readOnly"] and not mounts["/ssd"]["readOnly"]
    assert sources[mounts["/ssd"]["name"]]["hostPath"] == {"path": "/mnt/disks/ssd0"}
    entries = {entry["name"]: entry for entry in container["env"]}
    assert len(entries) == len(container["env"]) and entries["NCCL_NVLS_ENABLE"]["value"] == "1"
    assert entries["HF_TOKEN"] == ENV[1]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "rdma/hca": 8}
    assert pod["imagePullSecrets"] == [{"name": "registry"}, {"name": "mirror"}]
    assert pod["priorityClassName"] == "research" and pod["affinity"]["nodeAffinity"]
    assert {"operator": "Exists"} in pod["tolerations"] and len(pod["tolerations"]) == 3


@pytest.mark.parametrize(
    "config, arguments, module",
    [
        ("gpt3_175b", "{train.steps=1}", "minitron.pretrain"),
        ("llama3_8b_lora", "{train.steps=1}", "minitron.finetune"),
        ("llama3_8b", "{finetune.kind=sft,finetune.base=/data/llama}", "minitron.finetune"),
        ("llama3_8b_lora", "{finetune.kind=null}", "minitron.pretrain"),
    ],
)
def test_fine_tuning_jobs_start_the_other_command(config, arguments, module):
    pod = pod_of(rendered(config=config, workload__arguments=arguments))
    assert environment(pod["containers"][0])["MODULE"] == module
    assert '-m "$MODULE"' in (CHART / "files" / "pod.sh").read_text()


def test_the_chart_knows_every_key_and_no_other():
    for file, text in walk.lists_of_keys().items():
        assert file.read_text() == text, "after a new key or name: run PYTHONPATH=. python tests/walk.py"


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (ROOT / "configs").glob("*.yaml")))
def test_every_recipe_is_taken(recipe):
    assert helm(config=recipe).returncode == 0


def test_one_pod_a_node_found_by_name():
    documents = rendered(*A3MEGA, workload__gpus=64, network__ncclSettings="null", release="run7")
    job, service, pod = documents["Job"]["spec"], documents["Service"]["spec"], pod_of(documents)
    (container,) = pod["containers"]
    env = environment(container)
    assert job["parallelism"] == job["completions"] == 64 // 8 == int(env["NNODES"])
    assert job["completionMode"] == "Indexed"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert env["MASTER_ADDR"] == "run7-0.run7.default.svc.cluster.local"
    # That name is <pod>.<subdomain>.<namespace>, so the subdomain must be a headless service over the job's pods.
    assert pod["subdomain"] == documents["Service"]["metadata"]["name"] == "run7"
    assert service["clusterIP"] == "None" and service["selector"] == {"job-name": documents["Job"]["metadata"]["name"]}
    assert pod["hostNetwork"] and pod["dnsPolicy"] == "ClusterFirstWithHostNet"
    (shm,) = (v["emptyDir"] for v in pod["volumes"] if v["name"] == "shared-memory")
    assert shm["medium"] == "Memory" and {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert documents["ConfigMap"]["data"]["config.yaml"] == (ROOT / "configs/gpt3_175b.yaml").read_text()


def test_a_bucket_is_mounted_beside_host_networking():
    """On the host's network gcsfuse's driver takes the service account of a pod that opts in; else it has no access."""
    documents = rendered(*A3MEGA)
    pod = pod_of(documents)
    (volume,) = (volume["csi"] for volume in pod["volumes"] if volume["name"] == "artifacts")
    assert pod["hostNetwork"] and volume["driver"] == "gcsfuse.csi.storage.gke.io"
    assert volume["volumeAttributes"] == {"bucketName": "bucket", "hostNetworkPodKSA": "true"}
    assert documents["Job"]["spec"]["template"]["metadata"]["annotations"]["gke-gcsfuse/volumes"] == "true"
    assert "serviceAccountName" not in pod
    assert pod["securityContext"] == {"runAsUser": 0}  # to whom gcsfuse gives the files; the image's user is another

    provider = "https://container.googleapis.com/v1/projects/p/locations/l/clusters/c"
    pod = pod_of(
        rendered(
            workload__serviceAccount="trainer",
            workload__gcsVolumeAttributes__identityProvider=provider,
            workload__gcsVolumeAttributes__mountOptions="implicit-dirs",
        )
    )
    (volume,) = (volume["csi"] for volume in pod["volumes"] if volume["name"] == "artifacts")
    assert pod["serviceAccountName"] == "trainer"
    assert volume["volumeAttributes"] == {
        "bucketName": "bucket",
        "hostNetworkPodKSA": "true",
        "identityProvider": provider,
        "mountOptions": "implicit-dirs",
    }


def test_nccl_settings_win_over_the_charts():
    first = {"network.ncclSettings[0].name": "NCCL_PROTO", "network.ncclSettings[0].value": "LL128"}
    env = environment(pod_of(rendered(*A3MEGA, **first))["containers"][0])
    shipped = {name: yaml.safe_load((CHART / "files" / name).read_text()) for name in ("env.yaml", "env-tcpxo.yaml")}
    assert env.items() >= (shipped["env.yaml"] | shipped["env-tcpxo.yaml"] | {"NCCL_PROTO": "LL128"}).items()
    assert env["NCCL_SOCKET_IFNAME"] == env["GLOO_SOCKET_IFNAME"] == "eth0"
    plain = environment(pod_of(rendered())["containers"][0])
    assert not set(plain) & (set(shipped["env-tcpxo.yaml"]) - set(shipped["env.yaml"]) | {"NCCL_SOCKET_IFNAME"})


def typed(command: str) -> dict[str, dict]:
    """The manifests of a `helm install` of the manual, by kind."""
    env = os.environ | {"ARTIFACT_REGISTRY": "europe-docker.pkg.dev/p/r", "GCS_BUCKET": "results", "USER": "me"}
    command = command.replace("helm install", f"{HELM} template")
    result = subprocess.run(["bash", "-c", command], cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return {document["kind"]: document for document in yaml.safe_load_all(result.stdout)}


INSTALLS = re.findall(r"^helm install.*?launch/helm$", (ROOT / "launch/README.md").read_text(), re.M | re.S)


def test_the_command_of_the_readme_is_the_documents_job():
    """GPT-3 175B on 32 machines of 8 GPUs, whose configuration fits them."""
    documents = typed(INSTALLS[0])
    (container,) = pod_of(documents)["containers"]
    assert environment(container)["MASTER_ADDR"].startswith("me-gpt3-175b-0.me-gpt3-175b.default.svc")
    assert documents["Job"]["spec"]["parallelism"] == 32
    assert "args" not in container
    cfg = cli.load([str(ROOT / "configs/gpt3_175b_gke.yaml")])
    rules.check(cfg, 256, capability=(9, 0))
    assert cfg.train.global_batch_size == 2048 and cfg.precision.fp8 == "delayed"


def test_the_readmes_nodes_have_as_many_gpus_as_its_pods():
    documents = typed(INSTALLS[1])
    [(label, machine)] = pod_of(documents)["nodeSelector"].items()
    (container,) = pod_of(documents)["containers"]
    assert label == "node.kubernetes.io/instance-type" and documents["Job"]["spec"]["parallelism"] == 2
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(re.search(r"-(\d)g$", machine)[1]) == 4


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"workload__gpus": 12},
            "workload.gpus=12 is more than a node's workload.gpusPerNode=8 and no multiple of it; use for example 16",
        ),
        ({"workload__image": ""}, "workload.image is empty; name the image built from launch/Dockerfile"),
        ({"workload__gcsBucketForDataCataPath": ""}, "nowhere to keep the artifacts"),
        (
            {"workload__volume.emptyDir.medium": ""},
            "workload.gcsBucketForDataCataPath and workload.volume are both set",
        ),
        ({"workload__gcsBucketForDataCataPath": "gs://bucket"}, "/workload/gcsBucketForDataCataPath"),
        (
            {"workload__gcsVolumeAttributes.hostNetworkPodKSA": "true"},
            "/workload/gcsVolumeAttributes/hostNetworkPodKSA",
        ),
        (
            {
                "workload__gcsBucketForDataCataPath": "",
                "workload__volume.emptyDir.medium": "",
                "workload__gcsVolumeAttributes.mountOptions": "x",
            },
            "workload.gcsVolumeAttributes is set without a bucket",
        ),
        ({"workload__serviceAccount": "Mine"}, "/workload/serviceAccount"),
        *(
            ({f"workload__{name}": "null"}, name)
            for name in ("gpus", "gpusPerNode", "restarts", "sharedMemory", "user")
        ),
        ({"network": "null"}, "network"),
        ({"workload__arguments": "{--steps}"}, "/workload/arguments/0"),
        ({"workload__arguments": "{train.step=2}"}, "unknown key train.step in config or workload.arguments; did you"),
        ({"workload__arguments": "{trian.steps=5}"}, "workload.arguments; did you mean train.steps?"),
        ({"workload__arguments": "{model.steps=5}"}, "workload.arguments; did you mean train.steps?"),
        ({"workload__arguments": "{train.nothing=5}"}, "key train.nothing in config or workload.arguments; python -m"),
        ({"workload__arguments": "{trainer.devices=8}"}, "trainer.devices in config or workload.arguments; torchrun"),
        (
            {"workload__arguments": "{trainer.max_steps=5}"},
            "unknown key trainer.max_steps in config or workload.arguments; use train.steps",
        ),
        ({"workload__arguments": "{model.optim.sched.max_steps=5}"}, "workload.arguments; use optimizer.decay_steps"),
        ({"workload__arguments": "{model.seed=5}"}, "key model.seed in config or workload.arguments; use train.seed"),
        ({"workload__arguments": "{train.steps=abc}"}, "train.steps=abc in config or workload.arguments is not"),
        ({"workload__arguments": "{precision.fp8=yes}"}, "precision.fp8=yes in config or workload.arguments is not"),
        ({"network__stack": "tcpxo", "workload__gpusPerNode": 4}, "workload.gpusPerNode=4, but network.stack=tcpxo"),
        (
            {"workload__gpusPerNode": 4, r"nodeSelector.node\.kubernetes\.io/instance-type": "a3-megagpu-8g"},
            "the nodes of nodeSelector node.kubernetes.io/instance-type=a3-megagpu-8g have 8 GPUs; use workload.gpus",
        ),
        ({r"nodeSelector.node\.kubernetes\.io/instance-type": "a3-highgpu-4g"}, "use workload.gpusPerNode=4"),
        ({"release": "1e3"}, 'the release "1e3" cannot name a Service'),
        ({"release": "123"}, 'the release "123" cannot name a Service'),
        ({"workload__image": "a #b"}, "/workload/image"),
        ({"workload__volumes[0].name": "a"}, "/workload/volumes/0"),
        ({"workload__env[0].name": "A"}, "/workload/env/0"),
        ({"workload__resources.nvidia\\.com/gpu": 4}, "invalid propertyName 'nvidia.com/gpu'"),
        (
            {"workload__restarts": 9},
            "workload.restarts needs a file system that all pods see, for which a bucket is too",
        ),
        (
            {"workload__restarts": 9, "workload__rounds": "/data/rounds"},
            "workload.rounds=/data/rounds is in none of workload.volumes",
        ),
        (
            {"workload__restarts": 9, "workload__rounds": "/ssd/rounds"}
            | {f"workload__volumes[0].{key}": value for key, value in (NAMED | OF_A_POD).items()},
            "workload.rounds=/ssd/rounds is in none of workload.volumes that pods share",
        ),
        (
            {"workload__restarts": 9, "workload__gcsBucketForDataCataPath": ""}
            | {f"workload__volume.{key}": value for key, value in OF_A_POD.items()},
            "workload.rounds=/gcs/minitron-experiments is in none of workload.volumes that pods share",
        ),
        ({"workload__spareNodes": 1}, "workload.spareNodes=1 pods would wait for nothing; set workload.restarts, too"),
        ({"workload__gpu": 8}, "additional properties 'gpu' not allowed"),
        ({"network__stack": "tcpx"}, "/network/stack"),
        ({"config": None}, "config is empty; give the run's YAML: --set-file config="),
    ],
)
def test_mistakes_end_before_anything_is_installed(settings, message):
    result = helm(**settings)
    assert result.returncode != 0 and message in result.stderr, result.stderr


@pytest.mark.parametrize("text", ["configs/gpt3_175b.yaml", "train: [1"])
def test_a_config_that_is_no_yaml_of_keys_is_refused(text, tmp_path):
    """As the name of a file, by --set in the place of --set-file."""
    (tmp_path / "values.yaml").write_text(json.dumps({"config": text}))
    result = helm("-f", str(tmp_path / "values.yaml"), config=None)
    assert result.returncode != 0 and "--set-file config=" in result.stderr, result.stderr


def test_all_that_is_missing_is_named_at_once():
    result = helm(config=None, workload__image="", workload__gcsBucketForDataCataPath="")
    assert all(
        name in result.stderr for name in ("config is", "workload.image is", "workload.gcsBucketForDataCataPath=")
    )


HOSTILE = [
    "a #b",
    "x\nhostPID: true",
    "x\n---\nkind: Secret",
    "x}\n- {name: LD_PRELOAD, value: /x}",
    "&a x",
    "{{ .Release.Name }}",
    "'\"",
    "x\u0085  privileged: true",
    "true",
    "1e3",
    "x" * 5000,
    7,
    ["x"],
    {"hostPID": True},
]
PLACES = {
    "config": lambda x: {"config": f"# {x}" if isinstance(x, str) else x},
    "image": lambda x: {"workload": {"image": x}},
    "names": lambda x: {"queue": x, "schedulingGate": x, "priorityClass": x, "imagePullSecrets": [x]},
    "plugin": lambda x: {"network": {"pluginVersion": x, "daemonVersion": x}},
    "interface": lambda x: {"network": {"interface": x}},
    "setting's name": lambda x: {"network": {"ncclSettings": [{"name": x, "value": "1"}]}},
    "setting": lambda x: {"network": {"ncclSettings": [{"name": "A", "value": x}]}},
    "variable's name": lambda x: {"workload": {"env": [{"name": x, "value": "1"}]}},
    "variable": lambda x: {"workload": {"env": [{"name": "A", "value": x}]}},
    "argument": lambda x: {"workload": {"arguments": [f"log.dir={x}"]}},
    "mount": lambda x: {"workload": {"volumes": [{"name": "d", "mountPath": f"/{x}", "emptyDir": {}}]}},
    "selector": lambda x: {"nodeSelector": {"pool": x}},
    "rounds": lambda x: {"workload": {"rounds": f"/{x}"}},
}


def rendered_with(place, value, folder) -> list[dict] | None:
    """The manifests, or None if helm refuses the value."""
    values = PLACES[place](value)
    values = {"config": "train: {steps: 5}", **values}
    values["workload"] = {"image": "i", "gcsBucketForDataCataPath": "b"} | values.get("workload", {})
    (folder / "values.yaml").write_text(json.dumps(values))
    command = [HELM, "template", "me-gpt3", str(CHART), *A3MEGA, "-f", str(folder / "values.yaml")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0 or result.stdout == "" and "Error: " in result.stderr
    return list(yaml.safe_load_all(result.stdout)) if result.returncode == 0 else None


def shape(value):
    """The keys and kinds of a manifest, without its texts and the names of its variables."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(inner) for inner in value]
    return type(value).__name__


@pytest.mark.sampled(4)
@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("place", PLACES)
def test_a_value_stays_a_value(place, value, tmp_path):
    """The manifests have the structure that a plain value gives, or helm refuses it."""
    found = rendered_with(place, value, tmp_path)
    if found is not None:
        assert shape(found) == shape(rendered_with(place, "abc", tmp_path))


# ---- the pod's command ----------------------------------------------------------------------------------------------


def start_pod(documents, index, folder, address=("127.0.0.1", 0), path=str(BIN)) -> subprocess.Popen:
    """The training container of one pod as a process: volumes are folders, `address` replaces the name in DNS."""
    pod = pod_of(documents)
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: str(folder / mount["name"]) for mount in container["volumeMounts"]}
    for name, text in documents["ConfigMap"]["data"].items():
        (folder / "configuration").mkdir(parents=True, exist_ok=True)
        (folder / "configuration" / name).write_text(text)

    def here(text: str) -> str:
        for inside, outside in mounts.items():
            text = re.sub(f"^{inside}(?=/|$)", outside, text)
        return text

    env = {name: here(value) for name, value in environment(container).items()}
    env |= {
        "MASTER_ADDR": address[0],
        "MASTER_PORT": str(address[1]),
        "JOB_COMPLETION_INDEX": str(index),
        "PATH": f"{path}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": os.environ["HOME"],
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.Popen(
        [here(word) for word in container["command"] + container.get("args", [])],
        env=env,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def artifacts_of(documents, folder) -> Path:
    path = Path(environment(pod_of(documents)["containers"][0])["ARTIFACTS"])
    assert re.fullmatch(r"/gcs/minitron-experiments/me-gpt3-\d+", str(path))
    return folder / "artifacts" / path.relative_to("/gcs")


@pytest.mark.slow
def test_two_nodes_train(tmp_path):
    """Two torchruns on loopback, the second node first: the index, not the order of arrival, makes the ranks."""
    documents = rendered(workload__gpus=2, workload__gpusPerNode=1, workload__arguments=f"{{{','.join(TINY)}}}")
    address = ("127.0.0.1", free_port())
    artifacts = artifacts_of(documents, tmp_path)
    (results := artifacts / "dllogger/rank-0/dllogger.json").parent.mkdir(parents=True)
    results.write_text("DLLL of a pod before\n")
    pods = [start_pod(documents, index, tmp_path, address) for index in (1, 0)]
    second, first = (pod.communicate(timeout=600)[0] for pod in pods)
    assert [pod.returncode for pod in pods] == [0, 0], first + second
    assert "iteration        3/       3" in second and "iteration  " not in first  # the last rank prints, on node 1
    expected = cli.load([str(ROOT / "configs/gpt3_175b.yaml"), *TINY])
    assert cli.load([str(artifacts / "hparams.yaml")]) == expected
    before, _, *steps = results.read_text().splitlines()
    assert before == "DLLL of a pod before" and len(steps) == 3 and all(line.startswith("DLLL {") for line in steps)
    assert not (artifacts / "dllogger.json").exists()
    for rank in (0, 1):
        assert f"rank {rank}: " in (artifacts / f"rank-{rank}.log").read_text()


def test_pods_that_may_restart_and_one_to_spare():
    args, settings = CASES["restarts"]
    documents = rendered(*args, **settings)
    job, env = documents["Job"]["spec"], environment(pod_of(documents)["containers"][0])
    assert job["parallelism"] == job["completions"] == 3 and job["backoffLimit"] == 9
    rules = {rule["action"]: rule for rule in job["podFailurePolicy"]["rules"]}
    assert rules["FailJob"]["onExitCodes"]["values"] == [1, REQUEUE]  # not LEFT, nor a pod that was killed
    assert rules["Ignore"]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert {name: env[name] for name in ("NNODES", "SPARE_NODES", "RESTARTS", "ROUNDS")} == {
        "NNODES": "2",
        "SPARE_NODES": "1",
        "RESTARTS": "9",
        "ROUNDS": "/nfs/rounds",
    }
    plain = rendered()["Job"]["spec"]
    assert plain["backoffLimit"] == 0 and "podFailurePolicy" not in plain


@pytest.mark.slow
def test_a_pod_that_is_lost_is_made_again_and_rejoins(tmp_path):
    volume = {"workload__gcsBucketForDataCataPath": "", "workload__volume.persistentVolumeClaim.claimName": "runs"}
    arguments = [*TINY, "checkpoint.dir=/gcs/saved", "checkpoint.every=2", "train.steps=40"]
    arguments = [word.replace("/gcs", str(tmp_path / "artifacts")) for word in arguments]
    settings = {"workload__gpus": 2, "workload__gpusPerNode": 1, "workload__restarts": 3}
    documents = rendered(workload__arguments=f"{{{','.join(arguments)}}}", **settings, **volume)
    address = ("127.0.0.1", free_port())
    artifacts = artifacts_of(documents, tmp_path)
    pods = [start_pod(documents, index, tmp_path, address) for index in (0, 1)]
    metrics = artifacts / "metrics.jsonl"
    until(lambda: metrics.exists() and '"step": 5' in metrics.read_text(), 600)
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pods[1].pid)], capture_output=True, text=True).stdout
    os.kill(int(listed), signal.SIGKILL)  # its supervisor
    assert pods[1].wait(60) == 137
    pods[1] = start_pod(documents, 1, tmp_path, address)
    outputs = [pod.communicate(timeout=600)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], "".join(outputs)
    (record,) = (artifacts / "restarts.jsonl").read_text().splitlines()
    assert json.loads(record)["cause"].endswith("is lost") and '"step": 40' in metrics.read_text()


@pytest.fixture
def programs(tmp_path):
    """A folder with stand-ins: python prints a configuration with the profile.kind $KIND, torchrun notes its
    arguments and without a profiler goes on until SIGTERM, nsys notes its arguments and runs the rest."""
    for kind in ("none", "nsys"):
        (tmp_path / f"{kind}.yaml").write_text(cli.to_yaml(cli.load([f"profile.kind={kind}"])))
    scripts = {
        "python": 'cat "$KIND.yaml"',
        "torchrun": 'echo "$@" >torchrun.txt\n'
        'trap "echo saved; exit 7" TERM\nwhile [ "$KIND" = none ]; do sleep 0.05; done',
        "nsys": 'for word in "$@"; do [ "$word" = torchrun ] && break; echo "$word"; shift; done >nsys.txt\n"$@"',
    }
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def test_nsys_runs_on_every_node_if_the_configuration_asks_for_it(tmp_path, programs):
    documents = rendered(workload__gpus=16)
    artifacts = artifacts_of(documents, tmp_path)
    documents["Job"]["spec"]["template"]["spec"]["containers"][0]["env"].append({"name": "KIND", "value": "nsys"})
    for index in (0, 1):
        pod = start_pod(documents, index, tmp_path, path=str(programs))
        output = pod.communicate(timeout=600)[0]
        assert pod.returncode == 0, output
        assert (tmp_path / "nsys.txt").read_text().split() == [
            "profile",
            "-s",
            "none",
            "-t",
            "nvtx,cuda",
            "--capture-range=cudaProfilerApi",
            "--capture-range-end=stop",
            "-o",
            f"{artifacts}/noderank-{index}",
        ]
        words = (tmp_path / "torchrun.txt").read_text().split()
        assert words[words.index("--node-rank") + 1] == str(index) and words[words.index("--nnodes") + 1] == "2"
    assert (artifacts / "hparams.yaml").read_text() == (tmp_path / "nsys.yaml").read_text()


def test_sigterm_reaches_the_trainer_and_its_status_kubernetes(tmp_path, programs):
    documents = rendered(workload__gpus=8)
    documents["Job"]["spec"]["template"]["spec"]["containers"][0]["env"].append({"name": "KIND", "value": "none"})
    pod = start_pod(documents, 0, tmp_path, path=str(programs))
    deadline = time.monotonic() + 600
    while not (tmp_path / "torchrun.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # for its trap
    pod.send_signal(signal.SIGTERM)
    output = pod.communicate(timeout=600)[0]
    assert pod.returncode == 7 and "saved" in output, output


def test_the_error_of_a_rank_is_a_pod_s_last_line(tmp_path, programs):
    """Behind the page that torchrun prints about it."""
    (programs / "torchrun").write_text(
        "#!/usr/bin/env bash\necho 'error: no room' >\"$PET_LOG_DIR/stderr.log\"\necho a page of torchrun\nexit 1\n"
    )
    documents = rendered(workload__gpus=8)
    documents["Job"]["spec"]["template"]["spec"]["containers"][0]["env"].append({"name": "KIND", "value": "none"})
    pod = start_pod(documents, 0, tmp_path, path=str(programs))
    *before, last = pod.communicate(timeout=600)[0].splitlines()
    assert pod.returncode == 1 and last == "error: no room" and "a page of torchrun" in before


@pytest.mark.parametrize(
    "argument, message",
    [
        ("train.stepz=100", "unknown key train.stepz; did you mean train.steps?"),
        ("train.steps=100", "parallel.tp*pp*cp=4*8*1=32 needs 32 ranks, but there are 8"),
    ],
)
def test_a_wrong_configuration_ends_a_pod_with_one_line(tmp_path, argument, message):
    documents = rendered(workload__gpus=8)  # helm itself refuses a key that it does not know
    pod_of(documents)["containers"][0]["args"] = [argument]
    pod = start_pod(documents, 0, tmp_path)
    *_, last = pod.communicate(timeout=600)[0].splitlines()
    assert pod.returncode == 1 and last.startswith(f"error: {message}"), last
