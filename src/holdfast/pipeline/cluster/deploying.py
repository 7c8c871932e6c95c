"""How a pipeline is given to a cluster for good: arguments of `spark-submit`, or a manifest for Kubernetes.

Only text is made here; nothing is sent anywhere. The driver always runs in client mode, from an environment that has
holdfast: it holds the pipeline's home with its lock, which has to outlive a driver that a cluster moves about. What it
needs on the way to the executors is what `run --master` sets by itself (`session.shipping`), so that both say the same.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from holdfast.pipeline.cluster.places import FLAG
from holdfast.pipeline.definition.model import PipelineDefinition
from holdfast.pipeline.definition.naming import home_of
from holdfast.pipeline.session import (
    DEFAULTS,
    FIXED,
    WORKER_PYTHON,
    refuse_fixed,
    shipping,
    worker_python,
)

DRIVER_PORT: Final = 7078
BLOCKS_PORT: Final = 7079
SHARED: Final = "/shared"
"""Where every pod sees the volume that is claimed."""
DEFINITION: Final = "/pipeline"
SETTINGS: Final = "/etc/holdfast-spark"
PLACEHOLDER_IMAGE: Final = "registry.example/holdfast-spark:latest"
CLUSTER_SETTINGS: Final = {
    "k8s": {"spark.kubernetes.executor.deleteOnTermination": "true"},
    "yarn": {"spark.yarn.maxAppAttempts": "1"},
    "standalone": {},
}
_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)")
_FORBIDDEN: Final = re.compile(r"[^a-z0-9-]+")


class Target(StrEnum):
    K8S = "k8s"
    YARN = "yarn"
    STANDALONE = "standalone"


DEFAULT_MASTERS: Final = {
    Target.K8S: "k8s://https://kubernetes.default.svc",
    Target.YARN: "yarn",
    Target.STANDALONE: "spark://HOST:7077",
}
UNTESTED: Final = {
    Target.K8S: "not tried out on a Kubernetes by us: read it before you apply it",
    Target.YARN: "not tried out on a YARN by us: read it before you run it",
}


@dataclass(frozen=True)
class Deployment:
    """What is to be given to the cluster."""

    definition: PipelineDefinition
    file: str
    target: Target
    master: str
    package: str
    """The archive's path where `spark-submit` is run."""
    image: str = PLACEHOLDER_IMAGE
    namespace: str = "default"

    @property
    def command(self) -> list[str]:
        file = f"{DEFINITION}/{os.path.basename(self.file)}" if self.target is Target.K8S else self.file
        return ["pipeline", "run", file, "--master", self.master, FLAG]


def settings_of(deployment: Deployment) -> dict[str, str]:
    """Everything Spark is told, by name; what the definition sets comes last, but for what is fixed."""
    definition = deployment.definition
    refuse_fixed(definition.spark)
    ours = {
        **DEFAULTS,
        **CLUSTER_SETTINGS[deployment.target],
        # What refers to a secret is set by the run itself, which knows it.
        **{name: value for name, value in definition.spark.items() if "${" not in value},
        **FIXED,
        WORKER_PYTHON: worker_python(definition.spark, {}),
    }
    shipped = shipping(f"file://{deployment.package}", ours)
    return dict(sorted({**ours, **shipped}.items()))


def submit_arguments(deployment: Deployment) -> list[str]:
    """The words of the command, `spark-submit` first."""
    settings = settings_of(deployment)
    archives = settings.pop("spark.archives")
    memory = settings.pop("spark.driver.memory", DEFAULTS["spark.driver.memory"])
    settings.pop("spark.master", None)
    arguments = ["spark-submit", "--name", f"holdfast {deployment.definition.name}"]
    arguments += ["--master", deployment.master, "--deploy-mode", "client", "--driver-memory", memory]
    arguments += ["--archives", archives]
    for name, value in settings.items():
        arguments += ["--conf", f"{name}={value}"]
    return [*arguments, command_file(), *deployment.command]


