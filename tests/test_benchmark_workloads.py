"""The load on workloads: what is no answer has failed, and of nothing there is no hit rate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from benchmarks.workloads import Load
from tests.console.ctl.peers import peer
from tests.console.workloads.whole import Served
from tests.live import wait_until


@pytest.mark.parametrize("body", [b"<html>", b"{}", b'{"usage": {"prompt_tokens_details": null}}'])
def test_an_answer_without_usage_has_failed_and_no_hit_rate_is_made_of_it(body: bytes) -> None:
    with peer(lambda *_: (200, {}, body)) as address:
        scene = cast("Served", SimpleNamespace(key="k", brain_url=address))
        with Load(scene, "m") as load:
            wait_until("one has failed", lambda: load.failed)
    assert not load.served
    with pytest.raises(AssertionError, match="nothing was served"):
        load.hit_rate(0)
