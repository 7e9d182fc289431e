"""What ``deploy`` says fits the code: options, paths, ports, times, and every series in a board or an alert."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from monitoring import DEPLOY, alert_queries, board, board_queries, metrics_of, ray_board_queries, rules
from ray.serve.schema import ServeDeploySchema

from app import config
from app.metrics.aliases import ALIASES
from app.metrics.board import board as made_board
from app.metrics.table import TABLE, MetricKind

ROOT = DEPLOY.parent
SERVICES = ("rayservice.yaml", "rayservice-gpu.yaml")
SUFFIXES = {
    MetricKind.GAUGE: ("",),
    MetricKind.COUNTER: ("_total",),
    MetricKind.HISTOGRAM: ("_bucket", "_sum", "_count"),
}
SERIES = {
    metric.full_name + suffix: {
        *metric.labels,
        "model_name",
        "replica",
        *(["le"] if suffix == "_bucket" else []),
    }
    for metric in TABLE
    for suffix in SUFFIXES[metric.kind]
}
PROMTOOL = shutil.which("promtool")

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")
services = pytest.mark.parametrize("name", SERVICES)

CRD = os.environ.get("KUBERAY_CRD", "")
"""KubeRay's ``helm-chart/kuberay-operator/crds/ray.io_rayservices.yaml``; it has the schema of pods, too."""


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))


def ray_service(name: str) -> dict[str, Any]:
    (found,) = documents(name)
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", "RayService")
    spec: dict[str, Any] = found["spec"]
    return spec


