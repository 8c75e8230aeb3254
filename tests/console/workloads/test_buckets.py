"""Credentials for buckets: who stores, sees and uses them, and that nobody reads them."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import obstore
import pytest
from django.db import connection
from django.test import Client
from obstore.store import S3Store

from console.accounts.models import User
from console.accounts.principal import SYSTEM
from console.audit.models import AuditEntry
from console.environment import PROJECT
from console.workloads import buckets, changes
from console.workloads.leader import rendering
from console.workloads.models import Bucket, Workload
from console.workloads.spec import Place, place_of
from tests.conftest import People
from tests.console.sessions.fleets import make_fleet
from tests.console.workloads.buckets import CREDENTIALS, SECRET, of, stored, told
from tests.console.workloads.workloads import an_instance, locked, make_workload, wanted
from tests.kvss_agent.tier2 import bucket as s3
from tests.workload_manager.managers import manager
from workload_manager.spec import WeightsSpec

URL = "/api/v1/buckets"
TOKEN = "zqx-session-token"
MODELS: dict[str, Any] = {"weights": {"source": "s3://models/chat"}}
WITHOUT_CACHE: dict[str, Any] = {"cache": {"enabled": False}, "boxes_per_replica": 0}


def send(client: Client, method: str, path: str, status: int, match: str = "*", **body: Any) -> Any:
    """What it answers, in which no credentials are."""
    response = client.generic(
        method,
        f"{URL}{path}",
        data=json.dumps(body) if body else "",
        content_type="application/json",
        headers={"If-Match": match, "Idempotency-Key": str(uuid4())},
    )
    assert response.status_code == status, response.content
    assert b"zqx" not in response.content
    assert "zqx" not in str(response.headers)
    return response.json() if response.content else None


def test_credentials_are_stored_replaced_and_deleted_and_never_shown(
    people: People, api_of: Callable[[User], Client], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    admin = api_of(people.org_admin)
    body = {"name": "models", "org": "acme", "region": "eu-central-1", "session_token": TOKEN}
    assert send(admin, "POST", "?validate_only=true", 201, **body, **CREDENTIALS)["name"] == "models"
    assert not Bucket.objects.exists()
    made = send(admin, "POST", "", 201, **body, **CREDENTIALS)
    path = f"/{made['id']}"
    assert (made["org"], made["endpoint"], made["shared"], made["version"]) == ("acme", "", False, 1)
    shown = send(api_of(people.viewer), "GET", path, 200)
    assert shown.keys() == made.keys()
    assert send(api_of(people.viewer), "GET", "?org=acme", 200)["items"] == [shown]
    workload = of(people.acme)
    region = {"region": "eu-central-1"}
    assert told(workload) == {**CREDENTIALS, "session_token": TOKEN, **region}
    send(admin, "POST", "", 422, **body, **CREDENTIALS)
    fresh = {"access_key_id": "zqx-2", "secret_access_key": "zqx-secret-2"}
    send(admin, "PUT", path, 412, match='"7"', **fresh)
    replaced = send(admin, "PUT", path, 200, match='"1"', **fresh)
    assert (replaced["version"], replaced["region"]) == (2, "")
    assert told(workload) == fresh, "what a field is not said for is not kept"
    refused = send(admin, "DELETE", path, 409)
    assert "s3://models are used by talk. Change these workloads first." in refused["detail"]
    workload.delete()
    send(admin, "DELETE", path, 204)
    assert not Bucket.objects.exists()
    actions = ["bucket.add", "bucket.replace", "bucket.delete"]
    entries = AuditEntry.objects.filter(object_type="bucket").order_by("pk")
    assert [one.action for one in entries] == actions
    assert (entries[1].after or {})["credentials"] == "replaced"
    assert "zqx" not in caplog.text


def test_the_database_has_no_credentials_in_the_open(
    people: People, api_of: Callable[[User], Client]
) -> None:
    """Every row of every table, as a dump has it: also of answers, audit, events and instances."""
    admin = api_of(people.org_admin)
    body = {"name": "models", "org": "acme", "session_token": TOKEN, **CREDENTIALS}
    made = send(admin, "POST", "", 201, **body)
    send(admin, "PUT", f"/{made['id']}", 200, **CREDENTIALS)
    instance = an_instance(of(people.acme))
    instance.secrets = rendering.instance_secrets(instance, "key")
    instance.save()
    assert SECRET in str(instance.secrets)
    found = 0
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            name = connection.ops.quote_name(table)
            cursor.execute(f"SELECT one::text FROM {name} one")  # noqa: S608 - a name of our own
            for (row,) in cursor.fetchall():
                found += '"models"' in row or ",models," in row
                assert "zqx" not in row, table
    assert found, "it has looked at the right database"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": "models/chat"}, "name"),
        ({"name": "M"}, "name"),
        ({"name": "models\n"}, "name"),
        ({"endpoint": "ftp://zqx.example"}, "endpoint"),
        ({"endpoint": "https://user@zqx.example"}, "endpoint"),
        ({"region": "zqx.example/#"}, "region"),  # of https://s3.REGION.amazonaws.com
        ({"region": "eu\n"}, "region"),
        ({"secret_access_key": "zqx with blanks"}, "secret_access_key"),
        ({"access_key_id": ""}, "access_key_id"),
        ({"session_token": "zqx\n"}, "session_token"),
        ({"shared": True}, "shared"),
    ],
)
def test_what_can_not_be_is_refused_without_being_repeated(
    people: People, api_of: Callable[[User], Client], change: dict[str, Any], field: str
) -> None:
    body = {"name": "models", "org": "acme", **CREDENTIALS, **change}
    refused = send(api_of(people.org_admin), "POST", "", 422, **body)
    assert [one["pointer"] for one in refused["errors"]] == [f"/body/{field}"]
    if field in ("secret_access_key", "access_key_id", "session_token", "shared"):
        name, secrets = body.pop("name"), {one: body.pop(one, "") for one in buckets.SECRETS}
        shared = bool(body.get("shared"))
        with pytest.raises(Exception, match=r"^(?!.*zqx)") as failure:  # the same for the page
            buckets.add(SYSTEM, "acme", name=name, secrets=secrets, shared=shared)
        assert field in failure.value.message_dict  # type: ignore[attr-defined]


# Whose are used


def rows(*of: tuple[int | None, str, bool]) -> list[Bucket]:
    return [
        Bucket(pk=number, org_id=org, name="models", endpoint=endpoint, shared=shared)
        for number, (org, endpoint, shared) in enumerate(of)
    ]


ANOTHER = "https://s3.example.com"


@pytest.mark.parametrize(
    ("known", "org", "used"),
    [
        ([], 1, None),
        ([(1, "", False)], 1, 0),
        ([(2, "", False)], 1, None),  # another org's
        ([(2, "", False)], None, None),  # and the platform has nothing of it either
        ([(None, "", False)], 1, None),  # the platform's own
        ([(None, "", True)], 1, 0),
        ([(None, "", False)], None, 0),
        ([(None, "", True), (1, "", False)], 1, 1),
        ([(None, "", True), (1, "", False)], 2, 0),
        ([(1, ANOTHER, False)], 1, None),  # of another server
        ([(None, ANOTHER, True), (2, "", False)], 1, None),
    ],
)
def test_an_owner_s_own_go_first_then_those_that_the_platform_shares(
    known: list[tuple[int | None, str, bool]], org: int | None, used: int | None
) -> None:
    found = buckets.chosen(rows(*known), org, Place("", "models"))
    assert (found.pk if found else None) == used


@pytest.mark.parametrize(
    ("source", "endpoint", "place"),
    [
        ("s3://models", None, ("", "models")),
        ("s3://models/a/b", None, ("", "models")),
        ("s3://models.old/a", None, ("", "models.old")),
        ("s3:///models", None, ("", "")),
        ("/mnt/s3://models", None, None),
        ("s3://models/a", "https://S3.Example.com/", (ANOTHER, "models")),
        ("s3://models/a", "https://s3.example.com:9000/Path/", (f"{ANOTHER}:9000/Path", "models")),
    ],
)
def test_a_source_names_a_bucket_of_a_server(
    source: str, endpoint: str | None, place: tuple[str, str] | None
) -> None:
    assert place_of(WeightsSpec(source=source, endpoint=endpoint)) == place


def test_a_tenant_neither_sees_nor_uses_what_others_have(
    people: People, api_of: Callable[[User], Client]
) -> None:
    theirs, platforms = stored(people.acme), stored(None)
    hostile, platform = api_of(people.stranger), api_of(people.platform_admin)
    for one in (theirs, platforms):
        path = f"/{one.pk}"
        for method, body in (("GET", {}), ("PUT", CREDENTIALS), ("DELETE", {})):
            send(hostile, method, path, 404, **body)
            send(hostile, method, "/7000000", 404, **body)
    assert send(hostile, "GET", "", 200)["items"] == []
    assert send(hostile, "GET", "?org=acme", 200)["items"] == []
    send(hostile, "POST", "", 404, name="other", org="acme", **CREDENTIALS)
    send(hostile, "POST", "", 403, name="other", **CREDENTIALS)
    # A workload that names them gets nothing, and its plan says what it would say of any bucket.
    workload = of(people.globex)
    assert told(workload) == {}
    said = buckets.sentence(people.globex, workload.spec().weights)
    assert said == buckets.sentence(people.globex, WeightsSpec(source="s3://no/where")).replace(
        "s3://no", "s3://models"
    )
    # Nor does one of the platform that the org may use.
    Bucket.objects.filter(pk=platforms.pk).delete()
    assert told(of(None, "common")) == {}
    platforms = stored(None)
    # Who stores their own for the same bucket is told nothing of others', and has their own.
    own = {"access_key_id": "zqx-globex", "secret_access_key": "zqx-globex-secret"}
    send(hostile, "POST", "", 201, name="models", org="globex", **own)
    assert told(workload) == own
    assert told(of(people.acme, "chat")) == CREDENTIALS
    # What the platform shares is seen and used, and not changed.
    send(platform, "PUT", f"/{platforms.pk}", 200, shared=True, **CREDENTIALS)
    assert send(hostile, "GET", f"/{platforms.pk}", 200)["shared"] is True
    send(hostile, "PUT", f"/{platforms.pk}", 403, **CREDENTIALS)
    send(hostile, "DELETE", f"/{platforms.pk}", 403)
    assert told(workload) == own
    assert len(send(platform, "GET", "", 200)["items"]) == 3


def test_no_org_keeps_the_platform_from_taking_back_what_it_shares(
    people: People, api_of: Callable[[User], Client]
) -> None:
    shared = stored(None, shared=True)
    workload = of(people.globex)
    assert told(workload) == CREDENTIALS
    platform = api_of(people.platform_admin)
    refused = send(platform, "DELETE", f"/{shared.pk}", 409)
    assert "are used by talk. Stop sharing it, or change these workloads first." in refused["detail"]
    send(platform, "PUT", f"/{shared.pk}", 200, **CREDENTIALS)
    assert told(workload) == {}
    send(platform, "DELETE", f"/{shared.pk}", 204)


def test_a_plan_says_whose_credentials_are_used(
    people: People, api_of: Callable[[User], Client]
) -> None:
    make_fleet(boxes=4)
    admin = api_of(people.org_admin)

    def plan(**more: Any) -> Any:
        spec = {"name": "talk", "model": "m", "org": "acme", "tokens_max": 9, **MODELS, **more}
        return admin.post(
            "/api/v1/workloads?validate_only=true",
            {"spec": {**spec, "engine": {"kind": "emulator"}}},
            content_type="application/json",
            headers={"Idempotency-Key": str(uuid4())},
        ).json()

    public = plan()
    assert public["weights"] == (
        "There are no credentials for s3://models that a workload of acme may use: "
        "the bucket has to be public."
    )
    shared = stored(None, shared=True)
    assert plan()["weights"] == "Weights are read with the platform's credentials for s3://models."
    stored(people.acme)
    own = plan()
    assert own["weights"] == "Weights are read with acme's credentials for s3://models."
    assert own["plan_token"] != public["plan_token"], "who has seen the one has not seen the other"
    assert plan(weights=None)["weights"] == ""
    assert shared.pk != Bucket.objects.latest("pk").pk


def test_other_credentials_are_for_the_next_instance_and_compile_job(people: People) -> None:
    make_fleet(boxes=4)
    workload = make_workload(org="acme", **MODELS)
    revision = workload.revisions.get()
    public = rendering.compile_name(revision)
    running = an_instance(workload)
    bucket = stored(people.acme)
    first = rendering.compile_name(revision)
    changes.restart(SYSTEM, locked(SYSTEM))
    buckets.replace(SYSTEM, bucket, secrets={**CREDENTIALS, "session_token": TOKEN})
    assert len({public, first, rendering.compile_name(revision)}) == 3, "what was denied is tried again"
    assert told(workload)["session_token"] == TOKEN
    running.refresh_from_db()
    assert running.goal == "run", "it is not restarted for it"
    # Also the revision that is rolled back to keeps its bucket.
    Workload.objects.update(stable=revision)
    changes.update(SYSTEM, locked(SYSTEM), wanted(org="acme"))
    assert buckets.users_of([bucket]) == {bucket.pk: ["talk"]}


# A private bucket


@pytest.fixture(scope="module")
def server() -> Iterator[s3.Server]:
    with s3.running() as server:
        yield server


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_weights_of_a_private_bucket_reach_a_manager_and_a_compile_job(
    people: People, server: s3.Server, tmp_path: Path
) -> None:
    """The server checks signatures. With a key of another bucket it is denied."""
    for name in ("models", "others"):
        server.make_bucket(name)
    store = S3Store(
        "models",
        endpoint=server.endpoint,
        region="us-east-1",
        access_key_id="any",
        secret_access_key="any",
        client_options={"allow_http": True},
    )
    for name in ("config.json", "model.safetensors"):
        obstore.put(store, f"chat/{name}", b"{}", use_multipart=False)
    key, secret = server.make_key("models", "models")
    other_key, other_secret = server.make_key("others", "others")
    server.want_keys()
    folder = tmp_path / "talk-0-r1-0000"
    engine = {
        "kind": "command",
        "command": [
            *(sys.executable, "-m", "tests.workload_manager.tiny_engine"),
            *("{port}", str(folder), "{weights}"),
        ],
        "environment": {"PYTHONPATH": str(PROJECT)},
        "emulator": None,
    }
    weights = {"source": "s3://models/chat", "endpoint": f"{server.endpoint}/"}
    workload = make_workload(org="acme", engine=engine, weights=weights, **WITHOUT_CACHE)
    instance = an_instance(workload)
    spec = json.loads(rendering.instance_spec(workload, instance))

    def secrets() -> dict[str, Any]:
        return dict(json.loads(rendering.instance_secrets(instance, "k" * 32)))

    def compiled() -> dict[str, Any]:
        job = tmp_path / uuid4().hex
        job.mkdir()
        (job / "spec.json").write_bytes(rendering.compile_spec(workload, instance.revision))
        by_name = rendering.compile_secrets(instance.revision)
        raw = {name: json.loads(value) for name, value in by_name.items()}
        (job / "secrets.json").write_text(json.dumps(raw))
        subprocess.run(
            [
                *(sys.executable, "-m", "workload_manager", "compile", "--folder", str(job)),
                *("--store", str(tmp_path / "artifacts")),
            ],
            check=False,
            timeout=60,
            cwd=PROJECT,
        )
        made = job / "result.json"
        found = made if made.exists() else job / "error.json"
        return dict(json.loads(found.read_text()))

    bucket = buckets.add(
        SYSTEM,
        "acme",
        name="models",
        endpoint=server.endpoint,
        secrets={"access_key_id": other_key, "secret_access_key": other_secret},
    )
    assert compiled()["reason"] == "Denied"
    with manager(tmp_path, instance.name, secrets=secrets(), **spec) as one:
        status = one.wait_for("pending", "WeightsDenied")
        assert "s3://models/chat may not be read" in status["sentence"]
        assert other_secret not in one.log + str(status)
    buckets.replace(SYSTEM, bucket, secrets={"access_key_id": key, "secret_access_key": secret})
    assert "sha256" in compiled()
    with manager(tmp_path, instance.name, secrets=secrets(), **spec) as one:
        one.wait_for("ready")
        assert secret not in one.log
    [config] = (tmp_path / "state" / "weights").rglob("config.json")
    assert config.read_bytes() == b"{}"
