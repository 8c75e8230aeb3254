"""The objects of the backend as documents. Pure: of the same request they are the same.

workload-W      ConfigMap: what is desired of a workload, in one object, so that it changes as a whole
W               Service without an address: the endpoints of its instances that are ready
workload-W      PodDisruptionBudget: how many of its instances a drain of nodes leaves alone
instance-I      ConfigMap: the specification of an instance. It owns the Secret and the pod
instance-I      Secret: its secrets, and the key that the server asks its runner with
I               Pod: its manager, below a runner

wsjob J         what is to be done. It owns all others
wsjob-J         ConfigMap and Secret: its specification and its secrets
wsjob-J-key     Secret: the key that the server asks its runner with
wsjob-J-run     Pod
wsjob-J-result  ConfigMap: what it has made
"""

from __future__ import annotations

import base64
import copy
import hashlib
import hmac
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from cluster_server.checks import INSTANCES_MAX, SECONDS_MAX, Wrong, check_name
from cluster_server.kubernetes import names
from cluster_server.kubernetes.api import GROUP, MANAGER, Document
from cluster_server.pod.runner import KEY
from cluster_server.processes.core import CANCEL_SECONDS, Goal
from cluster_server.proto import cluster_pb2 as pb
from telemetry.decoder import Limits, Malformed, decode

MANAGED: Final = {"app.kubernetes.io/managed-by": MANAGER}
CONTAINER: Final = "manager"
RUNNER_PORT: Final = 7070
MANAGER_PORT: Final = 8000
WORK: Final = "/tidegate/work"
INPUTS: Final = "/tidegate/inputs"
SECRETS: Final = "/tidegate/secrets"
SHARED: Final = "/tidegate/shared"
SPEC: Final = "spec.json"
SECRETS_FILE: Final = "secrets.json"
RESULT: Final = "result.json"
INSTANCES: Final = "instances.json"
GENERATION: Final = "generation"
STORED: Final = Limits(2 << 20)  # an object in etcd has less
SECRET_MODE: Final = 0o440
READY_SECONDS: Final = 2  # between two looks of the kubelet
USER: Final = 10001  # of the image
WHOSE: Final = ("runAsUser", "runAsGroup")
OWN: Final = "own"  # the container that gives a pod its folder of the node
POD_SECURITY: Final = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Final = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
NAMED_BY_HAND: Final = "wsjob-secret"  # the part of a Secret that wsjobs made by hand may name


class Known(msgspec.Struct, frozen=True):
    """What the ConfigMap of a workload says of an instance. `digest`: of all that never changes."""

    name: str
    goal: Goal
    grace_seconds: Annotated[int, Meta(ge=1, le=SECONDS_MAX)]
    digest: str


class About(msgspec.Struct, frozen=True):
    """What the ConfigMap of an instance says of it beside its specification."""

    workload: str
    boxes: tuple[str, ...] = ()
    memory_bytes: int = 0
    cpu_millis: int = 0


@dataclass(frozen=True, slots=True)
class Desired:
    """A workload as it is wanted. `version`: of the ConfigMap that says so."""

    name: str
    generation: int
    instances: Mapping[str, Known]
    version: str = ""
    uid: str = ""


@dataclass(frozen=True)
class PodSettings:
    """`template`: the specification of a pod, which the backend completes; its container `manager` too.
    `owns_folder`: its folder of the node is given to its user first. `key`: from which the keys of
    runners are made."""

    key: bytes = field(repr=False)
    image: str = "tidegate"
    command: Sequence[str] = ("python", "-m", "workload_manager")
    runner: Sequence[str] = ("python", "-m", "cluster_server.pod")
    template: Mapping[str, Any] = field(default_factory=dict)
    owns_folder: bool = True
    silent_seconds: float = 60.0

    def runner_key(self, name: str) -> str:
        """Of an instance, or of a wsjob (`wsjob/J`)."""
        return hmac.new(self.key, f"runner {name}".encode(), hashlib.sha256).hexdigest()

    def digest(self, raw: bytes) -> str:
        """Of something with secrets in it, which is stored where those must not be."""
        return hmac.new(self.key, b"digest " + raw, hashlib.sha256).hexdigest()

    def signature(self, what: str, *said: object) -> str:
        """Of what only a server writes: who else may write into the namespace cannot make it."""
        raw = msgspec.json.encode([what, *said], order="sorted")
        return hmac.new(self.key, b"signature " + raw, hashlib.sha256).hexdigest()


