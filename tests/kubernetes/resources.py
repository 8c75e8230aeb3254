"""The kinds of objects that tests read and write."""

from __future__ import annotations

from typing import Any

from lightkube import Client
from lightkube.core.resource_registry import resource_registry
from lightkube.generic_resource import create_global_resource, create_namespaced_resource
from lightkube.types import PatchType

Document = dict[str, Any]
KINDS = {
    "CustomResourceDefinition": ("apiextensions.k8s.io", "v1", "customresourcedefinitions"),
    "Namespace": ("", "v1", "namespaces"),
    "Node": ("", "v1", "nodes"),
    "ClusterRole": ("rbac.authorization.k8s.io", "v1", "clusterroles"),
    "ClusterRoleBinding": ("rbac.authorization.k8s.io", "v1", "clusterrolebindings"),
}
NAMESPACED = {
    "ServiceAccount": ("", "v1", "serviceaccounts"),
    "ConfigMap": ("", "v1", "configmaps"),
    "Secret": ("", "v1", "secrets"),
    "Service": ("", "v1", "services"),
    "Pod": ("", "v1", "pods"),
    "Endpoints": ("", "v1", "endpoints"),
    "Deployment": ("apps", "v1", "deployments"),
    "DaemonSet": ("apps", "v1", "daemonsets"),
    "StatefulSet": ("apps", "v1", "statefulsets"),
    "NetworkPolicy": ("networking.k8s.io", "v1", "networkpolicies"),
    "PodDisruptionBudget": ("policy", "v1beta1", "poddisruptionbudgets"),
    "Role": ("rbac.authorization.k8s.io", "v1", "roles"),
    "RoleBinding": ("rbac.authorization.k8s.io", "v1", "rolebindings"),
    "Lease": ("coordination.k8s.io", "v1", "leases"),
    "WsJob": ("tidegate.dev", "v1", "wsjobs"),
}


def resource(kind: str) -> Any:
    """Its class, of which lightkube registers one for a whole process."""
    group, version, plural = (KINDS | NAMESPACED)[kind]
    if known := resource_registry.get(f"{group}/{version}".lstrip("/"), kind):
        return known
    if kind in KINDS:
        return create_global_resource(group, version, kind, plural)
    return create_namespaced_resource(group, version, kind, plural)


def put(client: Client, document: Document, namespace: str | None = None) -> Any:
    kind = document["kind"]
    where: dict[str, Any] = {"namespace": namespace} if kind in NAMESPACED else {}
    client.patch(
        resource(kind),
        document["metadata"]["name"],
        document,
        **where,
        patch_type=PatchType.APPLY,
        force=True,
    )
