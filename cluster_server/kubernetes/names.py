"""Names of objects, labels and annotations. Pure."""

from __future__ import annotations

import hashlib
import re
from typing import Final

from cluster_server.kubernetes.api import GROUP

LABEL_CHARACTERS_MAX: Final = 63
OBJECT_NAME_CHARACTERS_MAX: Final = 253
OBJECT_CHARACTERS_MAX: Final = 230  # less what is put before and behind
DIGEST_CHARACTERS: Final = 16
_LABEL: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_OBJECT: Final = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")

PART: Final = f"{GROUP}/part"
WORKLOAD: Final = f"{GROUP}/workload"
INSTANCE: Final = f"{GROUP}/instance"
JOB: Final = f"{GROUP}/job"
NAME: Final = f"{GROUP}/name"  # an annotation: names of jobs can be longer than a label
DIGEST: Final = f"{GROUP}/digest"
GRACE: Final = f"{GROUP}/grace-seconds"
POD_UID: Final = f"{GROUP}/pod-uid"
OUTCOME: Final = f"{GROUP}/outcome"
SUBMITTED_AT: Final = f"{GROUP}/submitted-at"
SIGNATURE: Final = f"{GROUP}/signature"
FINALIZER: Final = f"{GROUP}/wsjob"
BOX_PREFIX: Final = f"box.{GROUP}/"
BY_HAND: Final = "wsjob/"  # no job that is submitted by gRPC has such a name


def label(text: str) -> str:
    """As the value of a label, or as a name behind a prefix: itself, or its beginning and a digest."""
    if len(text) <= LABEL_CHARACTERS_MAX and _LABEL.fullmatch(text):
        return text
    return _shortened(text, LABEL_CHARACTERS_MAX)


def object_name(text: str) -> str:
    """As the name of an object: itself, or its beginning and a digest."""
    if len(text) <= OBJECT_CHARACTERS_MAX and _OBJECT.fullmatch(text):
        return text
    return _shortened(text, OBJECT_CHARACTERS_MAX)


def service_name(workload: str) -> str:
    """That of a service begins with a letter, and has no dots."""
    named = workload if workload[0].isalpha() else f"w-{workload}"
    return named if len(named) <= LABEL_CHARACTERS_MAX else _shortened(named, LABEL_CHARACTERS_MAX)


def box_label(box: str) -> str:
    """Which nodes carry: those that reach the box."""
    return BOX_PREFIX + label(box)


def workload_map(workload: str) -> str:
    return f"workload-{workload}"


def instance_map(instance: str) -> str:
    """Of its ConfigMap and of its Secret. Its pod is called as it is."""
    return f"instance-{instance}"


def is_object(text: str) -> bool:
    return len(text) <= OBJECT_NAME_CHARACTERS_MAX and _OBJECT.fullmatch(text) is not None


def made_by_hand(wsjob: str) -> str:
    """The name of a job that was not submitted, by that of its object."""
    return f"{BY_HAND}{wsjob}"


def wsjob(job: str) -> str:
    """The name of the object of a job."""
    return job.removeprefix(BY_HAND) if job.startswith(BY_HAND) else object_name(job)


def job_map(job: str) -> str:
    """Of the ConfigMap and the Secret of a job that was submitted by gRPC."""
    return f"wsjob-{object_name(job)}"


def job_key(wsjob: str) -> str:
    """Here and below: `wsjob` is the name of the object."""
    return f"wsjob-{object_name(wsjob)}-key"


def job_pod(wsjob: str) -> str:
    return f"wsjob-{object_name(wsjob)}-run"


def job_result(wsjob: str) -> str:
    return f"wsjob-{object_name(wsjob)}-result"


def _shortened(text: str, most: int) -> str:
    digest = hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]
    kept = re.sub(r"[^A-Za-z0-9-]+", "-", text)[: most - DIGEST_CHARACTERS - 1].strip("-")
    return f"{kept}-{digest}" if kept else digest