def command_file() -> str:
    """What `spark-submit` runs: it takes files, not installed commands."""
    import holdfast

    return os.path.join(os.path.dirname(os.path.abspath(holdfast.__file__)), "cli", "__main__.py")


def as_script(deployment: Deployment) -> str:
    """The command as a shell takes it, an option a line, with what has to be done before."""
    words = submit_arguments(deployment)
    lines, options = [words[0]], words[1:]
    end = options.index(command_file())
    lines += [f"  {shlex.join(options[at : at + 2])}" for at in range(0, end, 2)]
    lines.append(f"  {shlex.join(options[end:])}")
    untested = UNTESTED.get(deployment.target)
    notes = [f"# {untested}"] if untested else []
    notes += [
        f"# Made before: holdfast pipeline package --to {shlex.quote(deployment.package)}",
        f"# `holdfast {shlex.join(deployment.command)}` does the same without spark-submit.",
        f"# The home {home_of(deployment.definition)} and the paths of file sinks are on a file system that all see.",
    ]
    return "\n".join([*notes, " \\\n".join(lines)]) + "\n"


# ---------------------------------------------------------------------------- Kubernetes


def manifest(deployment: Deployment, files: Mapping[str, str]) -> list[dict[str, Any]]:
    """Objects for `kubectl apply`; `files` are the definition and what stands beside it, by name."""
    name = object_name(deployment.definition.name)
    variables = sorted({found for text in files.values() for found in _VARIABLE.findall(text)})
    settings = {
        **settings_of(deployment),
        "spark.kubernetes.namespace": deployment.namespace,
        "spark.kubernetes.container.image": deployment.image,
        "spark.driver.host": f"{name}.{deployment.namespace}.svc",
        "spark.driver.bindAddress": "0.0.0.0",
        "spark.driver.port": str(DRIVER_PORT),
        "spark.blockManager.port": str(BLOCKS_PORT),
        **_claimed(name),
    }
    # The driver makes and serves the archive itself: its image has holdfast, the executors' need not.
    for own in ("spark.archives", "spark.executorEnv.PYTHONPATH", "spark.python.daemon.module"):
        del settings[own]
    defaults = "".join(f"{key} {value}\n" for key, value in sorted(settings.items()))
    return [
        *_rights(name, deployment.namespace),
        _object("v1", "ConfigMap", f"{name}-definition", deployment.namespace, data=dict(files)),
        _object(
            "v1",
            "ConfigMap",
            f"{name}-spark",
            deployment.namespace,
            data={"spark-defaults.conf": defaults},
        ),
        _volume_claim(name, deployment.namespace),
        _service(name, deployment.namespace),
        _driver(name, deployment, variables),
    ]


def object_name(pipeline: str) -> str:
    """As Kubernetes wants names: lower case, digits and dashes."""
    return f"holdfast-{_FORBIDDEN.sub('-', pipeline.lower()).strip('-')}"[:50].rstrip("-")


def _object(version: str, kind: str, name: str, namespace: str, **rest: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "labels": {"app.kubernetes.io/name": name}}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}


def _claimed(name: str) -> dict[str, str]:
    volume = "spark.kubernetes.executor.volumes.persistentVolumeClaim.shared"
    return {
        f"{volume}.mount.path": SHARED,
        f"{volume}.mount.readOnly": "false",
        f"{volume}.options.claimName": f"{name}-shared",
    }


