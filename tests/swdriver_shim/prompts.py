"""Orgs, namespaces and prompts for tests."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from swdriver_shim.desired import GroupSpec, ModelSpec
from swdriver_shim.keys import Keys, Namespace, Prompt
from swdriver_shim.layout import Group, Layout

SECRET = bytes(range(32))
LAYOUT = Layout((Group("full", (64, 32)), Group("window", (16,), window=100)))  # of whole drivers
MODEL = ModelSpec("llama", tuple(map(GroupSpec.of, LAYOUT.groups)), "r1", "bf16", "full:64")
NAMESPACE = MODEL.namespace()
OTHER = structs.replace(MODEL, revision="r2").namespace()
FULL = Layout((Group("full", (64, 64)),))
HYBRID = Layout((Group("full", (64,)), Group("window", (32, 32), window=130), Group("draft", (16,))))
STATES = Layout(
    (
        Group("state", bytes_per_state=(5000, 700), tokens_per_state=128),
        Group("full", (64,)),
        Group("window", (32, 32), window=130),
    )
)
PURE = Layout((Group("state", bytes_per_state=(5000,)),))  # a model without attention


def keys(org: str = "acme", namespace: Namespace = NAMESPACE) -> Keys:
    return Keys(org, SECRET, namespace)


def prompt(tokens: Sequence[int], org: str = "acme", namespace: Namespace = NAMESPACE) -> Prompt:
    return keys(org, namespace).prompt(tokens)
