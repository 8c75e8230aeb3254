"""The Lease, on an API server that refuses what a test asks it to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster_server.kubernetes.api import Api
from cluster_server.kubernetes.leader import NAME, Leadership
from cluster_server.kubernetes.options import LeaseTimes
from tests.cluster_server.kubernetes.api_server import ApiServer, until

PATIENT = LeaseTimes(lease_seconds=90.0, give_up_seconds=60.0, renew_seconds=0.02)


async def lead(api: Api, times: LeaseTimes = PATIENT) -> Leadership:
    made = Leadership(api, "server-a", times)
    await made.acquire()
    return made


def holder(server: ApiServer) -> str:
    spec: dict[str, Any] = server.objects["leases", NAME]["spec"]
    return str(spec["holderIdentity"])


@pytest.mark.parametrize("status", [401, 403, 410, 422, 503])
async def test_a_renewal_that_is_refused_is_tried_again(
    server: ApiServer, api: Api, status: int
) -> None:
    leadership = await lead(api)
    server.refusals["PUT", "leases"] = status
    asked = server.count("PUT", "leases")
    await until("it has been refused", lambda: server.count("PUT", "leases") > asked + 1)
    del server.refusals["PUT", "leases"]
    version = server.objects["leases", NAME]["metadata"]["resourceVersion"]

    def is_renewed() -> bool:
        return bool(server.objects["leases", NAME]["metadata"]["resourceVersion"] != version)

    await until("it is renewed", is_renewed)
    assert not leadership.is_lost.is_set()
    await leadership.release()
    assert holder(server) == ""


async def test_who_is_refused_for_too_long_does_not_lead(server: ApiServer, api: Api) -> None:
    leadership = await lead(api, replace(PATIENT, give_up_seconds=1.0))
    server.refusals["PUT", "leases"] = server.refusals["GET", "leases"] = 403
    await until("it is lost", leadership.is_lost.is_set)
    await leadership.release()  # which is refused as well


async def test_whoever_finds_the_lease_taken_does_not_lead_and_leaves_it(
    server: ApiServer, api: Api
) -> None:
    leadership = await lead(api)
    lease = server.objects["leases", NAME]
    server.put("leases", NAME, {**lease, "spec": {**lease["spec"], "holderIdentity": "server-b"}})
    await until("it is lost", leadership.is_lost.is_set)
    await leadership.release()
    assert holder(server) == "server-b"


async def test_a_lease_is_released_though_a_renewal_was_under_way(server: ApiServer, api: Api) -> None:
    leadership = await lead(api)
    # A renewal that the API server has done, and whose answer has not been read yet.
    server.put("leases", NAME, server.objects["leases", NAME])
    await leadership.release()
    assert holder(server) == ""


async def test_a_lease_that_says_nothing_is_free(server: ApiServer, api: Api) -> None:
    server.put("leases", NAME, {})
    leadership = await lead(api)
    assert holder(server) == "server-a"
    await leadership.release()
