"""An evil network: it can delay, drip and cut, and learns nothing by listening. Finding 5."""

from __future__ import annotations

import httpx
import pytest

from tests.hostile.network import Network, Weather
from tests.hostile.scene import DRIVER, ORGS, PATIENCE_SECONDS, Scene
from tests.hostile.tenant import Caller, kv_of, tokens_of
from tests.live import wait_until

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("hostile"), pytest.mark.timeout(900)]


def test_nothing_that_is_worth_a_token_passes_the_network_in_the_clear(stage: Scene) -> None:
    """The console tells an agent and a driver their documents through a recorder."""
    names = "evil-wire", "evil-job-wire"
    with stage.recorded("node", names[0]) as of_node, stage.recorded("driver", names[1]) as of_driver:
        wait_until("both are asked", lambda: of_node.recorded and of_driver.recorded, PATIENCE_SECONDS)
        said = bytes(of_node.recorded) + bytes(of_driver.recorded)
        for name in names:
            assert stage.processes[name].token.encode() not in said, f"the token of {name}"
        assert b"Bearer" not in said
        assert b"/v1/" not in said


def test_a_network_that_delays_drips_and_cuts_costs_time_and_no_byte(stage: Scene) -> None:
    tokens, kv = tokens_of(3), kv_of(3, len(tokens_of(3)))
    port = int(stage.processes[DRIVER].address.rpartition(":")[2])
    for weather in (Weather(delay_seconds=0.01), Weather(piece_bytes=97), Weather(cut_after_bytes=3000)):
        with Network(port, weather) as network:
            near = f"{stage.driver_url.rpartition(':')[0]}:{network.port}"
            with Caller(near, stage.callers[ORGS[0]], **stage.tls) as caller:
                for _ in range(3):
                    stored_or_cut(caller, tokens, kv)
    with Caller(stage.driver_url, stage.callers[ORGS[0]], **stage.tls) as caller:
        caller.store(tokens, kv).raise_for_status()
        assert caller.load(tokens) == (len(tokens), kv)


def stored_or_cut(caller: Caller, tokens: list[int], kv: bytes) -> None:
    """What comes back is whole and right, or the connection has ended."""
    try:
        caller.store(tokens, kv)
        found, refilled = caller.load(tokens)
    except httpx.TransportError:
        return
    assert refilled == kv[: len(refilled)]
    assert found in (0, len(tokens)) or refilled
