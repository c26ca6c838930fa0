"""The Kubernetes manifests as they are rendered: valid by schema, and true to the code that they run."""

from __future__ import annotations

import re
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from prometheus_client import REGISTRY

from common.config import ServiceConfig
from common.wire_security import load_security
from decode_svc.config import DecodeConfig
from engine.engine_metrics import EngineMetrics
from engine.outputs import EngineStats
from gateway.config import GatewayConfig
from kvstore_svc.config import KvStoreConfig
from prefill_svc.config import PrefillConfig
from router_svc import router
from router_svc.config import RouterConfig
from tokenizer_svc.config import TokenizerConfig

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "deploy" / "kubernetes"
CONFIGS: dict[str, type[ServiceConfig]] = {
    config.service: config
    for config in (GatewayConfig, TokenizerConfig, RouterConfig, PrefillConfig, DecodeConfig, KvStoreConfig)}
SECRETS = ("nats-password", "valkey-password", "service-token", "api-keys", "*.crt", "*.key")  # never in git
RENDERED = ("cpu", "gpu", "cpu-full")
Document = dict[str, Any]

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders the manifests")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy with secrets; `overlays/cpu-full` has every optional component."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    copy = tmp_path_factory.mktemp("k8s") / "kubernetes"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns(*SECRETS))
    subprocess.run([str(copy / "new-secrets.sh")], check=True, capture_output=True, timeout=30)
    full = copy / "overlays" / "cpu-full"
    full.mkdir()
    components = "".join(f"  - ../../components/{name}\n" for name in ("cert-manager", "keda", "node-shared-memory"))
    (full / "kustomization.yaml").write_text(
        "resources: [../../base]\ncomponents:\n  - ../../components/secrets\n" + components
        + "images: [{name: shoal, newTag: 0.1.0}]\n")
    return copy


@pytest.fixture(scope="module")
def rendered(folder: Path) -> dict[str, list[Document]]:
    return {name: [*yaml.safe_load_all(subprocess.run(
        ["kubectl", "kustomize", str(folder / "overlays" / name)], check=True, capture_output=True, text=True,
        timeout=60).stdout)] for name in RENDERED}


@pytest.fixture(params=RENDERED)
def documents(request: pytest.FixtureRequest, rendered: dict[str, list[Document]]) -> list[Document]:
    return rendered[request.param]


def workloads(documents: list[Document]) -> list[Document]:
    return [d for d in documents if d["kind"] in ("Deployment", "StatefulSet", "Job")]


def services(documents: list[Document]) -> dict[str, Document]:
    """Component → workload, of our six."""
    found = {d["metadata"]["labels"]["app.kubernetes.io/component"]: d for d in workloads(documents)}
    assert found.keys() >= CONFIGS.keys()
    return {name: found[name] for name in CONFIGS}


def pod_of(workload: Document) -> Document:
    pod: Document = workload["spec"]["template"]["spec"]
    return pod


def containers(documents: list[Document]) -> Iterator[tuple[str, Document, Document]]:
    for workload in workloads(documents):
        for container in pod_of(workload)["containers"]:
            yield f"{workload['kind']}/{workload['metadata']['name']}", workload, container


def environ_of(container: Document, documents: list[Document]) -> dict[str, str]:
    """What the process would see, with samples in place of secrets and facts of the pod."""
    maps = {d["metadata"]["name"]: d["data"] for d in documents if d["kind"] == "ConfigMap"}
    environ: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        environ |= maps[source["configMapRef"]["name"]]
    for entry in container.get("env", ()):
        value = entry.get("value", "10.1.2.3" if "fieldRef" in entry.get("valueFrom", {}) else "sample-of-a-secret")
        for name in re.findall(r"\$\((\w+)\)", value):
            assert name in environ, f"{entry['name']} uses {name} before it is set"
            value = value.replace(f"$({name})", environ[name])
        environ[entry["name"]] = value
    return environ


def test_every_document_is_valid_for_its_kind(documents: list[Document]) -> None:
    schemas = yaml.safe_load((HERE / "crd_schemas.yaml").read_text())
    for document in documents:
        if document["kind"] in schemas:
            jsonschema.validate(document, schemas[document["kind"]])
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                kubernetes_validate.validate(document, "1.32", strict=True)


def test_the_validator_refuses_a_wrong_type_and_an_unknown_field() -> None:
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "x"}}
    for wrong in ({"automountServiceAccountToken": "no"}, {"automount": False}):
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate({**account, **wrong}, "1.32", strict=True)


