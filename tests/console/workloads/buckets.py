"""Buckets with credentials, workloads that read from them, and what their managers are told."""

from __future__ import annotations

from typing import Any

import msgspec

from console.accounts.principal import SYSTEM
from console.orgs.models import Org
from console.workloads import buckets, changes
from console.workloads.leader import rendering
from console.workloads.models import Bucket, Workload
from tests.console.workloads.workloads import a_workload, an_instance, wanted
from workload_manager.spec import Secrets

KEY = "AKIA-zqx-key"  # no answer, page or table has what these begin with
SECRET = "zqx/secret+of+the+bucket"
CREDENTIALS = {"access_key_id": KEY, "secret_access_key": SECRET}


def stored(org: Org | None, secret: str = SECRET, **more: Any) -> Bucket:
    secrets = {**CREDENTIALS, "secret_access_key": secret}
    slug = org.slug if org else None
    return buckets.add(SYSTEM, slug, **{"name": "models", "secrets": secrets, **more})


def told(workload: Workload) -> dict[str, str]:
    """What the manager of its next instance is told, which its compile job is told, too."""
    instance = an_instance(workload)
    revision = instance.revision
    found = msgspec.json.decode(rendering.instance_secrets(instance, "key"), type=Secrets).weights
    job = rendering.compile_secrets(revision)
    assert msgspec.json.decode(job.get("weights", b"{}"), type=dict[str, str]) == found
    return found


def of(org: Org | None, name: str = "talk", **weights: Any) -> Workload:
    """A workload with weights of a bucket."""
    workload = a_workload(org, name)
    said = {"source": "s3://models/chat", **weights}
    change = wanted(name=name, org=org.slug if org else None, weights=said)
    changes._new_revision(SYSTEM, workload, change.template, note="")
    return workload
