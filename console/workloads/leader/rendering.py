"""What managers and compile jobs are told, made of a revision."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import msgspec
from django.conf import settings
from django.utils import timezone

from cluster_server.proto import cluster_pb2 as pb
from console.accounts.principal import SYSTEM
from console.fleet.membership import tokens
from console.fleet.models import Box, ProcessKind
from console.workloads import buckets, tokenizers
from console.workloads.models import Instance, Revision, Workload
from console.workloads.spec import Template
from telemetry.decoder import DOCUMENT, decode
from workload_manager.artifact import address
from workload_manager.compiler.spec import CompileSpec
from workload_manager.spec import CacheSpec, InstanceSpec, Secrets, TokenizerSpec, encode

GRACE_SECONDS: Final = 60
JOIN_HOURS: Final = 24


def replica_name(workload: Workload, ordinal: int) -> str:
    return f"{workload.name}-{ordinal}"


def home_name(workload: Workload, epoch: int, ordinal: int) -> str:
    """Of a driver, and of its job."""
    return f"{workload.name}-{epoch}-{ordinal}"


def instance_spec(workload: Workload, instance: Instance) -> bytes:
    """For its manager."""
    template = instance.revision.template_read()
    return encode(
        InstanceSpec(
            workload=workload.name,
            replica=instance.replica,
            instance=instance.name,
            revision=instance.revision.number,
            model=workload.model,
            engine=template.engine,
            tokens_max=template.tokens_max,
            weights=template.weights,
            tokenizer=_tokenizer(template, instance),
            artifact=instance.revision.artifact,
            cache=_cache(instance) if template.cache.enabled else None,
            boxes=tuple(instance.boxes),
            box_memory_bytes=_box_memory_bytes(),
            grace_seconds=float(GRACE_SECONDS),
        )
    )


def resources(revision: Revision) -> pb.Resources | None:
    """Limits of each of its instances; None: it has none."""
    limits = revision.template_read().limits
    if limits.memory_bytes is None and limits.cpu_cores is None:
        return None
    cpu_millis = round(1000 * (limits.cpu_cores or 0))
    return pb.Resources(memory_bytes=limits.memory_bytes or 0, cpu_millis=cpu_millis)


def _tokenizer(template: Template, instance: Instance) -> TokenizerSpec | None:
    source = template.tokenizer
    if source is None:
        return None
    url = tokenizers.url(source.sha256, instance.name) if source.sha256 else None
    return TokenizerSpec(folder=tokenizers.folder_of(source), sha256=source.sha256, url=url)


class _Addresses(msgspec.Struct):
    console: str
    telemetry: str | None = None


class _Told(msgspec.Struct):
    """What is looked at of a specification, which an earlier version of Tidegate may have written."""

    cache: _Addresses | None = None


def is_outdated(instance: Instance) -> bool:
    """Whether its driver was told of addresses that are others by now. It can't join there."""
    if not settings.PUBLIC_URL or not instance.spec:
        return False
    told, now = decode(bytes(instance.spec), _Told, DOCUMENT).cache, _cache(instance)
    return told is not None and (told.console, told.telemetry) != (now.console, now.telemetry)


def _cache(instance: Instance) -> CacheSpec:
    return CacheSpec(
        console=settings.PUBLIC_URL,
        driver=instance.driver,
        telemetry=settings.OWN_TELEMETRY_URL,
        plain_console=settings.PUBLIC_URL.startswith("http://"),
    )


def instance_secrets(instance: Instance, api_key: str) -> str:
    """JSON of what only its manager may know, with a join token of its own. Raises Refused."""
    template, token = instance.revision.template_read(), ""
    if template.cache.enabled:
        until = timezone.now() + timedelta(hours=JOIN_HOURS)
        note = f"Instance {instance.name}"
        kind = ProcessKind.DRIVER
        _, token = tokens.issue(
            SYSTEM,
            kind=kind,
            uses=1,
            expires_at=until,
            note=note,
            name=instance.driver,
            workload=instance.workload.name,
        )
    credentials = buckets.credentials_for(instance.workload.org_id, template.weights)
    made = Secrets(join_token=token, api_key=api_key, weights=credentials)
    return msgspec.json.encode(made).decode()


def join_token_id(secrets: str) -> str:
    """Of the join token among these secrets; empty if there is none."""
    token = msgspec.convert(_plain(secrets), Secrets).join_token if secrets else ""
    found = tokens.TOKEN.fullmatch(token)
    return found.group(1) if found else ""


def secrets_by_name(secrets: str) -> dict[str, bytes]:
    """As the Cluster Server takes them: each a JSON value."""
    return {name: msgspec.json.encode(value) for name, value in _plain(secrets).items()}


def _plain(secrets: str) -> dict[str, Any]:
    return decode(secrets, dict[str, Any]) if secrets else {}


def compile_name(revision: Revision, attempt: int = 1) -> str:
    """Of its job; one that others have ended is followed by the next attempt. What has failed is
    compiled again for another revision, also for one that is equal, when the workload is restarted, and
    with other credentials for the bucket of its weights. A database that was restored gives numbers and
    keys again: so when it was made is in the name."""
    workload, made_at = revision.workload, int(1000 * revision.made_at.timestamp())
    name = f"compile-{workload.name}-r{revision.number}-{made_at}-{workload.restarts}"
    name += f"-a{attempt}" if attempt > 1 else ""
    bucket = buckets.bucket_for(workload.org_id, revision.template_read().weights)
    return f"{name}-b{bucket.pk}-{bucket.version}" if bucket is not None else name


def compile_secrets(revision: Revision) -> dict[str, bytes]:
    """For its job, as the Cluster Server takes them."""
    found = buckets.credentials_for(revision.workload.org_id, revision.template_read().weights)
    return {"weights": msgspec.json.encode(found)} if found else {}


def _box_memory_bytes() -> int | None:
    """Of the largest box: what has no room there has none anywhere. None if some are not described."""
    of_each = set(Box.objects.values_list("memory_bytes", flat=True))
    return max((one for one in of_each if one), default=None) if None not in of_each else None


def compile_spec(workload: Workload, revision: Revision) -> bytes:
    """For a compile job (`workload_manager.compiler`)."""
    template = revision.template_read()
    return encode(
        CompileSpec(
            model=workload.model,
            engine=template.engine,
            tokens_max=template.tokens_max,
            boxes=max(1, workload.boxes_per_replica),
            revision=template.weights.revision if template.weights else "",
            weights=template.weights,
            box_memory_bytes=_box_memory_bytes(),
            has_cache=template.cache.enabled,
        ).bare
    )


def artifact_address(workload: Workload, revision: Revision) -> str | None:
    """Of what its compile job makes; None where that depends on the files of its weights."""
    told = decode(compile_spec(workload, revision), CompileSpec)
    return None if told.weights else address(told.inputs({}))