def _rights(name: str, namespace: str) -> list[dict[str, Any]]:
    group = "rbac.authorization.k8s.io"
    rules = [
        {
            "apiGroups": [""],
            "resources": ["pods", "services", "configmaps", "persistentvolumeclaims"],
            "verbs": ["get", "list", "watch", "create", "delete", "deletecollection", "patch"],
        }
    ]
    return [
        _object("v1", "ServiceAccount", name, namespace),
        _object(f"{group}/v1", "Role", name, namespace, rules=rules),
        _object(
            f"{group}/v1",
            "RoleBinding",
            name,
            namespace,
            subjects=[{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
            roleRef={"apiGroup": group, "kind": "Role", "name": name},
        ),
    ]


def _volume_claim(name: str, namespace: str) -> dict[str, Any]:
    wanted = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "20Gi"}}}
    return _object("v1", "PersistentVolumeClaim", f"{name}-shared", namespace, spec=wanted)


def _service(name: str, namespace: str) -> dict[str, Any]:
    """By which executors find their driver."""
    ports = [{"name": "driver", "port": DRIVER_PORT}, {"name": "blocks", "port": BLOCKS_PORT}]
    spec = {"clusterIP": "None", "selector": {"app.kubernetes.io/name": name}, "ports": ports}
    return _object("v1", "Service", name, namespace, spec=spec)


def _driver(name: str, deployment: Deployment, variables: Sequence[str]) -> dict[str, Any]:
    """One pod, and never two at a time: the old one ends before a new one starts. One that ends by itself is a job."""
    secret = f"{name}-secrets"
    python = worker_python(deployment.definition.spark, {})
    environment: list[dict[str, Any]] = [
        {"name": "SPARK_CONF_DIR", "value": SETTINGS},
        {"name": "PYSPARK_PYTHON", "value": python},
    ]
    environment += [
        {"name": each, "valueFrom": {"secretKeyRef": {"name": secret, "key": each, "optional": True}}}
        for each in variables
    ]
    container = {
        "name": "driver",
        "image": deployment.image,
        "command": ["holdfast", *deployment.command],
        "env": environment,
        "ports": [{"containerPort": DRIVER_PORT}, {"containerPort": BLOCKS_PORT}],
        "volumeMounts": [
            {"name": "definition", "mountPath": DEFINITION},
            {"name": "spark", "mountPath": SETTINGS},
            {"name": "shared", "mountPath": SHARED},
        ],
        "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "2Gi"}},
    }
    pod: dict[str, Any] = {
        "serviceAccountName": name,
        "terminationGracePeriodSeconds": 300,
        "containers": [container],
        "volumes": [
            {"name": "definition", "configMap": {"name": f"{name}-definition"}},
            {"name": "spark", "configMap": {"name": f"{name}-spark"}},
            {"name": "shared", "persistentVolumeClaim": {"claimName": f"{name}-shared"}},
        ],
    }
    label = "app.kubernetes.io/name"
    template = {"metadata": {"labels": {label: name}}, "spec": pod}
    if deployment.definition.trigger == "available-now":
        pod["restartPolicy"] = "OnFailure"
        spec: dict[str, Any] = {"backoffLimit": 5, "template": template}
        return _object("batch/v1", "Job", name, deployment.namespace, spec=spec)
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": {label: name}},
        "template": template,
    }
    return _object("apps/v1", "Deployment", name, deployment.namespace, spec=spec)


def as_yaml(deployment: Deployment, files: Mapping[str, str]) -> str:
    """The manifest as text, headed by what it needs."""
    import yaml

    notes = [
        UNTESTED[Target.K8S],
        "The image has Spark, Python and holdfast[spark], for the driver; executors need no holdfast.",
        f"The definition's home and the paths of file sinks lie below {SHARED}, a volume that many pods may write.",
    ]
    home = home_of(deployment.definition)
    if not home.startswith(SHARED + "/"):
        notes.append(f"The home is {home} now: set `home: {SHARED}/{deployment.definition.name}` first.")
    head = "".join(f"# {note}\n" for note in notes)

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Writes texts of several lines as they stand."""

    def lines(dumper: Any, text: str) -> Any:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, lines)
    return head + str(yaml.dump_all(manifest(deployment, files), Dumper=Dumper, sort_keys=False, width=110))
