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

Form = Literal["text", "size", "duration", "rate", "age", "count", "names", "state", "percent"]


@dataclass(frozen=True)
class Column:
    """`path`: of the field, with dots. Heading and form follow from it if they are not said."""

    path: str
    said: str = ""
    form: Form | None = None

    @property
    def heading(self) -> str:
        return self.said or label_of(self.path).upper()


@dataclass(frozen=True)
class Call:
    """A request that changes something. `path` begins at the item's own. `body` is sent as it is,
    `fields` as they are given, of which some are `needed`. `match`: whose ETag it names. `dry`: whether
    the console can check it without doing it. `wrap`: the field of the body that the fields go into, but
    for the reason. `ends`: the field of a dry run's answer that names nodes that are alive and would be
    removed, to which a person has to agree."""

    method: str
    path: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)
    fields: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    match: Literal["", "self", "parent"] = ""
    dry: bool = False
    wrap: str = ""
    ends: str = ""


@dataclass(frozen=True)
class Resource:
    """`path`: of the list, with the parent's name in braces. `single`: there is one for each parent, or
    one in all. `item`: of the path of one, "" where only the list tells of it. `within`: the field of
    the parent that is the list. `inner`: the field that has all that a manifest says; a manifest may
    have it too, or its fields. `sources`: where the item has the fields of its manifest, if not under
    their names. `read_only`: fields that a manifest may have, and that are not sent. `says_no`: fields
    of which `no` is a choice among others. `wide`: columns that are shown where somebody asks for more.
    A text is a column of that path."""

    name: str
    plural: str
    path: str
    columns: tuple[Column | str, ...]
    text: str
    wide: tuple[Column | str, ...] = ()
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
    says_no: tuple[str, ...] = ()
    actions: Mapping[str, Call] = field(default_factory=dict)

    @property
    def item_path(self) -> str | None:
        """The path of one, with the parent's name and its own in braces."""
        if self.single:
            return self.path
        return f"{self.path}/{{{self.key}}}" if self.item is None else self.item or None

    def shown(self, *, wide: bool) -> list[Column]:
        """Its columns. Of what is inside something else, its parent is the first."""
        said = [*([self.parent] if self.parent else []), *self.columns, *(self.wide if wide else ())]
        return [Column(one) if isinstance(one, str) else one for one in said]

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


def label_of(name: str) -> str:
    """What a field is called in words: without its unit."""
    for unit in ("_bytes", "_seconds", "_at"):
        name = name.removesuffix(unit)
    return name.replace("_", " ")


