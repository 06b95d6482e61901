"""Containers and charts: their variables are options, what they run as, and the chart as Helm renders it."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from treetop.cli.environment import _OTHERS, _rows
from treetop.core.wire import kv_events_options
from treetop.types.config import EngineConfig

DEPLOY = Path(__file__).parent.parent / "deploy"
CHART = DEPLOY / "helm" / "treetop"
OF_COMPOSE = {"TREETOP_PUBLISHED_PORT"}
"""A variable of the compose file itself."""
helm = pytest.mark.skipif(shutil.which("helm") is None, reason="no helm to render with")


def rendered(*flags: str) -> list[dict]:
    command = ["helm", "template", "r", str(CHART), *flags]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [each for each in yaml.safe_load_all(text) if each]


def test_every_variable_is_an_option():
    known = {row.variable for row in _rows()} | _OTHERS | OF_COMPOSE | {"TREETOP_MODEL"}
    found = set()
    for path in DEPLOY.rglob("*"):
        if path.is_file():
            text = re.sub(r"#.*|TREETOP_%s", "", path.read_text(encoding="utf-8"))
            found |= set(re.findall(r"\bTREETOP_[A-Z_]+", text))
    assert len(found) > 8
    assert found <= known


def test_images_run_as_nobody_in_particular_from_wheels_and_are_asked_for_readiness():
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    stages = dict(re.findall(r"^FROM (\S+) AS (\w+)$", text, re.M))
    assert text.count("\nUSER 10001:10001\n") == 2
    assert {"wheel", "base", "cpu", "cuda"} >= {*stages.values()}
    assert "PIP_ONLY_BINARY=:all:" in text
    assert "/health/ready" in (DEPLOY / "healthcheck.py").read_text(encoding="utf-8")
    carried = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    copied = {name for line in re.findall(r"^COPY (?!--)(.*) \S+$", text, re.M) for name in line.split()}
    assert copied <= {each.lstrip("!") for each in carried}


def test_compose_builds_the_targets_that_there_are():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    for service in services.values():
        assert f" AS {service['build']['target']}\n" in text
        assert service["environment"]["TREETOP_API_KEY"].startswith("${TREETOP_API_KEY:?")


@helm
def test_the_chart_is_what_its_values_say():
    """Lists, numbers and switches become variables as options read them; probes follow TLS; times to leave add up."""
    flags = ["kvEvents.enabled=true", "podMonitor.enabled=true", "podDisruptionBudget.enabled=true"]
    flags += ["tls.existingSecret=t", "apiKey.existingSecret=s", "options.context-length=1000000", "gpus=4"]
    given = [word for flag in flags for word in ("--set", flag)]
    objects = rendered(*given, "--set-json", 'options.served-model-name=["a","b"]')
    kinds = {each["kind"]: each for each in objects}
    assert {*kinds} == {"Deployment", "Service", "PersistentVolumeClaim", "PodMonitor", "PodDisruptionBudget"}
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["TREETOP_CONTEXT_LENGTH"] == "1000000"
    assert variables["TREETOP_SERVED_MODEL_NAME"] == "a b"
    assert container["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    leaves = int(variables["TREETOP_SHUTDOWN_DELAY"]) + int(variables["TREETOP_DRAIN_TIMEOUT"])
    assert pod["terminationGracePeriodSeconds"] == leaves + 15
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    events = kv_events_options(variables["TREETOP_KV_EVENTS_CONFIG"], EngineConfig())
    assert events is not None
    assert json.loads(variables["TREETOP_KV_EVENTS_CONFIG"])["topic"] == events.topic
    names = {each["name"] for each in pod["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == names
    selector = kinds["Service"]["spec"]["selector"]
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert selector.items() <= labels.items()


@helm
def test_the_chart_asks_for_nothing_that_its_values_leave_out():
    objects = rendered("--set", "gpus=0", "--set", "models.size=")
    assert {each["kind"] for each in objects} == {"Deployment", "Service"}
    (container,) = next(each for each in objects if each["kind"] == "Deployment")["spec"]["template"]["spec"][
        "containers"
    ]
    assert container["resources"] == {}
    assert not {"TREETOP_API_KEY", "TREETOP_SSL_CERTFILE", "TREETOP_KV_EVENTS_CONFIG"} & {
        each["name"] for each in container["env"]
    }