def pods(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Templates of the head and of each group of workers."""
    cluster = spec["rayClusterConfig"]
    return [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]


@pytest.mark.parametrize("query", board_queries() + alert_queries())
def test_every_series_is_in_the_table(query: str) -> None:
    named = metrics_of(query)
    assert named or "up{" in query
    for name, selected, grouped in named:
        assert name in SERIES, f"{name} is not in the table"
        assert set(selected) <= SERIES[name]
        if len(named) == 1:
            assert set(grouped) <= SERIES[name]


def test_rays_own_board_finds_its_names_and_prometheus_keeps_them() -> None:
    """It reads them of each node, not of the server's ``/metrics``."""
    ours = {f"ray_vllm_{alias.name}{suffix}" for alias in ALIASES for suffix in SUFFIXES[alias.kind]}
    asked = {name for query in ray_board_queries() for name in re.findall(r"\bray_vllm_\w+", query)}
    assert len(asked) > 20
    assert asked <= ours
    jobs = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    (dropped,) = next(job for job in jobs if job["job_name"] == "ray")["metric_relabel_configs"]
    assert dropped["action"] == "drop"
    assert [name for name in asked if re.fullmatch(dropped["regex"], name)] == []


def test_the_board_is_the_one_that_the_code_makes() -> None:
    """``python -m app.metrics.board > deploy/grafana/quire.json``."""
    assert board() == made_board()


def test_the_board_is_in_grafanas_model() -> None:
    made = board()
    assert made["schemaVersion"] >= 36
    panels = made["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not cells & taken
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["type"] == "timeseries"
        assert panel["datasource"] == {"type": "prometheus", "uid": "${source}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            (label,) = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]) or [None]
            assert label is None or label == "replica" or re.search(rf"by \({label}\)", target["expr"])
    assert {variable["name"] for variable in made["templating"]["list"]} == {"source", "model"}


def test_every_alert_has_a_runbook() -> None:
    for rule in rules():
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), flags=re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert rule["labels"]["severity"] in ("page", "ticket")


@needs_promtool
def test_promtool_takes_the_rules_and_the_configuration() -> None:
    for command in (["check", "rules", "alerts.yml"], ["check", "config", "--syntax-only", "prometheus.yml"]):
        ran = subprocess.run(
            [str(PROMTOOL), *command], cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr


@needs_promtool
def test_pages_are_sent_when_they_should(tmp_path: Path) -> None:
    """What each page is for makes it, and a quiet fleet makes none."""
    quiet = {
        'up{job="quire"}': "1x30",
        'quire_replicas{state="open", model_name="m"}': "2x30",
        'quire_live_requests{model_name="m"}': "3x30",
        'quire_kv_demand_blocks{model_name="m"}': "90x30",
        'quire_kv_blocks{model_name="m"}': "100x30",
        'quire_lost_leases_total{model_name="m"}': "1x30",
        'quire_preemptions_total{model_name="m"}': "0+1x30",
        'quire_finished_requests_total{model_name="m"}': "0+60x30",
    }
    trouble = {
        "QuireNoHealthyIngress": {'up{job="quire"}': "0x30"},
        "QuireNoEngine": {'quire_replicas{state="open", model_name="m"}': "0x30"},
        "QuireDemandOverMaximum": {'quire_kv_demand_blocks{model_name="m"}': "150x30"},
        "QuireLostLeases": {'quire_lost_leases_total{model_name="m"}': "0+1x30"},
        "QuirePreemptionStorm": {'quire_preemptions_total{model_name="m"}': "0+60x30"},
    }
    pages = {rule["alert"] for rule in rules() if rule["labels"]["severity"] == "page"}
    assert pages == trouble.keys()
    tests = []
    for cause, changed in [("", {}), *trouble.items()]:
        series = [{"series": name, "values": values} for name, values in {**quiet, **changed}.items()]
        # The names alone: of the alerts that fire, one series each.
        expected = [{"labels": f'{{alertname="{cause}"}}', "value": 1}] if cause else []
        query = 'sum by (alertname) (ALERTS{alertstate="firing", severity="page"})'
        tests.append(
            {
                "interval": "1m",
                "input_series": series,
                "promql_expr_test": [{"expr": query, "eval_time": "20m", "exp_samples": expected}],
            }
        )
    path = tmp_path / "pages.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(DEPLOY / "prometheus/alerts.yml")], "tests": tests}))
    ran = subprocess.run(
        [str(PROMTOOL), "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@services
def test_what_serve_is_told_is_valid(name: str) -> None:
    serve = yaml.safe_load(ray_service(name)["serveConfigV2"])
    ServeDeploySchema(**serve)
    (application,) = serve["applications"]
    options = config.load(application["args"], {})
    config.refuse_launch_options(application["args"])
    assert options.scaling.scales
    # The same settings of Serve as on any other cluster.
    other = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    variables = serve["controller_options"]["runtime_env"]["env_vars"]
    assert variables.items() >= other["controller_options"]["runtime_env"]["env_vars"].items()
    assert application["import_path"] == other["applications"][0]["import_path"]


def strict(schema: Any) -> Any:
    """A CRD's schema as JSON schema, in which an unknown field is an error, as to ``kubectl apply``."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(part) for name, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and "x-kubernetes-preserve-unknown-fields" not in schema:
        made.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    return made


@pytest.mark.skipif(not CRD, reason="KUBERAY_CRD does not name KubeRay's definition of a RayService")
def test_services_fit_kuberays_definition() -> None:
    definition = yaml.load(Path(CRD).read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # a megabyte
    (version,) = (one for one in definition["spec"]["versions"] if one["name"] == "v1")
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = True  # Kubernetes' own
    for name in SERVICES:
        (document,) = documents(name)
        errors = list(jsonschema.Draft202012Validator(schema).iter_errors(document))
        assert [("/".join(map(str, error.path)), error.message[:200]) for error in errors] == [], name


@services
def test_streams_end_before_their_node_does(name: str) -> None:
    spec = ray_service(name)
    serve = yaml.safe_load(spec["serveConfigV2"])
    drain_s = serve["applications"][0]["args"]["drain_timeout_s"]
    worker = pods(spec)[1]["spec"]
    (stops,) = re.findall(
        r"--deadline-remaining-seconds (\d+)",
        worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][2],
    )
    assert drain_s < int(stops) < worker["terminationGracePeriodSeconds"]
    assert drain_s < spec["rayClusterDeletionDelaySeconds"]


@services
def test_nodes_have_room_for_the_engines(name: str) -> None:
    spec = ray_service(name)
    scaling = config.load(yaml.safe_load(spec["serveConfigV2"])["applications"][0]["args"], {}).scaling
    (group,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert container["resources"]["requests"]["cpu"] == container["resources"]["limits"]["cpu"]
    assert scaling.engine_cpus is not None
    assert scaling.engine_cpus <= float(container["resources"]["requests"]["cpu"])
    assert (group["minReplicas"], group["maxReplicas"]) == (scaling.lower_limit, scaling.upper_limit)
    assert ("nvidia.com/gpu" in container["resources"]["limits"]) is ("gpu" in name)


@services
def test_the_cluster_survives_its_head_and_an_upgrade(name: str) -> None:
    spec = ray_service(name)
    upgrade = spec["upgradeStrategy"]
    assert upgrade["type"] == "NewClusterWithIncrementalUpgrade"
    # KubeRay refuses it without these.
    assert upgrade["clusterUpgradeOptions"].keys() >= {"gatewayClassName", "stepSizePercent", "intervalSeconds"}
    cluster = spec["rayClusterConfig"]
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["authOptions"] == {"mode": "token"}
    host, port = cluster["gcsFaultToleranceOptions"]["redisAddress"].split(":")
    service, stateful = documents("redis.yaml")
    assert (service["metadata"]["name"], service["spec"]["ports"][0]["port"]) == (host, int(port))
    secret = cluster["gcsFaultToleranceOptions"]["redisPassword"]["valueFrom"]
    assert secret in [
        variable["valueFrom"]
        for variable in stateful["spec"]["template"]["spec"]["containers"][0]["env"]
        if variable["name"] == "REDIS_PASSWORD"
    ]
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints-gpu.txt").read_text(), flags=re.MULTILINE)
    assert pinned is not None
    assert cluster["rayVersion"] == pinned[1]
    for pod in pods(spec):
        assert pod["metadata"]["labels"]["app"] == "quire"  # the network policies select by it
        for probe in ("readinessProbe", "livenessProbe"):
            assert pod["spec"]["containers"][0][probe]["exec"]["command"][0] == "bash"


@services
def test_pods_may_do_no_more_than_they_need(name: str) -> None:
    """As the Pod Security Standard "restricted" asks; the user is that of the image."""
    user = re.search(r"useradd .*--uid (\d+)", (DEPLOY / "Dockerfile").read_text())
    assert user is not None
    assert f"USER {user[1]}\n" in (DEPLOY / "Dockerfile").read_text()
    spec = ray_service(name)
    redis = documents("redis.yaml")[1]["spec"]["template"]
    for pod in [*pods(spec), redis]:
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod is redis or context["runAsUser"] == int(user[1])
        assert pod is redis or pod["spec"]["enableServiceLinks"] is False
    containers = [container for pod in [*pods(spec), redis] for container in pod["spec"]["containers"]]
    for container in [*containers, spec["rayClusterConfig"]["autoscalerOptions"]]:
        limited = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert container["securityContext"] == limited


def test_prometheus_finds_services_that_are_there() -> None:
    """KubeRay's own have the name of the RayCluster, another one with each upgrade."""
    ports = {
        one["metadata"]["name"]: one["spec"]["ports"][0]["port"]
        for one in documents("services.yaml")
        if one["kind"] == "Service"
    }
    jobs = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    (target,) = jobs[0]["static_configs"][0]["targets"]
    (lookup,) = jobs[1]["dns_sd_configs"]
    (node,) = lookup["names"]
    asked = {target.split(".")[0]: int(target.split(":")[1]), node.split(".")[0]: lookup["port"]}
    assert asked == ports


@services
def test_services_and_policies_select_the_pods(name: str) -> None:
    head, workers = (pod["metadata"]["labels"] for pod in pods(ray_service(name)))
    workers["ray.io/serve"] = "true"  # by KubeRay
    for one in documents("services.yaml"):
        selector = one["spec"]["selector"].get("matchLabels", one["spec"]["selector"])
        assert selector.items() <= workers.items()
        assert (selector.items() <= head.items()) is (one["metadata"]["name"] == "quire-nodes")


def test_the_policies_let_clients_reach_the_api_alone() -> None:
    for policy in documents("network-policy.yaml"):
        assert "Ingress" in policy["spec"]["policyTypes"]
        for rule in policy["spec"]["ingress"]:
            ports = {port["port"] for port in rule.get("ports", [])}
            assert rule.get("from") or ports == {8000}


@services
def test_caches_beside_a_mounted_one_are_the_users(name: str) -> None:
    """A folder that the runtime makes for a mount is root's: no kernel could be kept beside it."""
    made = re.findall(r"^RUN mkdir -p (\S+)$", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    home = "/home/quire/"
    for pod in pods(ray_service(name)):
        mounts = (mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"])
        assert {path.removeprefix(home) for path in mounts if path.startswith(home)} <= set(made)


def test_the_image_copies_what_is_there() -> None:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    steps = [shlex.split(line) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    known = {"FROM", "RUN", "WORKDIR", "ARG", "COPY", "ENV", "USER", "EXPOSE", "CMD"}
    assert {step[0] for step in steps} == known
    assert steps[0][0] == "FROM"
    copied = [path for step in steps if step[0] == "COPY" for path in step[1:-1]]
    for path in copied:
        assert (ROOT / path).exists(), path
        assert path not in (ROOT / ".dockerignore").read_text().split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    setuptools = project["tool"]["setuptools"]
    packages = {pattern.removesuffix("*") for pattern in setuptools["packages"]["find"]["include"]}
    assert packages <= set(copied)
    assert {project["project"]["readme"], "pyproject.toml"} <= set(copied)
    assert f"/usr/local/bin/{next(iter(project['project']['scripts']))}" in text
    # What is no module comes along only by these patterns.
    data = setuptools["package-data"]
    for package in packages:
        listed = {path for pattern in data.get(package, ()) for path in (ROOT / package).glob(pattern)}
        files = {path for path in (ROOT / package).rglob("*") if path.is_file() and path.suffix != ".pyc"}
        left = {path for path in files - listed if path.suffix != ".py" and "reports" not in path.parts}
        assert {path.name for path in left} <= {"setup.sh", "vllm.sh"}, "of experiments, which no wheel has"
