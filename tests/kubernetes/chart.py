"""The Helm chart, and the plain manifests that are made of it (`python -m tests.kubernetes.chart`)."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import helm_python as helm
import yaml

from console.environment import PROJECT

CHART: Final = PROJECT / "deploy" / "helm" / "tidegate"
CRD: Final = CHART / "crds" / "wsjobs.crd.yaml"
PLAIN: Final = PROJECT / "deploy" / "kubernetes"
NAME: Final = "tidegate"  # of the release, and of its namespace
Document = dict[str, Any]

# What has to be said in any case: where the console's secrets are.
EXTERNAL: Final[Document] = {"console": {"existingSecret": "tidegate"}}
BUNDLED: Final[Document] = {"bundled": {"enabled": True}}
EVERYTHING: Final[Document] = {
    "image": {"digest": f"sha256:{'0' * 64}"},
    "imagePullSecrets": [{"name": "registry"}],
    "commonLabels": {"team": "inference"},
    "priorityClassName": "system-cluster-critical",
    "console": {
        "existingSecret": "tidegate",
        "allowedHosts": ["10.0.0.1"],
        "settings": {"TIDEGATE_SESSION_HOURS": 8, "TIDEGATE_LOG_LEVEL": "warning"},
    },
    "web": {
        "existingSecret": "tidegate-web",
        "service": {"type": "LoadBalancer", "annotations": {"example.org/pool": "a"}},
        "env": [{"name": "TZ", "value": "UTC"}],
        "podAnnotations": {"example.org/scraped": "yes"},
        "podLabels": {"example.org/tier": "front"},
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "dedicated", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "topologyKey": "kubernetes.io/hostname",
                        "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "tidegate-web"}},
                    }
                ]
            }
        },
    },
    "prepare": {"existingSecret": "tidegate-owner"},
    "tokenizers": {"create": True, "storageClass": "shared"},
    "ingress": {"enabled": True, "className": "nginx", "tlsSecret": "console-tls"},
    "join": {"existingSecret": "tokens", "consoleCaConfigMap": "authority"},
    "brain": {
        "tlsSecret": "brain-tls",
        "ingress": {"enabled": True, "host": "api.example.org", "tlsSecret": "api-tls"},
        "autoscaling": {
            "enabled": True,
            "queueTime": {"metric": "tidegate_brain_queue_seconds_p95", "target": "500m"},
        },
        "settings": {"BRAIN_CONNECTIONS": 20000},
    },
    "clusterServer": {
        "replicas": 2,
        "boxes": ["box-1", "box-2"],
        "podTemplate": {"tolerations": [{"operator": "Exists"}]},
        "settings": {"CLUSTER_SERVER_JOBS_AT_ONCE": 8},
    },
    "agents": {"enabled": True, "hostNetwork": True, "settings": {"KVSS_AGENT_DRAIN_SECONDS": 5}},
    "serviceMonitor": {
        "enabled": True,
        "tokenSecret": "prometheus",
        "labels": {"release": "prometheus"},
    },
}
WITHOUT_CLUSTER: Final[Document] = {
    "console": {"existingSecret": "tidegate"},
    "orchestrator": {"enabled": False},
    "clusterServer": {"enabled": False},
    "brain": {"persistence": {"enabled": False}},
    "agents": {"enabled": True, "facts": "none", "ownHostPath": False},
    "topologySpread": {"hostname": False, "zone": False},
    "networkPolicies": {"enabled": False},
}
ALL_VALUES: Final[Mapping[str, Document]] = {
    "external": EXTERNAL,
    "bundled": BUNDLED,
    "everything": EVERYTHING,
    "without a cluster": WITHOUT_CLUSTER,
}

# These Secrets are made by hand, since a chart that is only rendered makes new ones each time.
OF_PLAIN: Final[Document] = {
    **EXTERNAL,
    "clusterServer": {
        "tlsSecret": "tidegate-cluster-server-tls",
        "clientTlsSecret": "tidegate-cluster-client",
    },
}
# What only Helm needs. Kustomize and `kubectl -n` say the namespace.
_OF_HELM: Final = re.compile(
    r"^ +(app\.kubernetes\.io/managed-by|helm\.sh/[a-z-]+): .*\n"
    r"|^  namespace: .*\n"
    r"|^  annotations:\n(?=    helm\.sh/hook: )"
    r"|^ +# The Job stays, .*\n",
    re.MULTILINE,
)
_HEAD: Final = "# Made of deploy/helm/tidegate by `make manifests`.\n"


def documents(text: str) -> Iterator[Document]:
    yield from (one for one in yaml.safe_load_all(text) if one)


def rendered(values: Document, namespace: str = NAME, **more: Any) -> list[Document]:
    """As `helm template` does it, without NOTES.txt."""
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values, name=NAME, namespace=namespace, **more)
    return [
        document
        for name, text in sorted(texts.items())
        if name.endswith(".yaml")
        for document in documents(text)
    ]


def plain_manifests() -> dict[str, str]:
    """The files of deploy/kubernetes, by their names."""
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(OF_PLAIN, name=NAME, namespace=NAME)
    files = {"wsjobs.crd.yaml": CRD.read_text()}
    for path, text in texts.items():
        bare = _OF_HELM.sub("", text).strip().removeprefix("---").strip()
        if path.endswith(".yaml") and bare:
            files[Path(path).name] = f"{_HEAD}{bare}\n"
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": NAME,
        "resources": sorted(files),
    }
    files["kustomization.yaml"] = _HEAD + yaml.safe_dump(kustomization, sort_keys=False)
    return files


def main() -> None:
    files = plain_manifests()
    for path in PLAIN.glob("*.yaml"):
        if path.name not in files:
            path.unlink()
    for name, text in files.items():
        (PLAIN / name).write_text(text)
    sys.stdout.write(f"{len(files)} files in {PLAIN.relative_to(PROJECT)}\n")


if __name__ == "__main__":
    main()
