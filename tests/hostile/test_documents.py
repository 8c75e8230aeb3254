"""What a driver is told is good for its own work and for nothing else. Finding 6."""

from __future__ import annotations

import base64
import binascii

import pytest

from tests.hostile.doors import REFUSED
from tests.hostile.driver import VERBS_OF_AGENTS, EvilDriver
from tests.hostile.engine import guess_secret
from tests.hostile.scene import DRIVER, NODE, Scene

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("hostile"), pytest.mark.timeout(900)]


def test_no_secret_of_a_document_opens_an_agent_or_another_driver(
    stage: Scene, evil_driver: EvilDriver
) -> None:
    secrets = evil_driver.secrets()
    assert secrets, "it was told a document"
    opened = []
    for where, text in secrets.items():
        for name in (NODE, DRIVER):
            for method, path, told in VERBS_OF_AGENTS:
                shown = {"authorization": f"Bearer {text}"} if text.isprintable() else {}
                answer = stage.ask_process(name, method, path, told, shown)
                if answer.status_code not in REFUSED:
                    opened.append(f"{where}: {method} {path} of {name}")
        if guess_secret(stage.data_address, DRIVER, f"{DRIVER}.full.0", _as_secret(text)):
            opened.append(f"{where}: the shards of {DRIVER}")
    assert opened == []


def _as_secret(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return text.encode()
