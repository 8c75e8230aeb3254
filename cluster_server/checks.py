"""What requests may say: names, sizes and counts. Pure."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from cluster_server.proto import cluster_pb2 as pb
from telemetry.decoder import Limits, Malformed, decode, excerpt
from telemetry.units import size

NAME_CHARACTERS_MAX: Final = 63  # as a label in Kubernetes
JOB_CHARACTERS_MAX: Final = 200
INSTANCES_MAX: Final = 512  # of a workload
BOXES_MAX: Final = 4096
SPEC_BYTES_MAX: Final = 1 << 20
SECRETS_BYTES_MAX: Final = 64 << 10
SECRETS_MAX: Final = 64
DAY_SECONDS: Final = 24 * 3600
SECONDS_MAX: Final = 7 * DAY_SECONDS
MESSAGE_BYTES_MAX: Final = 16 << 20
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_JOB: Final = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_OBJECT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
_SPEC: Final = Limits(SPEC_BYTES_MAX)


class Wrong(Exception):
    """What is wrong with a request, in a sentence."""


def check_apply(request: pb.ApplyRequest) -> None:
    """Raises Wrong."""
    check_name("workload", request.workload)
    if request.generation < 1:
        raise Wrong("A generation is 1 or more.")
    if len(request.instances) > INSTANCES_MAX:
        raise Wrong(f"A workload has at most {INSTANCES_MAX} instances.")
    if twice := _repeated(one.name for one in request.instances):
        raise Wrong(f"There are two entries for instance {twice}.")
    for one in request.instances:
        check_name("instance", one.name)
        with _named(f"Instance {one.name}"):
            _check_document(one.spec)
            _check_secrets(one.secrets)
            _check_boxes(one.boxes)
            if one.goal not in (pb.RUN, pb.RELEASE_CACHE, pb.DRAIN):
                raise Wrong("It has no goal: RUN, RELEASE_CACHE or DRAIN.")
            if not 1 <= one.grace_seconds <= SECONDS_MAX:
                raise Wrong(f"Its grace period has 1 to {SECONDS_MAX} seconds.")


def check_job(spec: pb.JobSpec) -> None:
    """Raises Wrong."""
    check_job_name(spec.name)
    with _named(f"Job {spec.name}"):
        if spec.kind not in (pb.COMPILE, pb.EXECUTE):
            raise Wrong("It has no kind: COMPILE or EXECUTE.")
        _check_document(spec.spec)
        _check_secrets(spec.secrets)
        _check_boxes(spec.boxes)
        if spec.deadline_seconds > SECONDS_MAX:
            raise Wrong(f"Its deadline has at most {SECONDS_MAX} seconds.")


def check_lock(request: pb.LockRequest) -> None:
    """Raises Wrong."""
    if not _OBJECT.fullmatch(request.holder):
        raise Wrong(
            f"{_shown(request.holder)} is no name of a holder: 1 to 200 letters, digits and . _ : -"
        )
    if not request.boxes:
        raise Wrong("There are no boxes in the request.")
    _check_boxes(request.boxes)


def check_name(what: str, name: str) -> None:
    """Raises Wrong."""
    if len(name) > NAME_CHARACTERS_MAX or not _NAME.fullmatch(name):
        raise Wrong(
            f"{_shown(name)} is no name of a{'n' if what[0] in 'aeiou' else ''} {what}: 1 to "
            f"{NAME_CHARACTERS_MAX} small letters, digits and -, with no - at either end."
        )


def check_job_name(name: str) -> None:
    """Raises Wrong."""
    if len(name) > JOB_CHARACTERS_MAX or not _JOB.fullmatch(name):
        raise Wrong(
            f"{_shown(name)} is no name of a job: 1 to {JOB_CHARACTERS_MAX} small letters, digits, . "
            "and -, with a letter or a digit at either end."
        )


def is_object_name(name: str) -> bool:
    """Of a box, a holder or a secret."""
    return _OBJECT.fullmatch(name) is not None


def _check_document(raw: bytes) -> None:
    try:
        decode(raw, dict[str, Any], _SPEC)
    except Malformed as error:
        raise Wrong(f"Its specification is no JSON object: {error}.") from None


def _check_secrets(secrets: Mapping[str, bytes]) -> None:
    """What is wrong with one says nothing of its value."""
    if len(secrets) > SECRETS_MAX or sum(map(len, secrets.values())) > SECRETS_BYTES_MAX:
        raise Wrong(f"It has at most {SECRETS_MAX} secrets, of {size(SECRETS_BYTES_MAX)} together.")
    for name, value in secrets.items():
        if not _OBJECT.fullmatch(name):
            raise Wrong(f"{_shown(name)} is no name of a secret.")
        try:
            decode(value, object, _SPEC)
        except Malformed:
            raise Wrong(f"Its secret {name} is no JSON value.") from None


def _check_boxes(boxes: Iterable[str]) -> None:
    names = list(boxes)
    if len(names) > BOXES_MAX:
        raise Wrong(f"It has at most {BOXES_MAX} boxes.")
    for name in names:
        if not _OBJECT.fullmatch(name):
            raise Wrong(f"{_shown(name)} is no name of a box: 1 to 200 letters, digits and . _ : -")
    if twice := _repeated(names):
        raise Wrong(f"Box {twice} is in it twice.")


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except Wrong as error:
        raise Wrong(f"{what}: {error}") from None


def _repeated(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _shown(name: str) -> str:
    return f"“{excerpt(name, 80)}”"