# Workloads


def desired_of(request: pb.ApplyRequest, settings: PodSettings) -> Desired:
    known = {one.name: known_of(one, settings) for one in request.instances}
    return Desired(request.workload, request.generation, known)


def known_of(one: pb.Instance, settings: PodSettings) -> Known:
    bare = pb.Instance()
    bare.CopyFrom(one)
    bare.ClearField("goal")
    bare.ClearField("grace_seconds")
    digest = settings.digest(bare.SerializeToString(deterministic=True))
    return Known(one.name, Goal(pb.Goal.Name(one.goal)), one.grace_seconds, digest)


def workload_document(desired: Desired) -> Document:
    known = [desired.instances[name] for name in sorted(desired.instances)]
    metadata: Document = {
        "name": names.workload_map(desired.name),
        "labels": _labels("workload", workload=desired.name),
    }
    if desired.version:
        metadata["resourceVersion"] = desired.version
    return {
        "metadata": metadata,
        "data": {
            GENERATION: str(desired.generation),
            INSTANCES: msgspec.json.encode(known).decode(),
        },
    }


def read_workload(document: Document) -> Desired:
    """Raises ValueError for one that was not written by this backend: anybody may have labeled it."""
    metadata, data = document["metadata"], document.get("data", {})
    name = metadata["name"].removeprefix(names.workload_map(""))
    try:
        check_name("workload", name)
        known = decode(data[INSTANCES].encode(), list[Known], STORED)
        for one in known:
            check_name("instance", one.name)
        generation = decode(data[GENERATION].encode(), int, STORED)  # of 64 bits at most
        labeled = metadata["labels"][names.WORKLOAD]
    except (KeyError, Malformed, Wrong) as error:
        raise ValueError(f"ConfigMap {metadata['name']} is damaged: {error}") from None
    if labeled != name or generation < 1 or len(known) > INSTANCES_MAX:
        raise ValueError(f"ConfigMap {metadata['name']} is damaged: it says what nobody could ask for")
    return Desired(
        name,
        generation,
        {one.name: one for one in known},
        metadata["resourceVersion"],
        metadata["uid"],
    )


def service_labels(workload: str) -> dict[str, Any]:
    return _labels("service", workload=workload)


def _selector(workload: str) -> dict[str, str]:
    """Of the pods of its instances."""
    return {names.PART: "instance", names.WORKLOAD: names.label(workload)}


