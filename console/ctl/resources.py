"""What there is to see and to change: one table, by which all commands work.

A row says where a resource is in the API, what a table shows of it, what filters its list takes, and by
which requests it is created, changed and deleted and what else can be done with it. A test holds the
table against the API's description.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from console.ctl.failures import Usage

Form = Literal["text", "size", "duration", "age", "count", "names", "state", "yes", "percent"]


@dataclass(frozen=True)
class Column:
    """`path`: of the field, with dots. The form follows from its name if it is not said."""

    heading: str
    path: str
    form: Form | None = None
    wide: bool = False


@dataclass(frozen=True)
class Call:
    """A request that changes something. `path` begins at the item's own. `body` is sent as it is,
    `fields` as they are given, of which some are `needed`. `match`: whose ETag it names. `dry`: whether
    the console can check it without doing it. `wrap`: the field of the body that the fields go into, but
    for the reason."""

    method: str
    path: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)
    fields: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    match: Literal["", "self", "parent"] = ""
    dry: bool = False
    wrap: str = ""


@dataclass(frozen=True)
class Resource:
    """`path`: of the list, with the parent's name in braces. `single`: there is one for each parent, or
    one in all. `item`: of the path of one, "" where only the list tells of it. `within`: the field of
    the parent that is the list. `inner`: the field that has all that a manifest says; a manifest may
    have it too, or its fields. `sources`: where the item has the fields of its manifest, if not under
    their names. `read_only`: fields that a manifest may have, and that are not sent."""

    name: str
    plural: str
    path: str
    columns: tuple[Column, ...]
    text: str
    short: str = ""
    key: str = "name"
    item: str | None = None
    parent: str = ""
    single: bool = False
    paged: bool = True
    within: str = ""
    filters: tuple[str, ...] = ()
    topic: str = ""
    create: Call | None = None
    update: Call | None = None
    delete: Call | None = None
    inner: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    read_only: tuple[str, ...] = ()
    actions: Mapping[str, Call] = field(default_factory=dict)

    @property
    def item_path(self) -> str | None:
        """The path of one, with the parent's name and its own in braces."""
        if self.single:
            return self.path
        return f"{self.path}/{{{self.key}}}" if self.item is None else self.item or None

    @property
    def is_applied(self) -> bool:
        return bool(self.create or self.update)

    def name_of(self, item: Mapping[str, Any], parent: str = "") -> str:
        """What it is called on the command line: with its parent's name, if it has one."""
        if self.single:
            return parent or self.name
        own = str(item[self.key])
        return f"{parent}/{own}" if self.parent else own


C = Column
NAME: Final = C("NAME", "name")
_PATCHED: Final = ("created_at", "version")
_JOINED: Final = (C("LAST SEEN", "last_heartbeat_at"), C("JOINED", "joined_at", wide=True))

_OF_WORKLOAD: Final = (
    *("name", "model", "engine", "tokens_max", "org", "orgs", "replicas", "boxes_per_replica"),
    *("weights", "tokenizer", "limits", "cache", "session", "rollout", "reason"),
)

