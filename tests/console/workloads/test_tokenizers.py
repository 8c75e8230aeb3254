"""Tokenizers that are uploaded, named by workloads, fetched by managers and deleted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
import pytest
from django.core.exceptions import ValidationError
from django.test import Client
from django.utils import timezone

from console.accounts.models import User
from console.demo import tokenizer as demo
from console.workloads import changes, tokenizers
from console.workloads.leader import rendering
from console.workloads.models import Instance, Tokenizer
from console.workloads.spec import Wrong
from tests.conftest import People
from tests.console.sessions.fleets import make_fleet
from tests.console.workloads.workloads import a_workload, an_instance, locked, make_workload, wanted
from tests.workload_manager.tokenizers.archives import FILES, gzipped, tarred, zipped
from workload_manager.spec import InstanceSpec
from workload_manager.tokenizers import TokenizerStore

URL = "/api/v1/tokenizers"


@pytest.fixture(autouse=True)
def folder(settings: Any, tmp_path: Path) -> Path:
    settings.TOKENIZERS = tmp_path / "tokenizers"
    return tmp_path / "tokenizers"


def upload(client: Client, archive: bytes, status: int = 201, query: str = "name=bytes&org=acme") -> Any:
    response = client.post(f"{URL}?{query}", archive, content_type="application/octet-stream")
    assert response.status_code == status, response.content
    return response.json()


def delete(client: Client, number: int, status: int = 204) -> Any:
    response = client.delete(f"{URL}/{number}", headers={"Idempotency-Key": str(uuid4())})
    assert response.status_code == status, response.content
    return response.json() if response.content else None


def test_it_is_uploaded_once_and_seen_by_its_org(
    people: People, api_of: Callable[[User], Client], folder: Path
) -> None:
    admin = api_of(people.org_admin)
    made = upload(admin, gzipped(FILES))
    assert (made["name"], made["org"]) == ("bytes", "acme")
    assert made["size_bytes"] == sum(map(len, FILES.values()))
    assert upload(admin, zipped(FILES), 200, "name=other&org=acme") == made  # the same in it
    assert (folder / "sha256" / made["sha256"] / "tokenizer.json").read_bytes() == FILES[
        "tokenizer.json"
    ]
    assert api_of(people.viewer).get(f"{URL}/{made['id']}").json() == made
    assert api_of(people.viewer).get(f"{URL}?org=acme").json()["items"] == [made]
    stranger = api_of(people.stranger)
    assert stranger.get(f"{URL}/{made['id']}").status_code == 404
    assert stranger.get(URL).json()["items"] == []
    shared = upload(api_of(people.platform_admin), tarred(FILES), query="name=shared")
    assert shared["sha256"] == made["sha256"]
    assert stranger.get(URL).json()["items"] == [shared]
    delete(stranger, shared["id"], 403)


def test_what_is_no_tokenizer_is_refused(
    people: People, api_of: Callable[[User], Client], folder: Path, settings: Any
) -> None:
    admin = api_of(people.org_admin)
    refused = upload(admin, tarred({**FILES, "tokenizer.json": b"{}"}), 422)
    assert refused["errors"][0]["pointer"] == "/body/archive"
    upload(admin, b"no archive", 422)
    upload(admin, tarred(FILES), 403, "name=x")  # of the platform
    upload(api_of(people.viewer), tarred(FILES), 403)
    upload(admin, tarred(FILES), 422, "org=acme")
    settings.TOKENIZER_BYTES_MAX = 100
    assert upload(admin, tarred(FILES), 413)["reason"] == "TooLarge"
    assert list(TokenizerStore(folder)) == []


def test_what_is_refused_leaves_no_files(
    people: People, api_of: Callable[[User], Client], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many uploads an admin sends who has no room for them."""
    admin = api_of(people.org_admin)
    kept = upload(admin, tarred(FILES))["sha256"]
    monkeypatch.setattr(tokenizers, "OF_ORG_MAX", 1)
    other = tarred({**FILES, "chat_template.jinja": b"other"})
    assert "There are 1 tokenizers already" in str(upload(admin, other, 422, "name=b&org=acme"))
    assert list(TokenizerStore(folder)) == [kept]
    # Also where the last place is taken by another one meanwhile, and what a killed process has left.
    TokenizerStore(folder).add(other)
    monkeypatch.setattr(tokenizers, "_check_room", no_room_any_more([None]))
    upload(admin, tarred({**FILES, "chat_template.jinja": b"a third"}), 422, "name=c&org=acme")
    assert list(TokenizerStore(folder)) == [kept]


def no_room_any_more(looks: list[None]) -> Callable[[Any], None]:
    """There is room for so many looks."""

    def check(org: Any) -> None:
        if not looks:
            raise ValidationError({"archive": "There is no room."})
        looks.pop()

    return check


def test_people_of_the_platform_see_and_delete_those_of_orgs(
    people: People, api_of: Callable[[User], Client]
) -> None:
    made = upload(api_of(people.org_admin), tarred(FILES))
    platform = api_of(people.platform_admin)
    assert platform.get(URL).json()["items"] == [made]
    delete(platform, made["id"])