def test_every_container_has_probes_resources_and_a_pinned_image(documents: list[Document]) -> None:
    for name, workload, container in containers(documents):
        probes = set() if workload["kind"] == "Job" else {"startupProbe", "livenessProbe", "readinessProbe"}
        assert probes <= container.keys(), name
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), name
        assert "memory" in container["resources"]["limits"], name
        tag = container["image"].rpartition("/")[2].partition(":")[2]
        assert tag not in ("", "latest"), f"{name}: {container['image']}"


def test_probes_ask_ports_that_the_container_has(documents: list[Document]) -> None:
    for name, _, container in containers(documents):
        ports = {key for port in container.get("ports", ()) for key in (port["name"], port["containerPort"])}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            for how in ("grpc", "httpGet", "tcpSocket"):
                asked = container.get(probe, {}).get(how)
                assert asked is None or asked["port"] in ports, f"{name} {probe}"


def test_no_container_has_a_privilege(documents: list[Document]) -> None:
    for name, workload, container in containers(documents):
        pod, own = pod_of(workload)["securityContext"], container["securityContext"]
        assert pod["runAsNonRoot"], name
        assert pod["runAsUser"] >= 1000, name
        assert pod["seccompProfile"]["type"] == "RuntimeDefault", name
        assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"]) == (False, True), name
        assert own["capabilities"]["drop"] == ["ALL"], name
        assert pod_of(workload)["automountServiceAccountToken"] is False, name


def test_no_service_is_told_of_others_by_variables_that_look_like_its_own(documents: list[Document]) -> None:
    """Kubernetes would set SHOAL_GATEWAY_PORT=tcp://… for a Service named shoal-gateway."""
    for name, workload, _ in containers(documents):
        assert pod_of(workload)["enableServiceLinks"] is False, name


def test_selectors_match_labels(documents: list[Document]) -> None:
    pods = [w["spec"]["template"]["metadata"]["labels"] for w in workloads(documents)]
    for document in documents:
        spec = document.get("spec", {})
        selector = {"Service": spec.get("selector"), "NetworkPolicy": spec.get("podSelector", {}).get("matchLabels"),
                    "PodDisruptionBudget": spec.get("selector", {}).get("matchLabels")}.get(document["kind"], {})
        assert any(selector.items() <= labels.items() for labels in pods), document["metadata"]["name"]
    for workload, labels in zip(workloads(documents), pods, strict=True):
        if workload["kind"] != "Job":
            wanted = workload["spec"]["selector"]["matchLabels"]
            assert wanted.items() <= labels.items()
            assert sum(wanted.items() <= other.items() for other in pods) == 1, "two workloads share a selector"
        for spread in pod_of(workload).get("topologySpreadConstraints", ()):
            assert spread["labelSelector"]["matchLabels"].items() <= labels.items()


def test_what_is_mounted_exists(documents: list[Document]) -> None:
    made = {(d["kind"], d["metadata"]["name"]) for d in documents}
    made |= {("Secret", d["spec"]["secretName"]) for d in documents if d["kind"] == "Certificate"}
    for name, workload, container in containers(documents):
        volumes = {v["name"]: v for v in pod_of(workload).get("volumes", ())}
        claims = {c["metadata"]["name"] for c in workload["spec"].get("volumeClaimTemplates", ())}
        assert {m["name"] for m in container.get("volumeMounts", ())} == volumes.keys() | claims, name
        for volume in volumes.values():
            for kind, field, key in (("Secret", "secret", "secretName"), ("ConfigMap", "configMap", "name"),
                                     ("PersistentVolumeClaim", "persistentVolumeClaim", "claimName")):
                assert field not in volume or (kind, volume[field][key]) in made, f"{name}: {volume}"


@pytest.mark.parametrize("service", CONFIGS)
def test_every_variable_is_a_field_of_its_service_with_a_value_that_it_takes(
    documents: list[Document], service: str
) -> None:
    """A variable that no service knows would be ignored in silence, where it is not of the service's own prefix."""
    container = pod_of(services(documents)[service])["containers"][0]
    environ, config_class = environ_of(container, documents), CONFIGS[service]
    fields = {field.upper() for field in config_class.model_fields}
    for name in environ:
        known = name.removeprefix("SHOAL_") in fields or name.removeprefix(f"SHOAL_{service.upper()}_") in fields
        assert known or not name.startswith("SHOAL_"), name
    environ.pop("SHOAL_DEVICE", None)  # its values are those that the installed engine has
    config = config_class.load([], environ)
    assert config.advertise_host == "10.1.2.3"
    assert f"python -m {container['command'][2]}" == " ".join(container["command"])


