"""What a cluster is to be given, as text."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.pipeline.cluster.deploying import (
    Deployment,
    Target,
    as_script,
    as_yaml,
    manifest,
    object_name,
    submit_arguments,
)
from holdfast.pipeline.definition.model import PipelineDefinition, Source
from holdfast.pipeline.session import SettingFixed

FILES = {
    "orders.yaml": "pipeline: orders\nsource: {settings: {sasl.password: '${KAFKA_PASSWORD}'}}\n",
    "steps.py": "x = 1\n",
}


def deployment_of(target: Target, spark: dict[str, str] | None = None, **changes: Any) -> Deployment:
    definition = PipelineDefinition(
        "Daily_Orders", Source(("orders",)), spark=spark or {}, home="/shared/orders", **changes
    )
    return Deployment(definition, "/here/orders.yaml", target, "yarn", "/parts/package.tar.gz")


def settings_in(arguments: list[str]) -> dict[str, str]:
    given = [arguments[at + 1] for at, word in enumerate(arguments) if word == "--conf"]
    return dict(each.split("=", 1) for each in given)


def test_the_submit_arguments_ship_the_parts_and_keep_what_is_fixed() -> None:
    arguments = submit_arguments(deployment_of(Target.YARN, {"spark.executor.memory": "4g"}))
    assert arguments[:7] == [
        "spark-submit", "--name", "holdfast Daily_Orders", "--master", "yarn", "--deploy-mode", "client",
    ]  # fmt: skip
    assert arguments[arguments.index("--archives") + 1] == "file:///parts/package.tar.gz#holdfast_parts"
    settings = settings_in(arguments)
    assert settings["spark.executorEnv.PYTHONPATH"] == "./holdfast_parts"
    assert settings["spark.python.daemon.module"] == "holdfast_worker"
    assert settings["spark.speculation"] == "false"
    assert settings["spark.sql.session.timeZone"] == "UTC"
    assert settings["spark.executor.memory"] == "4g"
    assert arguments[-6:] == [
        "pipeline",
        "run",
        "/here/orders.yaml",
        "--master",
        "yarn",
        "--shared-filesystem",
    ]
    assert Path(arguments[-7]).is_file()


def test_the_script_is_the_same_words_and_says_that_it_was_not_tried() -> None:
    deployment = deployment_of(Target.YARN)
    script = as_script(deployment)
    assert shlex.split(script.replace("\\\n", " "), comments=True) == submit_arguments(deployment)
    assert "not tried out" in script
    assert "not tried out" not in as_script(deployment_of(Target.STANDALONE))


def test_what_exactly_once_rests_on_cannot_be_changed_by_the_way() -> None:
    with pytest.raises(SettingFixed):
        submit_arguments(deployment_of(Target.YARN, {"spark.speculation": "true"}))


def test_secrets_are_in_no_argument() -> None:
    arguments = submit_arguments(deployment_of(Target.YARN, {"spark.hadoop.fs.s3a.secret.key": "${SECRET}"}))
    assert not any("secret.key" in word for word in arguments)


def kinds(objects: list[dict[str, Any]]) -> list[str]:
    return [each["kind"] for each in objects]


def test_a_pipeline_that_goes_on_is_one_pod_that_is_never_two() -> None:
    objects = manifest(deployment_of(Target.K8S, trigger="10s"), FILES)
    assert kinds(objects) == [
        "ServiceAccount", "Role", "RoleBinding", "ConfigMap", "ConfigMap", "PersistentVolumeClaim", "Service",
        "Deployment",
    ]  # fmt: skip
    spec = objects[-1]["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    (container,) = spec["template"]["spec"]["containers"]
    assert container["command"][:4] == ["holdfast", "pipeline", "run", "/pipeline/orders.yaml"]
    by_name = {each["name"]: each for each in container["env"]}
    assert by_name["KAFKA_PASSWORD"]["valueFrom"]["secretKeyRef"]["name"] == "holdfast-daily-orders-secrets"


def test_a_pipeline_that_ends_by_itself_is_a_job() -> None:
    assert kinds(manifest(deployment_of(Target.K8S), FILES))[-1] == "Job"


def test_the_yaml_reads_back_as_the_manifest_with_files_as_they_are() -> None:
    deployment = deployment_of(Target.K8S)
    text = as_yaml(deployment, FILES)
    assert list(yaml.safe_load_all(text)) == manifest(deployment, FILES)
    assert "  steps.py: |\n    x = 1\n" in text
    assert text.startswith("# not tried out")


@pytest.mark.parametrize("name", ["a" * 100, "A.b_c-", "ünder"])
def test_names_are_what_kubernetes_takes(name: str) -> None:
    made = object_name(name)
    assert len(made) <= 50
    assert made.startswith("holdfast-")
    assert made == made.lower().strip("-")
