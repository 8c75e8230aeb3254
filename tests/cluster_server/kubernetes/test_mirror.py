"""What is known of the objects in the namespace, whoever has made them."""

from __future__ import annotations

import pytest

from cluster_server.kubernetes.api import CONFIG_MAP, Document
from cluster_server.kubernetes.mirror import Mirror
from tests.cluster_server.kubernetes.unconnected import api, stored


async def test_an_object_that_nothing_can_be_made_of_is_passed_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen = []

    def on_change(name: str, one: Document | None) -> None:
        if one:
            seen.append(one["metadata"]["labels"]["workload"])

    mirror = Mirror(api(), CONFIG_MAP, {}, on_change)
    mirror.take(stored({"metadata": {"name": "evil"}}, "u1"))
    mirror.take(stored({"metadata": {"name": "good", "labels": {"workload": "chat"}}}, "u2"))
    assert seen == ["chat"]
    assert "ConfigMap evil is passed over" in caplog.text
