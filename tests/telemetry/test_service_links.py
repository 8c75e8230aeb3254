"""What Kubernetes puts into the environment of pods is told from what a person has misspelt."""

from __future__ import annotations

import pytest

from telemetry.service_links import is_service_link

OF_A_SERVICE = {
    "TIDEGATE_SERVICE_HOST": "10.0.0.11",
    "TIDEGATE_SERVICE_PORT": "8400",
    "TIDEGATE_SERVICE_PORT_HTTP": "8400",
    "TIDEGATE_PORT": "tcp://10.0.0.11:8400",
    "TIDEGATE_PORT_8400_TCP": "tcp://10.0.0.11:8400",
    "TIDEGATE_PORT_8400_TCP_PROTO": "tcp",
    "TIDEGATE_PORT_8400_TCP_PORT": "8400",
    "TIDEGATE_PORT_8400_TCP_ADDR": "10.0.0.11",
}


@pytest.mark.parametrize(("name", "value"), OF_A_SERVICE.items())
def test_what_kubernetes_sets_for_a_service(name: str, value: str) -> None:
    assert is_service_link(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("TIDEGATE_PORT", "8400"), ("TIDEGATE_PROT", "8400"), ("KVSS_AGENT_SERVICE", "tcp://10.0.0.11:1")],
)
def test_what_a_person_sets(name: str, value: str) -> None:
    assert not is_service_link(name, value)
