"""Documents on disk: nobody reads the secrets in them without the token."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from kvss_agent.documents import Conflict, Invalid
from swdriver_shim.daemon.shim import ANOTHER_MODEL, Shim
from swdriver_shim.daemon.stored_document import StoredDocument
from swdriver_shim.decider.decider import Decider
from swdriver_shim.desired import ModelSpec, parse

SECRET = b"s" * 32
DOCUMENT = json.dumps(
    {
        "generation": 3,
        "driver": "job7",
        "secret": base64.b64encode(SECRET).decode(),
        "model": {"name": "llama", "groups": [{"name": "full", "bytes_per_token": [16]}]},
        "homes": [{"group": "full", "index": 0, "address": "unix:/nowhere", "shard": "s"}],
        "orgs": [{"name": "acme", "secret": base64.b64encode(b"a" * 32).decode()}],
    }
).encode()


def test_a_document_is_sealed_and_only_its_token_opens_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = StoredDocument(tmp_path / "state" / "desired.json", "the token")
    assert stored.read() is None
    stored.write(DOCUMENT)
    content = stored.path.read_bytes()
    assert stored.path.stat().st_mode & 0o077 == 0
    for readable in (b"acme", b"llama", SECRET, base64.b64encode(SECRET)):
        assert readable not in content
    found = stored.read()
    assert found
    assert found.document == parse(DOCUMENT)
    assert StoredDocument(stored.path, "another token").read() is None
    assert "sealed with another token, or is damaged" in caplog.text
    stored.path.write_bytes(content[:-1])
    assert stored.read() is None
    assert StoredDocument(tmp_path / "state" / "followed", "the token").read() is None
    stored.path.rename(tmp_path / "state" / "followed")
    assert StoredDocument(tmp_path / "state" / "followed", "the token").read() is None, "another's"


def test_a_document_that_somebody_wrote_by_hand_is_read(tmp_path: Path) -> None:
    (tmp_path / "desired.json").write_bytes(DOCUMENT)
    found = StoredDocument(tmp_path / "desired.json", "the token").read()
    assert found
    assert found.document.generation == 3


def test_an_engine_follows_documents_of_its_own_model_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = parse(DOCUMENT).model
    first = Shim("job7", tmp_path, token="t" * 20, model=model)
    first.start()
    assert first.desired is None
    assert not first.is_ready
    first.set_desired(DOCUMENT)
    assert first.has_driver
    first.stop()
    again = Shim("job7", tmp_path, token="t" * 20, model=model)
    again.start()
    assert again.observed()["document_at"] > 0
    assert again.has_driver, "it serves with what it was told last, whether the console is there or not"
    again.stop()
    other = Shim("job7", tmp_path, token="t" * 20, model=ModelSpec(name="other", groups=model.groups))
    other.start()
    assert not other.has_driver
    assert ANOTHER_MODEL in caplog.text
    with pytest.raises(Conflict, match="end its job"):
        other.set_desired(DOCUMENT)
    with pytest.raises(Invalid):
        other.set_desired(b"{")
    other.stop()


def test_a_copied_state_directory_is_not_the_document_of_another_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = parse(DOCUMENT).model
    StoredDocument(tmp_path / "desired.json", "t" * 20).write(DOCUMENT)
    copied = Shim("job8", tmp_path, token="t" * 20, model=model)
    copied.start()
    assert not copied.has_driver, "it would write to the slots of job7"
    assert "It is of driver job7, and this is job8" in caplog.text
    with pytest.raises(Conflict, match="job7"):
        copied.set_desired(DOCUMENT)
    copied.set_desired(DOCUMENT.replace(b"job7", b"job8"))
    assert copied.desired
    copied.stop()


def test_an_older_document_that_is_put_back_brings_nothing_back_that_was_purged(tmp_path: Path) -> None:
    """As from a backup. It holds until the console answers, whose documents are newer."""
    tag = parse(DOCUMENT).orgs[0].tag.hex()
    first = Shim("job7", tmp_path, token="t" * 20)
    first.set_desired(DOCUMENT)
    older = (tmp_path / "desired.json").read_bytes()
    first.ban_tags([tag])
    newer = json.loads(DOCUMENT) | {"generation": 4, "orgs": []}
    first.set_desired(json.dumps(newer).encode())
    first.stop()
    (tmp_path / "desired.json").write_bytes(older)
    again = Shim("job7", tmp_path, token="t" * 20)
    again.start()
    assert again.desired
    assert (again.desired.generation, again.desired.orgs) == (3, ())
    again.set_desired(json.dumps(newer).encode())
    assert again.observed()["generation"] == 4
    again.stop()


def test_no_request_comes_before_the_policies_of_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine asks all the time, also while its first document is applied in another thread."""
    seen = []
    set_policies = Decider.set_policies

    def watched(self: Decider, *given: Any) -> None:
        seen.append(shim.has_driver)
        set_policies(self, *given)

    monkeypatch.setattr(Decider, "set_policies", watched)
    StoredDocument(tmp_path / "notes" / "followed", "t" * 20).write(DOCUMENT)
    shim = Shim("job7", tmp_path, token="t" * 20)
    shim.set_desired(DOCUMENT.replace(b'"generation": 3', b'"generation": 4'))
    # What an earlier process followed, by which columns are restored, too; and this document.
    assert seen == [False, False, False]
    assert shim.has_driver
    shim.stop()
