"""Each credential is tried at every door; THREAT_MODEL.md has the table of what opened."""

from __future__ import annotations

import re

import pytest

from console.environment import PROJECT
from tests.hostile.doors import DOORS, credentials, tried
from tests.hostile.driver import EvilDriver
from tests.hostile.scene import ORGS, Scene
from tests.hostile.tenant import Caller, kv_of, tokens_of

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("hostile"), pytest.mark.timeout(900)]

PAGE = PROJECT / "THREAT_MODEL.md"
ROW = re.compile(r"^\| `(?P<credential>[^`]+)` \| (?P<opens>[^|]*) \|$", re.MULTILINE)


def written_down() -> dict[str, list[str]]:
    """The table, as it stands on the page."""
    return {
        row["credential"]: re.findall(r"`([^`]+)`", row["opens"])
        for row in ROW.finditer(PAGE.read_text())
    }


def test_each_credential_opens_what_the_threat_model_says_and_nothing_else(
    stage: Scene, evil_driver: EvilDriver
) -> None:
    with Caller(stage.driver_url, stage.callers[ORGS[0]], **stage.tls) as victim:
        victim.store(tokens_of(0), kv_of(0, len(tokens_of(0)))).raise_for_status()
    found = {one.name: tried(stage, one) for one in credentials(stage, evil_driver)}
    stage.remove_evil_nodes()
    for name, opened in found.items():
        print(f"| `{name}` | {', '.join(f'`{one}`' for one in opened)} |")
    assert found == written_down()
    assert {door for opened in found.values() for door in opened} == set(DOORS), (
        "each door is opened by somebody, or it was not tried well"
    )