def service_document(desired: Desired) -> Document:
    return {
        "metadata": {
            "name": names.service_name(desired.name),
            "labels": service_labels(desired.name),
            "ownerReferences": [
                _owner("v1", "ConfigMap", names.workload_map(desired.name), desired.uid)
            ],
        },
        "spec": {
            "clusterIP": "None",
            "selector": _selector(desired.name),
            "ports": [{"name": "http", "port": MANAGER_PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }


def undisturbed(desired: Desired) -> int:
    """How many instances have to be ready while nodes are drained: all but one, those included that end,
    since others have not taken their place yet. Of a single one none, or its node could never be
    drained."""
    return max(0, len(desired.instances) - 1)


def budget_document(desired: Desired) -> Document:
    owner = _owner("v1", "ConfigMap", names.workload_map(desired.name), desired.uid)
    return {
        "metadata": {
            "name": names.workload_map(desired.name),
            "labels": _labels("budget", workload=desired.name),
            "ownerReferences": [owner],
        },
        "spec": {
            "minAvailable": undisturbed(desired),
            "selector": {"matchLabels": _selector(desired.name)},
        },
    }


# Instances


def instance_map_document(workload: str, one: pb.Instance, digest: str) -> Document:
    limits = one.resources
    about = About(workload, tuple(one.boxes), limits.memory_bytes, limits.cpu_millis)
    return {
        "metadata": {
            "name": names.instance_map(one.name),
            "labels": _labels("instance", workload=workload, instance=one.name),
            "annotations": {names.GRACE: str(one.grace_seconds), names.DIGEST: digest},
        },
        "data": {SPEC: one.spec.decode(), "about.json": msgspec.json.encode(about).decode()},
    }


def read_about(document: Document) -> About:
    """Raises Malformed."""
    return decode(document.get("data", {}).get("about.json", "").encode(), About, STORED)


def instance_secret_document(one: pb.Instance, uid: str, settings: PodSettings) -> Document:
    name = names.instance_map(one.name)
    labels = _labels("secret", instance=one.name)
    owner = _owner("v1", "ConfigMap", name, uid)
    return _secret(name, labels, owner, one.secrets, settings.runner_key(one.name))


def instance_pod_document(one: Known, about: About, owner_uid: str, settings: PodSettings) -> Document:
    """`owner_uid`: of the ConfigMap of the instance."""
    name = names.instance_map(one.name)
    secrets: Document = {"secret": {"secretName": name, "defaultMode": SECRET_MODE}}
    spec = _pod_spec(name, secrets, ("run", one.name), about.boxes, settings)
    spec |= {
        # After a crash the kubelet starts the container again. One that has given up is not started.
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": one.grace_seconds,
        "subdomain": names.service_name(about.workload),
        "hostname": names.label(one.name),
    }
    container = _container(spec)
    container["ports"] = [
        {"name": "http", "containerPort": MANAGER_PORT},
        {"name": "runner", "containerPort": RUNNER_PORT},
    ]
    probe = {"failureThreshold": 1, "timeoutSeconds": 5}
    container["readinessProbe"] = {
        **probe,
        "httpGet": {"path": "/ready", "port": RUNNER_PORT},
        "periodSeconds": READY_SECONDS,
    }
    container["livenessProbe"] = {
        **probe,
        "httpGet": {"path": "/live", "port": RUNNER_PORT},
        "periodSeconds": 10,
        "failureThreshold": 3,
    }
    if limits := _limits(about):
        # What the template says of others stays: a GPU, for example.
        resources = container.setdefault("resources", {})
        for kind in ("limits", "requests"):
            resources[kind] = {**resources.get(kind, {}), **limits}
    return {
        "metadata": {
            "name": one.name,
            "labels": {
                **_labels("instance", workload=about.workload, instance=one.name),
                "app.kubernetes.io/name": "tidegate-manager",
            },
            "ownerReferences": [_owner("v1", "ConfigMap", name, owner_uid, is_controller=True)],
        },
        "spec": spec,
    }


# Jobs


def wsjob_document(spec: pb.JobSpec, now: float, settings: PodSettings) -> Document:
    """Of a job that was submitted by gRPC."""
    document: Document = {
        "kind": pb.JobKind.Name(spec.kind).capitalize(),
        "configMap": names.job_map(spec.name),
    }
    if spec.secrets:
        document["secret"] = names.job_map(spec.name)
    if spec.boxes:
        document["boxes"] = list(spec.boxes)
    if spec.deadline_seconds:
        document["deadlineSeconds"] = spec.deadline_seconds
    said = {
        names.NAME: spec.name,
        names.DIGEST: settings.digest(spec.SerializeToString(deterministic=True)),
        names.SUBMITTED_AT: f"{now:.6f}",
    }
    made: Document = {
        "metadata": {
            "name": names.object_name(spec.name),
            "labels": _labels("wsjob", job=spec.name),
            "annotations": said,
            "finalizers": [names.FINALIZER],
        },
        "spec": document,
    }
    said[names.SIGNATURE] = _signature_of_job(made, settings)
    return made


def _signature_of_job(document: Document, settings: PodSettings) -> str:
    """Of all that a server has written there; a person may cancel it all the same."""
    metadata, spec = document["metadata"], document["spec"]
    said = [metadata["annotations"].get(one) for one in (names.NAME, names.DIGEST, names.SUBMITTED_AT)]
    fixed = {name: value for name, value in spec.items() if name != "cancelled"}
    return settings.signature("wsjob", metadata["name"], said, fixed)


def job_map_document(spec: pb.JobSpec, uid: str, settings: PodSettings) -> Document:
    """Nobody can change what it says, and the signature tells that it is of this job."""
    said = spec.spec.decode()
    return {
        "metadata": {
            "name": names.job_map(spec.name),
            "labels": _labels("wsjob-inputs", job=spec.name),
            "annotations": {names.SIGNATURE: settings.signature("inputs", uid, said)},
            "ownerReferences": [_job_owner(names.object_name(spec.name), uid)],
        },
        "data": {SPEC: said},
        "immutable": True,
    }


def job_secret_document(spec: pb.JobSpec, uid: str) -> Document:
    labels = _labels("secret", job=spec.name)
    owner = _job_owner(names.object_name(spec.name), uid)
    return _secret(names.job_map(spec.name), labels, owner, spec.secrets, "")


def job_key_document(wsjob: WsJob, settings: PodSettings) -> Document:
    """The key that the server asks the runner with. Also those made by hand get one."""
    key = settings.runner_key(f"wsjob/{wsjob.object}")
    owner = _job_owner(wsjob.object, wsjob.uid)
    return _secret(names.job_key(wsjob.object), _labels("secret", job=wsjob.name), owner, {}, key)


def job_result_document(wsjob: WsJob, result: str) -> Document:
    return {
        "metadata": {
            "name": names.job_result(wsjob.object),
            "labels": _labels("wsjob-result", job=wsjob.name),
            "ownerReferences": [_job_owner(wsjob.object, wsjob.uid)],
        },
        "data": {RESULT: result},
    }


def job_pod_document(wsjob: WsJob, settings: PodSettings) -> Document:
    sources = [_key_of_secret(names.job_key(wsjob.object), KEY)]
    if wsjob.secret:
        sources.append(_key_of_secret(wsjob.secret, SECRETS_FILE))
    secrets: Document = {"projected": {"sources": sources, "defaultMode": SECRET_MODE}}
    spec = _pod_spec(
        wsjob.config_map, secrets, (pb.JobKind.Name(wsjob.kind).lower(), "wsjob"), wsjob.boxes, settings
    )
    spec |= {"restartPolicy": "Never", "terminationGracePeriodSeconds": int(CANCEL_SECONDS)}
    _container(spec)["ports"] = [{"name": "runner", "containerPort": RUNNER_PORT}]
    return {
        "metadata": {
            "name": names.job_pod(wsjob.object),
            "labels": {**_labels("wsjob", job=wsjob.name), "app.kubernetes.io/name": "tidegate-wsjob"},
            "ownerReferences": [_job_owner(wsjob.object, wsjob.uid, is_controller=True)],
        },
        "spec": spec,
    }


@dataclass(frozen=True, slots=True)
class WsJob:
    """A wsjob as its object says it. `is_submitted`: by gRPC, to this server or one before it. Others
    were made by hand, and have names that cannot be submitted."""

    name: str
    object: str
    is_submitted: bool
    uid: str
    version: str
    kind: pb.JobKind
    config_map: str
    secret: str
    boxes: tuple[str, ...]
    deadline_seconds: int
    is_cancelled: bool
    is_deleted: bool
    finalizers: tuple[str, ...]
    digest: str
    submitted_at: float
    status: Document = field(hash=False)

    @property
    def has_ended(self) -> bool:
        return bool(self.status.get("endedAt"))

    @property
    def has_finalizer(self) -> bool:
        return names.FINALIZER in self.finalizers


def read_wsjob(document: Document, settings: PodSettings) -> WsJob:
    """Its schema was checked by the API server."""
    metadata, spec = document["metadata"], document["spec"]
    said = metadata.get("annotations", {})
    signature = said.get(names.SIGNATURE, "").encode()
    is_submitted = bool(signature) and hmac.compare_digest(
        signature, _signature_of_job(document, settings).encode()
    )
    if is_submitted:
        name, submitted_at = said[names.NAME], float(said[names.SUBMITTED_AT])
    else:
        name = names.made_by_hand(metadata["name"])
        submitted_at = datetime.fromisoformat(metadata["creationTimestamp"]).timestamp()
    return WsJob(
        name=name,
        object=metadata["name"],
        is_submitted=is_submitted,
        uid=metadata["uid"],
        version=metadata["resourceVersion"],
        kind=pb.JobKind.Value(spec["kind"].upper()),
        config_map=spec["configMap"],
        secret=spec.get("secret", ""),
        boxes=tuple(spec.get("boxes", ())),
        deadline_seconds=spec.get("deadlineSeconds", 0),
        is_cancelled=spec.get("cancelled", False),
        is_deleted="deletionTimestamp" in metadata,
        finalizers=tuple(metadata.get("finalizers", ())),
        digest=said[names.DIGEST] if is_submitted else "",
        submitted_at=submitted_at,
        status=document.get("status", {}),
    )


def why_no_inputs(wsjob: WsJob, found: Document | None, settings: PodSettings) -> str:
    """Why it cannot have this ConfigMap: a sentence, or nothing."""
    named = f"ConfigMap {wsjob.config_map}"
    if found is None:
        return f"There is no {named}."
    said = found.get("data", {}).get(SPEC)
    if said is None:
        return f"{named} has no {SPEC}."
    signature = found["metadata"].get("annotations", {}).get(names.SIGNATURE, "")
    expected = settings.signature("inputs", wsjob.uid, said)
    if wsjob.is_submitted and not hmac.compare_digest(signature.encode(), expected.encode()):
        return f"{named} is not what was submitted."
    return ""


def why_no_secret(wsjob: WsJob, found: Document | None) -> str:
    """As `why_no_inputs`, of the Secret that it names. Else whoever may make a wsjob could read every
    Secret of the namespace."""
    named = f"Secret {wsjob.secret}"
    if found is None:
        return f"There is no {named}."
    metadata = found["metadata"]
    if wsjob.is_submitted:
        if not is_owned(found, wsjob.uid):
            return f"{named} is not of this wsjob."
    elif metadata.get("labels", {}).get(names.PART) != NAMED_BY_HAND:
        return f"{named} is not for wsjobs: it has no label {names.PART}={NAMED_BY_HAND}."
    return "" if SECRETS_FILE in found.get("data", {}) else f"{named} has no {SECRETS_FILE}."


# Parts


def _pod_spec(
    inputs: str,
    secrets: Document,
    runs: tuple[str, str],
    boxes: Sequence[str],
    settings: PodSettings,
) -> Document:
    """`inputs`: a ConfigMap. `secrets`: a volume. `runs`: the kind, and the name of the folder."""
    kind, folder = runs
    spec: Document = copy.deepcopy(dict(settings.template))
    spec.setdefault("automountServiceAccountToken", False)
    spec.setdefault("securityContext", copy.deepcopy(POD_SECURITY))
    spec["enableServiceLinks"] = False
    container = _container(spec)
    container.setdefault("securityContext", copy.deepcopy(CONTAINER_SECURITY))
    container.setdefault("image", settings.image)
    container["command"] = list(settings.runner)
    container["args"] = [
        *(kind, "--folder", f"{WORK}/{folder}", "--inputs", INPUTS, "--secrets", SECRETS),
        *("--port", str(RUNNER_PORT), "--silent-seconds", f"{settings.silent_seconds:g}"),
        *("--", *settings.command),
    ]
    container["env"] = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "MANAGER_LISTEN", "value": f"$(POD_IP):{MANAGER_PORT}"},
        {"name": "MANAGER_STATE_DIR", "value": SHARED},
        {"name": "TIDEGATE_ARTIFACTS", "value": f"{SHARED}/artifacts"},
        *container.get("env", []),
    ]
    volumes = spec.setdefault("volumes", [])
    if not any(one["name"] == "shared" for one in volumes):
        volumes.append(
            {"name": "shared", "hostPath": {"path": "/var/lib/tidegate", "type": "DirectoryOrCreate"}}
        )
        before = spec.get("initContainers", [])
        if settings.owns_folder and not any(one["name"] == OWN for one in before):
            spec["initContainers"] = [*_own_folder(spec, container), *before]
    volumes += [
        {"name": "work", "emptyDir": {}},
        {"name": "inputs", "configMap": {"name": inputs, "items": [{"key": SPEC, "path": SPEC}]}},
        {"name": "secrets", **secrets},
    ]
    container["volumeMounts"] = [
        *container.get("volumeMounts", []),
        {"name": "shared", "mountPath": SHARED},
        {"name": "work", "mountPath": WORK},
        {"name": "inputs", "mountPath": INPUTS, "readOnly": True},
        {"name": "secrets", "mountPath": SECRETS, "readOnly": True},
    ]
    if boxes:
        _reach_any(boxes, spec)
    return spec


def _own_folder(spec: Document, container: Document) -> Iterator[Document]:
    """The kubelet makes folders of a node for root: this one is given to whoever the pod runs as. Not
    where the template leaves that to its image."""
    runs = spec["securityContext"] | container["securityContext"]
    if "runAsUser" not in runs:
        return
    pulled = {key: container[key] for key in ("imagePullPolicy",) if key in container}
    yield {
        "name": OWN,
        "image": container["image"],
        **pulled,
        "command": ["chown", ":".join(str(runs[key]) for key in WHOSE if key in runs), SHARED],
        "securityContext": {
            "runAsNonRoot": False,
            "runAsUser": 0,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"], "add": ["CHOWN"]},
        },
        "resources": {
            "requests": {"cpu": "10m", "memory": "16Mi"},
            "limits": {"cpu": "1", "memory": "64Mi"},
        },
        "volumeMounts": [{"name": "shared", "mountPath": SHARED}],
    }


def _reach_any(boxes: Sequence[str], spec: Document) -> None:
    """Require a node that reaches any of the boxes, beside what the template requires: of its terms one
    has to hold, so each of them is completed by each box."""
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    required["nodeSelectorTerms"] = [
        {
            **term,
            "matchExpressions": [
                *term.get("matchExpressions", []),
                {"key": names.box_label(box), "operator": "Exists"},
            ],
        }
        for term in required.get("nodeSelectorTerms") or [{}]
        for box in boxes
    ]


def _container(spec: Document) -> Document:
    """The one that the manager or the job runs in."""
    containers: list[Document] = spec.setdefault("containers", [])
    for one in containers:
        if one["name"] == CONTAINER:
            return one
    containers.append({"name": CONTAINER})
    return containers[-1]


def _limits(about: About) -> Document:
    limits: Document = {}
    if about.memory_bytes:
        limits["memory"] = str(about.memory_bytes)
    if about.cpu_millis:
        limits["cpu"] = f"{about.cpu_millis}m"
    return limits


def _secret(
    name: str, labels: Document, owner: Document, secrets: Mapping[str, bytes], key: str
) -> Document:
    values = {one: msgspec.Raw(value) for one, value in sorted(secrets.items())}
    data = {SECRETS_FILE: msgspec.json.encode(values)} if secrets else {}
    if key:
        data[KEY] = key.encode()
    return {
        "metadata": {"name": name, "labels": labels, "ownerReferences": [owner]},
        "type": "Opaque",
        "data": {one: base64.b64encode(raw).decode() for one, raw in data.items()},
    }


def _key_of_secret(name: str, key: str) -> Document:
    """A source of a volume: no other key of it."""
    return {"secret": {"name": name, "items": [{"key": key, "path": key}]}}


def _labels(part: str, **of: str) -> dict[str, Any]:
    keys = {"workload": names.WORKLOAD, "instance": names.INSTANCE, "job": names.JOB}
    return {
        **MANAGED,
        names.PART: part,
        **{keys[what]: names.label(value) for what, value in of.items()},
    }


def is_owned(document: Document, uid: str) -> bool:
    return uid in [one["uid"] for one in document["metadata"].get("ownerReferences", ())]


def _owner(version: str, kind: str, name: str, uid: str, *, is_controller: bool = False) -> Document:
    owner: Document = {"apiVersion": version, "kind": kind, "name": name, "uid": uid}
    if is_controller:
        owner |= {"controller": True, "blockOwnerDeletion": True}
    return owner


def _job_owner(name: str, uid: str, *, is_controller: bool = False) -> Document:
    return _owner(f"{GROUP}/v1", "WsJob", name, uid, is_controller=is_controller)