@pytest.mark.parametrize("service", CONFIGS)
def test_every_service_would_start_with_the_files_that_are_mounted(
    documents: list[Document], folder: Path, tmp_path: Path, service: str
) -> None:
    """TLS pair, CA and token as `new-secrets.sh` made them: nothing is bound in plaintext but metrics and health."""
    environ = environ_of(pod_of(services(documents)[service])["containers"][0], documents)
    environ.pop("SHOAL_DEVICE", None)
    (tmp_path / "service-token").write_text("sample-of-a-secret")
    mounted = {"/run/shoal/tls": folder / "components" / "certificate", "/run/shoal/secrets": tmp_path}
    for name, value in environ.items():
        parent, _, file = value.rpartition("/")
        if parent in mounted:
            environ[name] = str(mounted[parent] / file)
    config = CONFIGS[service].load([], environ)
    security = load_security(config)
    assert not config.insecure
    assert config.has_server_tls
    assert (security.client_auth, security.server_name, len(security.tokens)) == (True, "shoal.internal", 1)


def test_ports_are_those_that_the_service_binds(documents: list[Document]) -> None:
    for service, workload in services(documents).items():
        container = pod_of(workload)["containers"][0]
        environ = environ_of(container, documents)
        environ.pop("SHOAL_DEVICE", None)
        config = CONFIGS[service].load([], environ)
        bound = {config.port, config.metrics_port} | ({config.health_port} if config.health_port else set())
        assert {port["containerPort"] for port in container["ports"]} == bound, service


def test_a_pod_has_time_to_drain(documents: list[Document]) -> None:
    for service, workload in services(documents).items():
        container = pod_of(workload)["containers"][0]
        environ = environ_of(container, documents)
        environ.pop("SHOAL_DEVICE", None)
        config = CONFIGS[service].load([], environ)
        before = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        needed = config.drain_timeout_s + before + getattr(config, "store_flush_s", 0)
        assert pod_of(workload)["terminationGracePeriodSeconds"] >= needed + 10, service


def test_every_service_has_a_disruption_budget_and_only_one_owner_of_its_number(documents: list[Document]) -> None:
    budgets = {d["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]
               for d in documents if d["kind"] == "PodDisruptionBudget"}
    assert budgets == CONFIGS.keys()
    targets = [d["spec"]["scaleTargetRef"]["name"] for d in documents if d["kind"] == "HorizontalPodAutoscaler"]
    assert targets == ["shoal-gateway"]
    assert "replicas" not in services(documents)["gateway"]["spec"]


def test_every_metric_of_a_trigger_is_one_that_the_code_exports(rendered: dict[str, list[Document]]) -> None:
    assert router.DECISIONS  # its module registers what routers export
    exported = {sample.name for family in (*REGISTRY.collect(), *EngineMetrics(EngineStats, "m", 16).collect())
                for sample in family.samples}
    exported |= {f"{family.name}_bucket" for family in REGISTRY.collect() if family.type == "histogram"}
    queries = [trigger["metadata"]["query"] for d in rendered["cpu-full"] if d["kind"] == "ScaledObject"
               for trigger in d["spec"]["triggers"]]
    # An info gauge has a sample only once a service runs; it is known by its family.
    exported |= {family.name for family in REGISTRY.collect()}
    asked = {name for query in queries for name in re.findall(r"\bshoal_\w+", query)}
    assert len(queries) >= 4
    assert asked - exported == set()


def test_shared_memory_of_the_node_is_one_folder_for_workers_and_stores(rendered: dict[str, list[Document]]) -> None:
    for service in ("prefill", "decode", "kvstore"):
        pod = pod_of(services(rendered["cpu-full"])[service])
        assert environ_of(pod["containers"][0], rendered["cpu-full"])["SHOAL_SHM_DIR"] == "/dev/shm/shoal-10001"
        assert [v["hostPath"]["path"] for v in pod["volumes"] if "hostPath" in v] == ["/dev/shm"]
        assert not any("Memory" in str(volume) for volume in pod["volumes"])


def test_git_ignores_all_that_the_script_makes(folder: Path) -> None:
    made = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and "cpu-full" not in str(path)}
    made -= {path.relative_to(SOURCE) for path in SOURCE.rglob("*") if not any(path.match(name) for name in SECRETS)}
    assert len(made) == 8
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    ignored = subprocess.run(["git", "-C", str(folder), "check-ignore", *map(str, made)], check=True,
                             capture_output=True, text=True).stdout.splitlines()
    assert {Path(line) for line in ignored} == made


def test_passwords_end_without_a_line_break(folder: Path) -> None:
    for name in ("nats-password", "valkey-password"):
        assert re.fullmatch("[0-9a-f]{48}", (folder / "components" / "secrets" / name).read_text())