RESOURCES: Final = (
    Resource(
        "workload",
        "workloads",
        "/workloads",
        (
            NAME,
            C("READY", "ready", "state"),
            C("REPLICAS", "replicas.ready"),
            C("DESIRED", "replicas.desired"),
            C("REVISION", "revision"),
            C("ROLLOUT", "rollout.phase", "state"),
            C("MODEL", "model"),
            C("ORG", "org"),
            C("AGE", "created_at"),
            C("STABLE", "stable_revision", wide=True),
            C("INSTANCES", "replicas.instances", wide=True),
            C("SESSION", "session", wide=True),
        ),
        "Models that are served, by their specs.",
        short="wl",
        filters=("org", "q", "ready"),
        topic="workload:{}",
        inner="spec",
        create=Call("POST", "", fields=_OF_WORKLOAD, dry=True, wrap="spec"),
        update=Call("PATCH", fields=_OF_WORKLOAD, match="self", dry=True, wrap="patch"),
        delete=Call("DELETE", match="self", dry=True),
        actions={
            "scale": Call(
                "POST",
                "/scale",
                fields=("replicas", "reason"),
                needed=("replicas",),
                match="self",
                dry=True,
            ),
            "restart": Call("POST", "/restart", fields=("reason",), match="self", dry=True),
            "rollout pause": Call("POST", "/pause", fields=("reason",), match="self", dry=True),
            "rollout resume": Call("POST", "/resume", fields=("reason",), match="self", dry=True),
            "rollout undo": Call("POST", "/undo", fields=("revision", "reason"), match="self", dry=True),
        },
    ),
    Resource(
        "revision",
        "revisions",
        "/workloads/{workload}/revisions",
        (
            C("NUMBER", "number"),
            C("MADE", "made_at"),
            C("AUTHOR", "author"),
            C("RESTORES", "same_as"),
            C("EPOCH", "epoch"),
            C("COMPILED", "compiled_at"),
            C("NOTE", "note"),
            C("ARTIFACT", "artifact", wide=True),
        ),
        "What a workload's instances were started with.",
        key="number",
        parent="workload",
    ),
    Resource(
        "instance",
        "instances",
        "/workloads/{workload}/instances",
        (
            NAME,
            C("STATE", "state", "state"),
            C("REVISION", "revision"),
            C("SERVING", "serving", "yes"),
            C("CACHE", "cache", "state"),
            C("REQUESTS", "running_requests"),
            C("SINCE", "since"),
            C("REASON", "reason"),
            C("REPLICA", "replica", wide=True),
            C("HOST", "host", wide=True),
            C("BOXES", "boxes", "names", wide=True),
            C("RESTARTS", "engine_restarts", wide=True),
            C("SENTENCE", "sentence", wide=True),
        ),
        "Processes that serve a workload's replicas.",
        item="",
        parent="workload",
        filters=("ended",),
    ),
    Resource(
        "rollout",
        "rollouts",
        "/workloads/{workload}/rollouts",
        (
            C("TO", "to_revision"),
            C("FROM", "from_revision"),
            C("PHASE", "phase", "state"),
            C("SWITCHED", "switched"),
            C("REPLICAS", "total"),
            C("STARTED", "started_at"),
            C("ENDED", "ended_at"),
            C("REASON", "reason"),
            C("SENTENCE", "sentence", wide=True),
        ),
        "Changes of replicas from one revision to the next.",
        key="to_revision",
        item="",
        parent="workload",
    ),
    Resource(
        "tokenizer",
        "tokenizers",
        "/tokenizers",
        (
            C("ID", "id"),
            C("NAME", "name"),
            C("ORG", "org"),
            C("SHA256", "sha256"),
            C("SIZE", "size_bytes"),
            C("AGE", "created_at"),
            C("AUTHOR", "author", wide=True),
        ),
        "Uploaded tokenizers, which workloads name.",
        key="id",
        filters=("org",),
        delete=Call("DELETE"),
    ),
    Resource(
        "session",
        "sessions",
        "/sessions",
        (
            NAME,
            C("ORG", "org"),
            C("BOXES", "boxes.actual"),
            C("DESIRED", "boxes.desired"),
            C("JOBS", "jobs"),
            C("MEMORY", "memory_bytes"),
            C("SPINE", "spine_streams"),
            C("WAITING", "waiting.cause", "state"),
            C("AGE", "created_at"),
            C("BOX NAMES", "box_names", "names", wide=True),
            C("LOST NODES", "lost_nodes", "count", wide=True),
        ),
        "Boxes that jobs share.",
        filters=("org", "waiting"),
        topic="session:{}",
        create=Call(
            "POST", "", fields=("name", "org", "boxes", "path", "bytes_per_token", "reason"), dry=True
        ),
        update=Call("POST", "/resize", fields=("boxes", "reason"), match="self", dry=True),
        delete=Call("DELETE", match="self"),
        sources={"boxes": "boxes.desired"},
        read_only=(
            *("version", "box_names", "waiting", "deleting", "jobs", "memory_bytes", "spine_streams"),
            *("operation", "part_operations", "lost_nodes", "created_at"),
        ),
        actions={
            "scale": Call(
                "POST",
                "/resize",
                fields=("boxes", "reason"),
                needed=("boxes",),
                match="self",
                dry=True,
            ),
            "restore-rails": Call("POST", "/restore-rails", fields=("reason",), match="self", dry=True),
        },
    ),
    Resource(
        "job",
        "jobs",
        "/sessions/{session}/jobs",
        (
            NAME,
            C("DRIVER", "driver"),
            C("RUNNING", "running", "yes"),
            C("BOXES", "boxes", "names"),
            C("AGE", "created_at"),
            C("ADDRESS", "driver_address", wide=True),
        ),
        "Replicas of models that use a session's boxes.",
        item="",
        parent="session",
        create=Call(
            "POST", "", fields=("name", "driver", "orgs", "boxes", "reason"), match="parent", dry=True
        ),
        delete=Call("DELETE", match="parent"),
        read_only=("driver_address", "running", "created_at"),
    ),
    Resource(
        "stream",
        "streams",
        "/sessions/{session}/streams",
        (
            NAME,
            C("BOX", "box"),
            C("NODE", "node"),
            C("PATH", "path", "state"),
            C("MEMORY", "memory_bytes"),
            C("PHASE", "phase", wide=True),
            C("NEXT", "next_node", wide=True),
            C("WHY", "why", wide=True),
        ),
        "Which shard of a job is stored on which node.",
        item="",
        parent="session",
    ),
    Resource(
        "node",
        "nodes",
        "/nodes",
        (
            NAME,
            C("STATE", "state", "state"),
            C("STAMP", "stamp"),
            C("MEMORY", "memory_bytes"),
            C("CPUS", "cpus"),
            C("VERSION", "software_version"),
            *_JOINED,
            C("REASON", "state_reason", wide=True),
            C("MOVER", "mover", wide=True),
            C("ADDRESS", "data_address", wide=True),
        ),
        "Machines whose agents store columns.",
        short="no",
        filters=("q", "state", "stamp", "leaf", "label"),
        topic="node:{}",
        update=Call("PATCH", fields=("labels", "reason"), match="self"),
        read_only=(
            *(
                "name",
                "version",
                "stamp",
                "state",
                "state_reason",
                "state_since",
                "memory_bytes",
                "cpus",
            ),
            *("shards_max", "cores_used", "measured_at", "nics", "tier2", "retiring_stores"),
            *("software_version", "mover", "protocol_min", "protocol_max", "data_address", "joined_at"),
            "last_heartbeat_at",
        ),
        actions={
            "cordon": Call("PUT", "/state", body={"state": "cordoned"}, fields=("reason",)),
            "uncordon": Call("PUT", "/state", body={"state": "ready"}, fields=("reason",)),
            "drain": Call("POST", "/drain", fields=("reason",)),
            "upgrade": Call("POST", "/upgrade", fields=("version", "reason")),
        },
    ),
    Resource(
        "box",
        "boxes",
        "/boxes",
        (
            NAME,
            C("STATE", "state", "state"),
            C("STAMP", "stamp"),
            C("DOMAINS", "domains", "count"),
            C("REASON", "state_reason", wide=True),
        ),
        "Machines that compute.",
        filters=("q", "stamp"),
        actions={
            "cordon": Call("PUT", "/state", body={"state": "cordoned"}, fields=("reason",)),
            "uncordon": Call("PUT", "/state", body={"state": "ready"}, fields=("reason",)),
            "drain": Call("POST", "/drain", fields=("reason",)),
        },
    ),
    Resource(
        "leaf",
        "leaves",
        "/leaves",
        (NAME, C("STAMP", "stamp")),
        "Switches of nodes and boxes.",
        filters=("stamp",),
    ),
    Resource(
        "spine-link",
        "spine-links",
        "/spine-links",
        (NAME, C("LEAF", "leaf"), C("SPINE", "spine"), C("GBIT/S", "gbits")),
        "Links of leaves to the spine.",
        filters=("leaf",),
    ),
    Resource(
        "driver",
        "drivers",
        "/drivers",
        (
            NAME,
            C("MODEL", "model.name"),
            C("ENGINE", "engine"),
            C("VERSION", "software_version"),
            C("LOST", "lost_at"),
            *_JOINED,
            C("MOVER", "mover", wide=True),
        ),
        "What decides for a job which columns are cached.",
        filters=("q",),
        topic="driver:{}",
    ),
    Resource(
        "brain",
        "brains",
        "/brains",
        (
            NAME,
            C("ADDRESS", "api_url"),
            C("VERSION", "software_version"),
            C("LOST", "lost_at"),
            *_JOINED,
        ),
        "What routes requests to replicas.",
        filters=("q",),
        topic="brain:{}",
        delete=Call("DELETE", match="self", dry=True),
    ),
    Resource(
        "model",
        "models",
        "/models",
        (
            NAME,
            C("MODEL", "model"),
            C("TOKENS", "tokens_max"),
            C("REPLICAS", "replicas", "count"),
            C("ORGS", "orgs", "names"),
            C("TOKENIZER", "tokenizer", wide=True),
        ),
        "Models that brains serve.",
        filters=("q",),
        create=Call(
            "POST",
            "",
            fields=("name", "model", "tokens_max", "tokenizer", "orgs", "reason"),
            dry=True,
        ),
        update=Call(
            "PUT",
            fields=("model", "tokens_max", "tokenizer", "orgs", "reason"),
            match="self",
            dry=True,
        ),
        delete=Call("DELETE", match="self", dry=True),
        read_only=("version", "replicas"),
    ),
    Resource(
        "replica",
        "replicas",
        "/models/{model}/replicas",
        (
            NAME,
            C("ENGINE", "engine"),
            C("DRIVER", "driver"),
            C("DRAINING", "draining", "yes"),
            C("URL", "url"),
            C("SERVED AS", "served_as", wide=True),
        ),
        "Copies of a model that requests are routed to.",
        parent="model",
        within="replicas",
        create=Call(
            "POST",
            "",
            fields=("name", "url", "engine", "driver", "draining", "served_as", "api_key", "reason"),
            dry=True,
        ),
        update=Call(
            "PATCH",
            fields=("url", "engine", "driver", "draining", "served_as", "api_key", "reason"),
            match="self",
            dry=True,
        ),
        delete=Call("DELETE", match="self", dry=True),
        read_only=("version", "guessed", "has_api_key"),
    ),
    Resource(
        "org",
        "orgs",
        "/orgs",
        (C("NAME", "slug"), C("FULL NAME", "name"), C("AGE", "created_at")),
        "Tenants.",
        key="slug",
        topic="org:{}",
        create=Call("POST", "", fields=("slug", "name", "reason"), dry=True),
        update=Call("PATCH", fields=("name", "reason"), match="self", dry=True),
        delete=Call("DELETE", match="self", dry=True),
        read_only=("version", "created_at"),
    ),
    Resource(
        "member",
        "members",
        "/orgs/{org}/members",
        (C("NAME", "username"), C("ROLE", "role")),
        "Users of an org, with their roles.",
        key="username",
        item="",
        parent="org",
        create=Call("PUT", "/{username}", fields=("role", "reason")),
        update=Call("PUT", "/{username}", fields=("role", "reason")),
        delete=Call("DELETE"),
        read_only=("username",),
    ),
    Resource(
        "policy",
        "policies",
        "/orgs/{org}/policy",
        (
            C("VERSION", "version"),
            C("DEFAULT", "follows_default", "yes"),
            C("APPLIED", "applied.has_it"),
            C("DRIVERS", "applied.drivers"),
            C("AUTHOR", "author"),
            C("CHANGED", "made_at"),
            C("REASON", "reason", wide=True),
        ),
        "What an org wants of its cache.",
        parent="org",
        single=True,
        update=Call("PUT", fields=("policy", "models", "reason"), match="self", dry=True),
        read_only=(
            *(
                "org",
                "version",
                "follows_default",
                "effective",
                "effective_models",
                "in_words",
                "author",
            ),
            *("made_at", "applied", "plan_token"),
        ),
    ),
    Resource(
        "limits",
        "limits",
        "/orgs/{org}/limits",
        (
            C("REQUESTS/MIN", "requests_per_minute"),
            C("TOKENS/MIN", "tokens_per_minute"),
            C("CONCURRENT", "concurrent"),
            C("QUEUED", "queued"),
            C("WEIGHT", "weight"),
            C("PRIORITY", "priority"),
            C("WAIT", "wait_seconds"),
            C("APPLIED", "applied.has_it", wide=True),
            C("BRAINS", "applied.brains", wide=True),
        ),
        "What an org may ask of brains.",
        parent="org",
        single=True,
        update=Call(
            "PUT",
            fields=(
                *("requests_per_minute", "tokens_per_minute", "concurrent", "queued", "weight"),
                *("priority", "wait_seconds", "reason"),
            ),
            match="self",
            dry=True,
        ),
        read_only=("org", "version", "applied"),
    ),
    Resource(
        "session-rules",
        "session-rules",
        "/session-rules",
        (
            C("PATH", "path"),
            C("BOXES MIN", "boxes_min"),
            C("INCREMENT", "boxes_increment"),
            C("BOXES MAX", "boxes_max"),
            C("GRANT %", "grant_percent"),
            C("REPLACE LOST", "replace_lost", "yes"),
        ),
        "Rules that all sessions follow.",
        single=True,
        update=Call(
            "PUT",
            fields=(
                *("path", "refuse_spine", "wait_for_rail_seconds", "boxes_min", "boxes_increment"),
                *("boxes_max", "grant_percent", "boxes_quota", "replicas_quota"),
                *("replace_lost", "replace_lost_after_seconds", "reason"),
            ),
            match="self",
        ),
        read_only=("version",),
    ),
    Resource(
        "cluster-policy",
        "cluster-policy",
        "/policies/cluster",
        (C("VERSION", "version"), C("IN WORDS", "in_words")),
        "The default policy, and limits that no policy exceeds.",
        single=True,
        update=Call("PUT", fields=("default", "limits", "reason"), match="self", dry=True),
        read_only=("version", "in_words"),
    ),
    Resource(
        "fleet",
        "fleet",
        "/fleet/description",
        (C("DESCRIPTION", "yaml"),),
        "Stamps, leaves, nodes and boxes, as one description.",
        single=True,
        update=Call("PUT", fields=("yaml", "reason"), match="self", dry=True),
    ),
    Resource(
        "alert",
        "alerts",
        "/alerts",
        (
            C("ID", "id"),
            C("STATE", "state", "state"),
            C("SEVERITY", "severity", "state"),
            C("RULE", "rule"),
            C("SUBJECT", "subject"),
            C("SINCE", "since"),
            C("ACKNOWLEDGED", "acknowledged_by"),
            C("ASSIGNEE", "assignee", wide=True),
            C("SUMMARY", "sentence", wide=True),
        ),
        "Rules that are violated.",
        key="id",
        filters=("state", "severity", "rule", "org", "topic", "q", "suppressed"),
        actions={
            "acknowledge": Call("POST", "/acknowledge", fields=("reason",)),
            "unacknowledge": Call("POST", "/unacknowledge", fields=("reason",)),
        },
    ),
    Resource(
        "silence",
        "silences",
        "/silences",
        (
            C("ID", "id"),
            C("STATE", "state", "state"),
            C("MATCHERS", "matchers", "names"),
            C("ENDS", "ends_at"),
            C("AUTHOR", "author"),
            C("REASON", "reason"),
        ),
        "Alerts that nobody is notified of for a time.",
        key="id",
        delete=Call("DELETE", match="self"),
    ),
    Resource(
        "alert-rule",
        "alert-rules",
        "/alert-rules",
        (
            C("NAME", "slug"),
            C("SEVERITY", "severity", "state"),
            C("SCOPE", "scope"),
            C("ENABLED", "enabled", "yes"),
            C("TITLE", "title"),
        ),
        "Conditions on numbers or states.",
        key="slug",
        paged=False,
    ),
    Resource(
        "operation",
        "operations",
        "/operations",
        (
            C("ID", "id"),
            C("KIND", "kind"),
            C("TARGET", "target"),
            C("STATE", "state", "state"),
            C("PROGRESS", "progress.percent", "percent"),
            C("AGE", "created_at"),
            C("BY", "started_by", wide=True),
            C("MESSAGE", "progress.message", wide=True),
        ),
        "Work that takes longer than a request.",
        short="ops",
        key="id",
        filters=("target", "kind", "done"),
        actions={"cancel": Call("DELETE"), "retry": Call("POST", "/retry")},
    ),
    Resource(
        "target",
        "targets",
        "/targets",
        (
            C("KIND", "kind"),
            NAME,
            C("DESIRED", "desired_generation"),
            C("OBSERVED", "observed_generation"),
            C("FAULT", "fault", "state"),
            C("SEEN", "observed_at"),
            C("PROBLEM", "problem", wide=True),
        ),
        "Processes that are sent desired documents.",
        item="",
        filters=("faulty",),
    ),
    Resource(
        "token",
        "tokens",
        "/tokens",
        (
            C("ID", "public_id"),
            C("NAME", "name"),
            C("USER", "user"),
            C("STATE", "state", "state"),
            C("READ ONLY", "read_only", "yes"),
            C("ORG", "org"),
            C("EXPIRES", "expires_at"),
            C("LAST USED", "last_used_at"),
        ),
        "Secrets with which programs call the API.",
        key="public_id",
        item="",
        filters=("whose", "user", "org"),
        delete=Call("DELETE"),
    ),
    Resource(
        "join-token",
        "join-tokens",
        "/join-tokens",
        (
            C("ID", "public_id"),
            C("KIND", "kind"),
            C("STATE", "state", "state"),
            C("USES LEFT", "uses_left"),
            C("EXPIRES", "expires_at"),
            C("NOTE", "note"),
        ),
        "Secrets with which agents, drivers and brains join.",
        key="public_id",
        item="",
        delete=Call("DELETE"),
    ),
    Resource(
        "event",
        "events",
        "/events",
        (
            C("AT", "at"),
            C("KIND", "kind"),
            C("TOPICS", "topics", "names"),
            C("SENTENCE", "sentence"),
        ),
        "What happened to whom.",
        short="ev",
        key="id",
        item="",
        filters=("topic", "kind", "since", "until", "order"),
    ),
    Resource(
        "audit-entry",
        "audit",
        "/audit",
        (
            C("ID", "id"),
            C("AT", "at"),
            C("ACTOR", "actor"),
            C("ACTION", "action"),
            C("OBJECT", "object_name"),
            C("REASON", "reason"),
            C("REQUEST", "request_id", wide=True),
        ),
        "Who changed what, when and why.",
        key="id",
        filters=("q", "actor", "action", "org", "request_id", "since", "until"),
        actions={"undo": Call("POST", "/undo", fields=("reason",))},
    ),
)

BY_NAME: Final = {
    name: resource
    for resource in RESOURCES
    for name in (resource.name, resource.plural, resource.short)
    if name
}


def named(word: str) -> Resource:
    try:
        return BY_NAME[word.lower()]
    except KeyError:
        there = ", ".join(resource.plural for resource in RESOURCES)
        raise Usage(f"There is no resource {word!r}. There are: {there}.") from None


def with_action(verb: str) -> Iterator[Resource]:
    return (resource for resource in RESOURCES if verb in resource.actions)


def value_at(item: Any, path: str) -> Any:
    """The field of an item that a path with dots leads to; None where there is none on the way."""
    for part in path.split("."):
        if not isinstance(item, dict):
            return None
        item = item.get(part)
    return item
