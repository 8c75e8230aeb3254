"""How the backend is connected to the API server."""

from __future__ import annotations

import socket

import pytest

from cluster_server.kubernetes.api import socket_options
from cluster_server.kubernetes.options import LeaseTimes


@pytest.mark.parametrize("lease_seconds", [1.0, 15.0, 60.0])
def test_what_a_holder_has_sent_does_not_arrive_after_its_lease(lease_seconds: float) -> None:
    times = LeaseTimes.of(lease_seconds)
    options = {name: value for _, name, value in socket_options(times.unsent_seconds)}
    unsent_seconds = options[socket.TCP_USER_TIMEOUT] / 1000
    assert 0 < times.give_up_seconds + unsent_seconds <= times.lease_seconds