def test_an_owner_has_one_upload_checked_at_a_time(
    people: People, api_of: Callable[[User], Client]
) -> None:
    """Each check takes gigabytes, and half a minute of a processor."""
    admin = api_of(people.org_admin)
    with tokenizers.CHECKS.one("acme"):
        assert upload(admin, tarred(FILES), 429)["reason"] == "TooManyAttempts"
        with tokenizers.CHECKS.one("globex"):
            upload(api_of(people.platform_admin), tarred(FILES), 429, "name=x")
    upload(admin, tarred(FILES))


def test_a_workload_names_it_and_brains_and_managers_have_it(
    people: People, api_of: Callable[[User], Client], client: Client, folder: Path, tmp_path: Path
) -> None:
    make_fleet(boxes=4)
    principal = people.principal("org_admin")
    sha256 = upload(api_of(people.org_admin), tarred(FILES))["sha256"]
    workload = make_workload(principal, org="acme", tokenizer={"sha256": sha256})
    assert workload.served is not None
    assert workload.served.tokenizer == str(folder / "sha256" / sha256)
    instance = an_instance(workload)
    spec = rendering.instance_spec(workload, instance)
    told = msgspec.json.decode(spec, type=InstanceSpec).tokenizer
    assert told is not None
    assert told.url is not None
    answer = client.get(urlsplit(told.url).path)
    assert TokenizerStore(tmp_path / "manager").add(answer.content) == sha256 == told.sha256
    assert client.get(urlsplit(told.url).path[:-1]).status_code == 404
    other = urlsplit(told.url).path.replace(instance.name, an_instance(workload, 1).name)
    assert client.get(other).status_code == 404
    Instance.objects.filter(pk=instance.pk).update(ended_at=timezone.now())
    assert client.get(urlsplit(told.url).path).status_code == 404, "its instance has ended"
    changes.update(principal, locked(principal), wanted(org="acme"))
    workload.served.refresh_from_db()
    assert workload.served.tokenizer == ""


@pytest.mark.parametrize("org", ["acme", None])
def test_a_workload_names_only_what_its_owner_has(
    org: str | None, people: People, api_of: Callable[[User], Client]
) -> None:
    make_fleet(boxes=4)
    owner = people.principal("platform_admin")
    archive = tarred(FILES)
    client = api_of(people.platform_admin)
    sha256 = upload(client, archive, query="name=x&org=globex")["sha256"]
    with pytest.raises(Exception, match="There is no tokenizer"):
        make_workload(owner, org=org, tokenizer={"sha256": sha256})
    make_workload(owner, org=org)
    with pytest.raises(Exception, match="There is no tokenizer"):
        changes.update(owner, locked(owner), wanted(org=org, tokenizer={"sha256": sha256}))
    upload(client, archive, query="name=x")
    changes.update(owner, locked(owner), wanted(org=org, tokenizer={"sha256": sha256}))


def test_one_that_a_revision_needs_stays(
    people: People,
    api_of: Callable[[User], Client],
    folder: Path,
    django_capture_on_commit_callbacks: Any,
) -> None:
    admin, archive = api_of(people.org_admin), tarred(FILES)
    made = upload(admin, archive)
    workload = a_workload(people.acme)
    named = wanted(org="acme", tokenizer={"sha256": made["sha256"]})
    changes._new_revision(people.principal("org_admin"), workload, named.template, note="")
    workload.save()
    refused = delete(admin, made["id"], 409)
    assert refused["detail"].startswith(
        "bytes is used by revisions of talk: they may be rolled back to."
    )
    shared = upload(api_of(people.platform_admin), archive, query="name=shared")
    delete(admin, made["id"])  # it has that of the platform
    delete(api_of(people.platform_admin), shared["id"], 409)
    workload.delete()
    assert made["sha256"] in TokenizerStore(folder)
    with django_capture_on_commit_callbacks(execute=True):
        delete(api_of(people.platform_admin), shared["id"])
    assert made["sha256"] not in TokenizerStore(folder)
    assert Tokenizer.objects.count() == 0


def test_a_family_that_is_there_beforehand_is_named_by_anybody(
    people: People, browser_of: Callable[[User], Client], folder: Path
) -> None:
    demo.write(folder / "families" / "demo")
    make_fleet(boxes=4)
    principal = people.principal("org_admin")
    workload = make_workload(principal, org="acme", tokenizer={"family": "demo"})
    there = str(folder / "families" / "demo")
    assert workload.served is not None
    assert workload.served.tokenizer == there
    spec = rendering.instance_spec(workload, an_instance(workload))
    told = msgspec.json.decode(spec, type=InstanceSpec).tokenizer
    assert told is not None
    assert (told.folder, told.sha256) == (there, None)
    with pytest.raises(ValidationError, match="there are: demo"):
        changes.update(principal, locked(principal), wanted(org="acme", tokenizer={"family": "other"}))
    for source in ({"family": "../demo"}, {"family": "demo", "sha256": "a" * 64}):
        with pytest.raises(Wrong):
            wanted(org="acme", tokenizer=source)
    assert "<code>demo</code>" in browser_of(people.viewer).get("/tokenizers/").content.decode()
