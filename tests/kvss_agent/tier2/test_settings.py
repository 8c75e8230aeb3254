"""A desired document says where and how much, and what makes no sense is refused with a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvss_agent.tier2.construction import make
from kvss_agent.tier2.settings import Tier2Settings
from tests.kvss_agent.tier2.columns import ACME, BOLT, address_of, put


def test_a_document_in_json_is_understood() -> None:
    document = b"""{"kind": "posix", "path": "/var/lib/tidegate", "cap_bytes": 1000,
        "org_cap_bytes": 500, "org_caps": {"626f6c742e2e2e2e2e2e2e2e2e2e2e2e": 10},
        "shared": false, "threads": 4}"""
    settings = msgspec.json.decode(document, type=Tier2Settings)
    caps = settings.caps()
    assert (caps.total, caps.of(ACME), caps.of(BOLT)) == (1000, 500, 10)
    assert not settings.shared


def test_an_org_without_a_cap_may_fill_the_store() -> None:
    assert Tier2Settings("posix", 1000, path="/x").caps().of(ACME) == 1000


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"kind": "posix"}, "absolute path"),
        ({"kind": "posix", "path": "relative"}, "absolute path"),
        ({"kind": "s3"}, "bucket"),
        ({"kind": "posix", "path": "/x", "cap_bytes": -1}, "not negative"),
        ({"kind": "posix", "path": "/x", "threads": 0}, "1 to 256 threads, not 0"),
        ({"kind": "posix", "path": "/x", "threads": 257}, "1 to 256 threads, not 257"),
        ({"kind": "posix", "path": "/x", "org_caps": {"ab": 1}}, "a tag has 16 bytes"),
        ({"kind": "posix", "path": "/x", "org_caps": {"no hex": 1}}, "hex"),
    ],
)
def test_nonsense_is_refused_with_a_sentence(setting: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Tier2Settings(**{"cap_bytes": 1000, **setting})


async def test_settings_make_a_store_in_a_directory(tmp_path: Path) -> None:
    store = make(Tier2Settings("posix", 1 << 30, path=str(tmp_path), durable=True))
    await store.open()
    assert await put(store, address_of(1)) == "stored"
    assert store.stats().properties["durable"]
    await store.close()
