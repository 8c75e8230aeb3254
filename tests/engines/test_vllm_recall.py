"""What lies only in tier 2 is recalled while its request waits in vLLM's queue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from console.stack import endpoint
from swdriver_shim.adapters.vllm.config import ApiSpec
from swdriver_shim.desired import token_hash
from swdriver_shim.policy import Rules
from tests.engines.prompts import prompt
from tests.engines.running import Place
from tests.live import wait_until

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

CALLER = "a caller's token of acme"
CACHED, COLUMNS = 960, 15  # of a prompt
SHARED = 320  # tokens of two prompts
ONE_AT_ONCE: dict[str, Any] = {"max_num_seqs": 1}  # so that the second of two requests is in the queue


def states(place: Place, asked: Sequence[int]) -> set[str]:
    """Of the whole columns of a prompt, as Explain has them. To be explained is not to be asked for."""
    api = place.setting.api
    assert api
    url, headers = f"http://127.0.0.1:{api.port}/v1/explain", {"authorization": f"Bearer {CALLER}"}
    told = httpx.post(url, json={"tokens": asked}, headers=headers, timeout=60).raise_for_status()
    return {column["state"] for column in told.json()["full"][:COLUMNS]}


def test_columns_in_tier_2_are_recalled_while_their_request_queues(place: Place, tmp_path: Path) -> None:
    """No request waits for tier 2 here (`wait_seconds` is 0): what hits was recalled before its turn."""
    acme, globex = place.setting.orgs
    place.setting = replace(
        place.setting,
        orgs=(replace(acme, tokens=(token_hash(CALLER),)), globex),
        api=ApiSpec(host="127.0.0.1", port=endpoint.free_port(), token="the token of a controller"),
        state_dir=str(tmp_path / "state"),
    )
    place.allow_tier2(wait_seconds=0)
    branch = prompt(2)[:SHARED] + prompt(7)[SHARED:]
    with place.engine(**ONE_AT_ONCE) as engine:
        right = {seed: engine.answer(prompt(seed), None) for seed in range(3)}
        of_branch = engine.answer(branch, None)
        for seed in right:
            engine.answer(prompt(seed), "acme", Rules(continue_id=f"chat-{seed}"))
            assert engine.hits(prompt(seed), "acme") == CACHED
        engine.answer(branch, "acme")
        assert engine.hits(branch, "acme") == CACHED
        columns = 4 * COLUMNS - SHARED // 64
        wait_until("all of it is in tier 2", lambda: len(place.files) >= columns, 60)
    place.lose_memory()
    with place.engine(**ONE_AT_ONCE) as engine:
        # What the driver had in memory before it was restarted, it has its agent get back.
        wait_until(
            "it is restored", lambda: all(states(place, prompt(one)) == {"ready"} for one in right), 60
        )
        assert engine.answer(prompt(0), "acme") == right[0]
        assert engine.cached == [CACHED]
    place.lose_memory()
    place.setting = replace(place.setting, state_dir=str(tmp_path / "of a driver that knows no column"))
    with place.engine(**ONE_AT_ONCE) as engine:
        assert not any("ready" in states(place, prompt(seed)) for seed in right)

        # Where there is no trail, a request that is said to continue is recalled by its own columns.
        elsewhere = Rules(continue_id="begun at another engine")
        _, found = engine.answer_all([prompt(5), prompt(1)], "acme", elsewhere, tokens=200)
        assert found[: len(right[1])] == right[1]
        assert engine.cached == [0, CACHED]

        # Nobody asks for it: its columns are looked for when it is its turn, and come too late.
        _, found = engine.answer_all([prompt(6), prompt(2)], "acme", tokens=200)
        assert found[: len(right[2])] == right[2]
        assert engine.cached == [0, 0]
        wait_until("it is back all the same", lambda: states(place, prompt(2)) == {"ready"}, 60)

        # What begins as something in memory does is recalled behind that: nobody says more of it.
        _, found = engine.answer_all([prompt(8), branch], "acme", tokens=200)
        assert found[: len(of_branch)] == of_branch
        assert engine.cached == [0, CACHED]