def state(path: str, heading: str = "") -> Column:
    return Column(path, heading, "state")


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
            "name",
            state("ready"),
            C("replicas.ready", "REPLICAS"),
            C("replicas.desired", "DESIRED"),
            "revision",
            state("rollout.phase", "ROLLOUT"),
            "model",
            "org",
            C("created_at", "AGE"),
        ),
        "Models that are served, by their specs.",
        wide=(C("stable_revision", "STABLE"), C("replicas.instances", "INSTANCES"), "session"),
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
            "number",
            C("made_at", "CREATED"),
            "author",
            C("same_as", "RESTORES"),
            "epoch",
            "compiled_at",
            "note",
        ),
        "What a workload's instances were started with.",
        wide=("artifact",),
        key="number",
        parent="workload",
    ),
    Resource(
        "instance",
        "instances",
        "/workloads/{workload}/instances",
        (
            "name",
            state("state"),
            "revision",
            "serving",
            state("cache"),
            C("running_requests", "REQUESTS"),
            "since",
            "reason",
        ),
        "Processes that serve a workload's replicas.",
        wide=("replica", "host", "boxes", C("engine_restarts", "RESTARTS"), "sentence"),
        item="",
        parent="workload",
        filters=("ended",),
    ),
    Resource(
        "rollout",
        "rollouts",
        "/workloads/{workload}/rollouts",
        (
            C("to_revision", "TO"),
            C("from_revision", "FROM"),
            state("phase"),
            "switched",
            C("total", "REPLICAS"),
            "started_at",
            "ended_at",
            "reason",
        ),
        "Changes of replicas from one revision to the next.",
        wide=("sentence",),
        key="to_revision",
        item="",
        parent="workload",
    ),
    Resource(
        "tokenizer",
        "tokenizers",
        "/tokenizers",
        ("id", "name", "org", "sha256", "size_bytes", C("created_at", "AGE")),
        "Uploaded tokenizers, which workloads name.",
        wide=("author",),
        key="id",
        filters=("org",),
        delete=Call("DELETE"),
    ),
    Resource(
        "bucket",
        "buckets",
        "/buckets",
        ("id", "name", "endpoint", "org", "shared", C("changed_at", "CHANGED")),
        "Buckets that weights are read from with stored credentials.",
        wide=("region", "author"),
        key="id",
        filters=("org",),
        delete=Call("DELETE", match="self", dry=True),
    ),
    Resource(
        "session",
        "sessions",
        "/sessions",
        (
            "name",
            "org",
            C("boxes.actual", "BOXES"),
            C("boxes.desired", "DESIRED"),
            "jobs",
            "memory_bytes",
            C("spine_streams", "SPINE"),
            state("waiting.cause", "WAITING"),
            C("created_at", "AGE"),
        ),
        "Boxes that jobs share.",
        wide=("box_names", C("lost_nodes", form="count")),
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
            "redundancy",
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
        ("name", "driver", "running", "boxes", C("created_at", "AGE")),
        "Replicas of models that use a session's boxes.",
        wide=(C("driver_address", "ADDRESS"),),
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
        ("name", "box", "node", state("path"), "memory_bytes"),
        "Which shard of a job is stored on which node.",
        wide=("phase", C("next_node", "NEXT"), "why"),
        item="",
        parent="session",
    ),
    Resource(
        "node",
        "nodes",
        "/nodes",
        (
            "name",
            state("state"),
            "stamp",
            "memory_bytes",
            "cpus",
            C("software_version", "VERSION"),
            C("last_heartbeat_at", "LAST SEEN"),
        ),
        "Machines whose agents store columns.",
        wide=(
            "joined_at",
            C("state_reason", "REASON"),
            "mover",
            C("data_address", "ADDRESS"),
        ),
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
            "drain": Call("POST", "/drain", fields=("ignore_redundancy", "reason"), dry=True),
            "upgrade": Call("POST", "/upgrade", fields=("version", "ignore_redundancy", "reason")),
        },
    ),
    Resource(
        "box",
        "boxes",
        "/boxes",
        ("name", state("state"), "stamp", C("domains", form="count")),
        "Machines that compute.",
        wide=(C("state_reason", "REASON"),),
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
        ("name", "stamp"),
        "Switches of nodes and boxes.",
        filters=("stamp",),
    ),
    Resource(
        "spine-link",
        "spine-links",
        "/spine-links",
        ("name", "leaf", "spine", C("gbits", "GBIT/S")),
        "Links of leaves to the spine.",
        filters=("leaf",),
    ),
    Resource(
        "driver",
        "drivers",
        "/drivers",
        (
            "name",
            C("model.name", "MODEL"),
            "engine",
            C("software_version", "VERSION"),
            "lost_at",
            C("last_heartbeat_at", "LAST SEEN"),
        ),
        "What decides for a job which columns are cached.",
        wide=("joined_at", "mover"),
        filters=("q",),
        topic="driver:{}",
    ),
    Resource(
        "redundancy",
        "redundancies",
        "/drivers/{driver}/redundancy",
        ("redundancy", "asked", "incomplete"),
        "How the columns of a driver are stored redundantly in tier 2; all of its shards by `describe`.",
        parent="driver",
        single=True,
    ),
    Resource(
        "brain",
        "brains",
        "/brains",
        (
            "name",
            C("api_url", "ADDRESS"),
            C("software_version", "VERSION"),
            "lost_at",
            C("last_heartbeat_at", "LAST SEEN"),
        ),
        "What routes requests to replicas.",
        wide=("joined_at",),
        filters=("q",),
        topic="brain:{}",
        delete=Call("DELETE", match="self", dry=True),
    ),
    Resource(
        "model",
        "models",
        "/models",
        ("name", "model", C("tokens_max", "TOKENS"), C("replicas", form="count"), "orgs"),
        "Models that brains serve.",
        wide=("tokenizer",),
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
        ("name", "engine", "driver", "draining", "url"),
        "Copies of a model that requests are routed to.",
        wide=("served_as",),
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
        (C("slug", "NAME"), C("name", "FULL NAME"), C("created_at", "AGE")),
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
        (C("username", "NAME"), "role"),
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
            "version",
            C("follows_default", "DEFAULT"),
            C("applied.has_it", "APPLIED"),
            C("applied.drivers", "DRIVERS"),
            "author",
            C("made_at", "CHANGED"),
        ),
        "What an org wants of its cache.",
        wide=("reason",),
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
            C("requests_per_minute", "REQUESTS/MIN"),
            C("tokens_per_minute", "TOKENS/MIN"),
            "concurrent",
            "queued",
            "weight",
            "priority",
            "wait_seconds",
        ),
        "What an org may ask of brains.",
        wide=(C("applied.has_it", "APPLIED"), C("applied.brains", "BRAINS")),
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
            "path",
            "boxes_min",
            C("boxes_increment", "INCREMENT"),
            "boxes_max",
            C("grant_percent", "GRANT %"),
            "replace_lost",
        ),
        "Rules that all sessions follow.",
        single=True,
        update=Call(
            "PUT",
            fields=(
                *("path", "refuse_spine", "wait_for_rail_seconds", "boxes_min", "boxes_increment"),
                *("boxes_max", "grant_percent", "moves_percent", "borrow", "redundancy"),
                *("boxes_quota", "replicas_quota"),
                *("replace_lost", "replace_lost_after_seconds", "reason"),
            ),
            match="self",
        ),
        read_only=("version",),
        says_no=("borrow",),
    ),
    Resource(
        "cluster-policy",
        "cluster-policy",
        "/policies/cluster",
        ("version", "in_words"),
        "The default policy, and limits that no policy exceeds.",
        single=True,
        update=Call("PUT", fields=("default", "limits", "reason"), match="self", dry=True),
        read_only=("version", "in_words"),
    ),
    Resource(
        "fleet",
        "fleet",
        "/fleet/description",
        (C("yaml", "DESCRIPTION"),),
        "Stamps, leaves, nodes and boxes, as one description.",
        single=True,
        update=Call("PUT", fields=("yaml", "reason"), match="self", dry=True, ends="alive_removed"),
    ),
    Resource(
        "alert",
        "alerts",
        "/alerts",
        (
            "id",
            state("state"),
            state("severity"),
            "rule",
            "subject",
            "since",
            C("acknowledged_by", "ACKNOWLEDGED"),
        ),
        "Rules that are violated.",
        wide=("assignee", C("sentence", "SUMMARY")),
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
        ("id", state("state"), "matchers", "ends_at", "author", "reason"),
        "Alerts that nobody is notified of for a time.",
        key="id",
        delete=Call("DELETE", match="self"),
    ),
    Resource(
        "alert-rule",
        "alert-rules",
        "/alert-rules",
        (C("slug", "NAME"), state("severity"), "scope", "enabled", "title"),
        "Conditions on numbers or states.",
        key="slug",
        paged=False,
    ),
    Resource(
        "operation",
        "operations",
        "/operations",
        (
            "id",
            "kind",
            "target",
            state("state"),
            C("progress.percent", "PROGRESS", "percent"),
            C("created_at", "AGE"),
        ),
        "Work that takes longer than a request.",
        wide=(C("started_by", "BY"), C("progress.message", "MESSAGE")),
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
            "kind",
            "name",
            C("desired_generation", "DESIRED"),
            C("observed_generation", "OBSERVED"),
            state("fault"),
            C("observed_at", "SEEN"),
        ),
        "Processes that are sent desired documents.",
        wide=("problem",),
        item="",
        filters=("faulty",),
    ),
    Resource(
        "token",
        "tokens",
        "/tokens",
        (
            C("public_id", "ID"),
            "name",
            "user",
            state("state"),
            "read_only",
            "org",
            "expires_at",
            "last_used_at",
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
        (C("public_id", "ID"), "kind", state("state"), "uses_left", "expires_at", "note"),
        "Secrets with which agents, drivers and brains join.",
        key="public_id",
        item="",
        delete=Call("DELETE"),
    ),
    Resource(
        "event",
        "events",
        "/events",
        ("at", "kind", "topics", "sentence"),
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
        ("id", "at", "actor", "action", C("object_name", "OBJECT"), "reason"),
        "Who changed what, when and why.",
        wide=(C("request_id", "REQUEST"),),
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
