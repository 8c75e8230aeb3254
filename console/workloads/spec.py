"""What a workload is to be, as people write it: YAML or JSON, read by one parser. No database.

    name: chat
    model: example/chat-8b
    tokens_max: 32768
    engine: {kind: emulator}
    replicas: 2
    rollout: {deadline_seconds: 10m}

It has three parts. What names and shapes it (`FIXED`) never changes. Its `Template` is what engines are
started with: a change of that is a new revision, and a rollout. Its `Settings`, and the number of
replicas, change in place.

Sizes and durations are numbers, or text with a unit as `telemetry.units` reads it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec
import yaml
from msgspec import Meta, Struct

from console.orgs.models import SLUG
from console.workloads.wrong_values import in_words
from inference_brain.desired import TOKENS_MAX
from kvss_agent.desired import Document
from kvss_agent.documents import whole
from telemetry.decoder import DOCUMENT, decode
from telemetry.units import Unreadable, parse_duration, parse_size
from telemetry.units import size as shown_size
from workload_manager.spec import (
    PRINTED,
    EngineSpec,
    Sha256,
    Url,
    Variable,
    WeightsSpec,
    engine_problems,
)
from workload_manager.weights.sources import S3

SHOWN_MAX: Final = 2000  # settings and templates that are kept as they are shown
NAME_MAX: Final = 36  # so that names of drivers and jobs, which begin with it, are short enough
MODEL_MAX: Final = 200
REPLICAS_MAX: Final = 256
BOXES_MAX: Final = 1024  # of a replica
ORGS_MAX: Final = 1000
FOLDER_MAX: Final = 500
TEMPLATE_BYTES_MAX: Final = 64 << 10  # as JSON: the leader reads it with each decision
CHARACTERS_MAX: Final = 1 << 18
PROBLEMS_MAX: Final = 20
MASKED: Final = "(masked)"  # in place of a variable of an engine; no spec may say it
DEPTH_MAX: Final = 8
NODES_MAX: Final = 20_000
BYTES_PER_TOKEN_MAX: Final = (1 << 31) - 1
WORKLOAD_NAME: Final = rf"^[a-z0-9]([a-z0-9-]{{0,{NAME_MAX - 2}}}[a-z0-9])?$"
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER: Final[Any] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

T = TypeVar("T", bound=Struct)
WorkloadName = Annotated[str, Meta(pattern=whole(WORKLOAD_NAME), max_length=NAME_MAX)]
Slug = Annotated[str, Meta(pattern=whole(SLUG), max_length=48)]
ClientName = Annotated[str, Meta(min_length=1, max_length=MODEL_MAX, pattern=PRINTED)]
Family = Annotated[str, Meta(max_length=100, pattern=r"\A([A-Za-z0-9][A-Za-z0-9._-]*)?\Z")]
Folder = Annotated[str, Meta(max_length=FOLDER_MAX, pattern=PRINTED)]
Seconds = Annotated[float, Meta(gt=0, le=24 * 3600)]
PathName = Literal["require_rail", "prefer_rail", "any"]


class TokenizerSource(Document, frozen=True, kw_only=True):
    """A folder on the machines, a family that is there beforehand, or the hash of an upload: one of
    them."""

    folder: Folder = ""
    family: Family = ""
    sha256: Sha256 | None = None


class CacheSettings(Document, frozen=True, kw_only=True):
    """`enabled`: each replica has a driver, and memory of the fleet. Tiers, shares and TTL are those of
    the policies of its orgs."""

    enabled: bool = True


class Place(NamedTuple):
    """A bucket of a server. `endpoint`: empty for Amazon's."""

    endpoint: str
    bucket: str

    def __str__(self) -> str:
        return f"{S3}{self.bucket}" + (f" at {self.endpoint}" if self.endpoint else "")


def place_of(weights: WeightsSpec | None) -> Place | None:
    """The bucket that weights are read from; None for a folder."""
    if weights is None or not weights.source.startswith(S3):
        return None
    bucket = weights.source.removeprefix(S3).partition("/")[0]
    return Place(plain_endpoint(weights.endpoint or ""), bucket)


def plain_endpoint(endpoint: str) -> str:
    """One text for one server, however its host is written."""
    server, slashes, rest = endpoint.partition("://")
    host, slash, path = rest.partition("/")
    return f"{server}{slashes}{host.lower()}{slash}{path}".rstrip("/")


class LimitsSpec(Document, frozen=True, kw_only=True):
    """Of each instance on its machine: its manager, its engine and all that they start."""

    memory_bytes: Annotated[int, Meta(ge=64 << 20, le=1 << 50)] | None = None
    cpu_cores: Annotated[float, Meta(ge=0.1, le=4096)] | None = None


class SessionSettings(Document, frozen=True, kw_only=True):
    """Of the session under it. `path`: stricter than the rules. `bytes_per_token`: of one replica over
    all its boxes; plans go by it until its drivers have reported their layout."""

    path: PathName | None = None
    bytes_per_token: Annotated[int, Meta(ge=1, le=BYTES_PER_TOKEN_MAX)] | None = None


class RolloutSpec(Document, frozen=True, kw_only=True):
    """How a revision replaces another.

    `max_surge`: replicas that may have a second instance at a time. `max_unavailable`: replicas that may
    be without a ready instance at a time. `ready_seconds`: how long a new instance has to be ready
    before the next replica's turn. `deadline_seconds`: for each replica to become ready. `warm_seconds`:
    how long a new instance waits for the cache of the one that it replaces. A rollout is paused where
    new instances fail more requests than the others, by more than `error_rate_margin`, or where their
    time to first token is more than `ttft_ratio_max` times that of the others; both from `requests_min`
    requests on. `auto_rollback`: a rollout that is paused so, or misses its deadline, is rolled back.
    """

    max_surge: Annotated[int, Meta(ge=0, le=REPLICAS_MAX)] = 1
    max_unavailable: Annotated[int, Meta(ge=0, le=REPLICAS_MAX)] = 0
    ready_seconds: Annotated[float, Meta(ge=0, le=24 * 3600)] = 5.0
    deadline_seconds: Seconds = 600.0
    warm_seconds: Annotated[float, Meta(ge=0, le=24 * 3600)] = 60.0
    error_rate_margin: Annotated[float, Meta(gt=0, le=1)] = 0.02
    ttft_ratio_max: Annotated[float, Meta(gt=1, le=100)] = 1.5
    requests_min: Annotated[int, Meta(ge=1, le=1_000_000)] = 50
    auto_rollback: bool = True


class Template(Document, frozen=True, kw_only=True):
    """What an engine is started with. Equal templates have equal digests."""

    engine: EngineSpec
    tokens_max: Annotated[int, Meta(ge=2, le=TOKENS_MAX)]  # of a prompt and an answer, at least
    weights: WeightsSpec | None = None
    tokenizer: TokenizerSource | None = None
    limits: LimitsSpec = LimitsSpec()
    cache: CacheSettings = CacheSettings()

    @property
    def digest(self) -> str:
        text = msgspec.json.encode(spelled_out(self), order="deterministic")
        return hashlib.sha256(text).hexdigest()


class Settings(Document, frozen=True, kw_only=True):
    """What changes in place. `orgs`: those that may use the model."""

    orgs: Literal["all"] | tuple[Slug, ...]
    session: SessionSettings = SessionSettings()
    rollout: RolloutSpec = RolloutSpec()


class WorkloadSpec(Document, frozen=True, kw_only=True):
    """All of it. `org`: the owner, which alone may use the model; null: the platform. `orgs`: those that
    may use the model of a workload of the platform, by default all."""

    name: WorkloadName
    model: ClientName
    engine: EngineSpec
    tokens_max: Annotated[int, Meta(ge=2, le=TOKENS_MAX)]
    org: Slug | None = None
    orgs: (
        Literal["all"] | Annotated[tuple[Slug, ...], Meta(min_length=1, max_length=ORGS_MAX)] | None
    ) = None
    replicas: Annotated[int, Meta(ge=1, le=REPLICAS_MAX)] = 1
    boxes_per_replica: Annotated[int, Meta(ge=0, le=BOXES_MAX)] = 1
    weights: WeightsSpec | None = None
    tokenizer: TokenizerSource | None = None
    limits: LimitsSpec = LimitsSpec()
    cache: CacheSettings = CacheSettings()
    session: SessionSettings = SessionSettings()
    rollout: RolloutSpec = RolloutSpec()

    @property
    def template(self) -> Template:
        return Template(
            engine=self.engine,
            tokens_max=self.tokens_max,
            weights=self.weights,
            tokenizer=self.tokenizer,
            limits=self.limits,
            cache=self.cache,
        )

    @property
    def settings(self) -> Settings:
        return Settings(orgs=self.orgs_said, session=self.session, rollout=self.rollout)

    @property
    def orgs_said(self) -> Literal["all"] | tuple[str, ...]:
        if self.orgs is None:
            return "all" if self.org is None else (self.org,)
        return "all" if self.orgs == "all" else tuple(sorted(set(self.orgs)))

    @property
    def whole(self) -> WorkloadSpec:
        """The same, with orgs as they are said in full: equal meanings are equal specs."""
        return msgspec.structs.replace(self, orgs=self.orgs_said)

    @property
    def boxes(self) -> int:
        return self.replicas * self.boxes_per_replica

    @property
    def bytes_per_token(self) -> int | None:
        """Of one replica, as far as it is known before its engine has run."""
        if self.session.bytes_per_token is not None:
            return self.session.bytes_per_token
        if self.engine.kind != "emulator" or self.engine.emulator is None:
            return None
        emulator = self.engine.emulator
        return emulator.domains * emulator.bytes_per_token * (2 if emulator.window_tokens else 1)


FIXED: Final = ("name", "model", "org", "boxes_per_replica", "session")
OF_TEMPLATE: Final = tuple(Template.__struct_fields__)


@dataclass(frozen=True, slots=True)
class Problem:
    """`at`: where, as `rollout.max_surge`; empty: of the whole. `line`: 0 where there are no lines."""

    at: str
    sentence: str
    line: int = 0

    def __str__(self) -> str:
        place = f"line {self.line}, {self.at}" if self.line and self.at else self.at
        place = place or (f"line {self.line}" if self.line else "")
        return f"{place}: {self.sentence}" if place else self.sentence


class Wrong(ValueError):
    """All that is wrong with a spec, each with its line and its path."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems[:PROBLEMS_MAX]
        super().__init__("\n".join(map(str, self.problems)))


# Reading


def parse(text: str) -> WorkloadSpec:
    """A spec from YAML or JSON. Raises Wrong."""
    raw, lines = _loaded(text)
    return _convert(raw, lines)


def from_values(raw: Any) -> WorkloadSpec:
    """A spec from plain values, as JSON has them. Raises Wrong."""
    return _convert(raw, {})


def _convert(raw: Any, lines: Mapping[str, int]) -> WorkloadSpec:
    if not isinstance(raw, dict):
        raise Wrong([Problem("", "A spec is a mapping: `name: chat`, and so on.")])
    problems: list[Problem] = []

    def wrong(at: str, sentence: str) -> None:
        problems.append(Problem(at, sentence, _line(lines, at) if at else 0))

    values = _with_units(raw, "", wrong)
    fields = {one.encode_name: one for one in msgspec.structs.fields(WorkloadSpec)}
    read: dict[str, Any] = {}
    for name, value in values.items():
        if name not in fields:
            wrong(str(name), f"There is no such field. Fields are: {', '.join(fields)}.")
            continue
        try:
            read[name] = msgspec.convert(value, fields[name].type)
        except msgspec.ValidationError as error:
            wrong(*_of_msgspec(name, str(error)))
    for name, one in fields.items():
        if name not in values and one.required:
            wrong("", f"`{name}` is missing.")
    if problems:
        raise Wrong(problems)
    spec = WorkloadSpec(**read)
    for at, sentence in _contradictions(spec):
        wrong(at, sentence)
    if problems:
        raise Wrong(problems)
    return spec


# What patterns of fields ask for.
FORMS: Final = {
    get_args(kind)[1].pattern: words
    for kind, words in (
        (WorkloadName, f"lower-case letters, digits and dashes, no dash at an end, {NAME_MAX} at most"),
        (Slug, "lower-case letters, digits and dashes, and no dash at an end"),
        (Folder, "one line, without control characters"),
        (Family, "letters, digits, dots, dashes and underscores, with a letter or digit first"),
        (Url, "an address that begins with http:// or https://, without user, query and fragment"),
        (Sha256, "64 lower-case hexadecimal digits"),
        (Variable, "upper-case letters, digits and underscores, with no digit first"),
    )
}


def _of_msgspec(name: str, text: str) -> tuple[str, str]:
    sentence, _, path = text.partition(" - at `")  # of a key: `key` in `$.path`
    at = name + path.removeprefix("key` in `").removeprefix("$").rstrip("`").replace("[...]", "")
    kind = _kind_at(at)
    if sentence.startswith("Invalid enum value"):
        said = ", ".join(map(str, get_args(kind)))
        sentence = f"{sentence.removeprefix('Invalid enum value').strip()} is none of: {said}"
    elif sentence.startswith("Object contains unknown field"):
        fields = ", ".join(_fields(kind))
        unknown = sentence.removeprefix("Object contains unknown field").strip()
        sentence = f"There is no field {unknown}. Fields are: {fields}"
    elif at.rpartition(".")[2] in SIZES and (bound := re.search(r"([<>]=) (\d+)$", sentence)):
        than = "at least" if bound[1] == ">=" else "at most"
        sentence = f"It has to be {than} {shown_size(int(bound[2]))}"
    else:
        sentence = in_words(sentence, FORMS)
    return at, f"{sentence}."


def _kind_at(at: str) -> Any:
    """The type of a field of a spec, without what stands for its absence, by its path."""
    kind: Any = WorkloadSpec
    for name in re.sub(r"\[\d+\]", "", at).split("."):
        fields = _fields(kind)
        if name not in fields:
            break
        kind = _bare(fields[name])
    return kind


def _fields(kind: Any) -> dict[str, Any]:
    """Types by name, of a struct."""
    if not (isinstance(kind, type) and issubclass(kind, Struct)):
        return {}
    return {one.encode_name: one.type for one in msgspec.structs.fields(kind)}


def _bare(kind: Any) -> Any:
    """Of `Annotated` and of `X | None` what they are about."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _bare(get_args(kind)[0])
    if origin in (Union, UnionType):
        return _bare(next(one for one in get_args(kind) if one is not type(None)))
    return kind


def _contradictions(spec: WorkloadSpec) -> Iterator[tuple[str, str]]:
    """What each field may say, and all of them together may not."""
    for sentence in engine_problems(spec.engine, has_weights=spec.weights is not None):
        yield "engine", sentence
    for name, value in spec.engine.environment.items():
        if value == MASKED:
            yield (
                f"engine.environment.{name}",
                "This is a masked value, as viewers see it. Write the value itself.",
            )
    tokenizer = spec.tokenizer
    if tokenizer is not None:
        named = (tokenizer.folder, tokenizer.family, tokenizer.sha256)
        if sum(map(bool, named)) != 1:
            yield "tokenizer", "Name a family, a folder, or the sha256 of an uploaded tokenizer."
    if spec.cache.enabled and not spec.boxes_per_replica:
        yield (
            "boxes_per_replica",
            "A replica with a cache has at least one box. Write `cache: {enabled: false}` for none.",
        )
    if spec.org is not None and spec.orgs_said != (spec.org,):
        yield "orgs", "A workload of an org is for that org only. One of the platform can be shared."
    if (size := len(msgspec.json.encode(spec.template))) > TEMPLATE_BYTES_MAX:
        yield (
            "",
            f"What its engine is started with has {size} bytes as JSON: at most {TEMPLATE_BYTES_MAX}.",
        )
    if not spec.rollout.max_surge and not spec.rollout.max_unavailable:
        yield "rollout", "One of max_surge and max_unavailable has to be more than 0."


SIZES: Final = frozenset({"bytes_per_token", "memory_bytes"})


def _with_units(raw: Any, at: str, wrong: Any) -> Any:
    """The same values, with sizes and durations as numbers."""
    if isinstance(raw, list):
        return [_with_units(one, f"{at}[{place}]", wrong) for place, one in enumerate(raw)]
    if not isinstance(raw, dict):
        return raw
    found = {}
    for key, value in raw.items():
        path = f"{at}.{key}" if at else str(key)
        if isinstance(value, str) and isinstance(key, str):
            try:
                if key in SIZES:
                    value = parse_size(value)
                elif key.endswith("_seconds"):
                    value = parse_duration(value)
            except Unreadable as error:
                wrong(path, str(error))
                continue
        found[key] = _with_units(value, path, wrong)
    return found


def _line(lines: Mapping[str, int], at: str) -> int:
    """Of the field, or of what it would be in. Names are others', and may have any sign in them."""
    for _ in range(2 * DEPTH_MAX):
        if at in lines:
            break
        at = at[: max(at.rfind("."), at.rfind("["), 0)]
    return lines.get(at, 0)


# YAML


def _loaded(text: str) -> tuple[Any, dict[str, int]]:
    if len(text) > CHARACTERS_MAX:
        raise Wrong([Problem("", f"A spec has at most {CHARACTERS_MAX} characters.")])
    try:
        _check_shape(text)
        root = yaml.compose(text, Loader=_LOADER)
    except (yaml.YAMLError, UnicodeError) as error:
        mark = getattr(error, "problem_mark", None)
        said = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise Wrong([Problem("", f"{said}.", mark.line + 1 if mark else 0)]) from None
    if root is None:
        raise Wrong([Problem("", "The spec is empty.")])
    reader = _Reader()
    raw = reader.read(root, "")
    if reader.problems:
        raise Wrong(reader.problems)
    return raw, reader.lines


def _check_shape(text: str) -> None:
    """No aliases, which can make much of little, one document, and nothing deeper or larger than a spec
    is. Looked at before anything is built from it."""
    depth = documents = 0
    for count, event in enumerate(yaml.parse(text, Loader=_LOADER)):
        line = event.start_mark.line + 1 if event.start_mark else 0
        documents += isinstance(event, yaml.DocumentStartEvent)
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise Wrong([Problem("", f"Aliases (`*{event.anchor}`) are not read. Write it out.", line)])
        if documents > 1:
            raise Wrong([Problem("", "One spec at a time: this is a second document.", line)])
        if depth > DEPTH_MAX or count > NODES_MAX:
            raise Wrong([Problem("", "This is deeper or longer than a spec can be.", line)])


@dataclass
class _Reader:
    """From nodes to plain values, with the line of each. Scalars are read as JSON has them, so that
    `on`, `010` and `1:30` are the texts that they look like."""

    lines: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def read(self, node: yaml.Node, at: str) -> Any:
        self.lines[at] = node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, at)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(one, f"{at}[{place}]") for place, one in enumerate(node.value)]
        return _scalar(node)

    def _mapping(self, node: yaml.MappingNode, at: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self.problems.append(Problem(at, "A key is a name.", line))
                continue
            name = str(key.value)
            path = f"{at}.{name}" if at else name
            if name in found:
                self.problems.append(Problem(path, "It is said twice.", line))
            found[name] = self.read(value, path)
            self.lines[path] = line
        return found


_INTEGER: Final = re.compile(r"-?(0|[1-9][0-9]{0,18})")
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,3})?")
_WORDS: Final[Mapping[str, Any]] = {"": None, "~": None, "null": None, "true": True, "false": False}


def _scalar(node: yaml.Node) -> Any:
    text = str(node.value)
    if getattr(node, "style", None):  # quoted, or a block
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


# Writing


def spelled_out(value: Any) -> Any:
    """Plain values, with every field also where it has its default: what is stored keeps its meaning
    when a default changes."""
    if isinstance(value, Struct):
        return {name: spelled_out(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {str(key): spelled_out(each) for key, each in value.items()}
    return list(map(spelled_out, value)) if isinstance(value, tuple) else value


def shown(value: Any) -> Any:
    """Plain values for people: without what is null or empty, and without parts that say nothing."""
    if isinstance(value, Struct):
        found = {}
        for name in value.__struct_fields__:
            each = getattr(value, name)
            if each is None or isinstance(each, str | int):  # most are: lists have thousands
                if each not in (None, ""):
                    found[name] = each
            elif (said := shown(each)) not in ({}, []):
                found[name] = said
        return found
    if isinstance(value, dict):  # of people's own keys, such as variables, which may be empty
        return {str(key): shown(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [shown(one) for one in value]
    # 600 and 600.0 are the same, and people write the first; above this a float is not exact.
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53
    return int(value) if is_whole else value


def dump(spec: WorkloadSpec) -> str:
    """As YAML, which `parse` reads as the same spec."""
    order = ("name", "model", "org", "orgs", "replicas", "boxes_per_replica", "tokens_max")
    values = shown(spec)
    first = {name: values[name] for name in order if name in values}
    return as_yaml(first | {name: value for name, value in values.items() if name not in first})


def as_yaml(values: Mapping[str, Any]) -> str:
    """In the order of the values."""
    said = dict(values)
    text = yaml.dump(said, Dumper=_DUMPER, sort_keys=False, default_flow_style=False, width=100)
    return str(text)


@lru_cache(maxsize=SHOWN_MAX)
def shown_stored(kind: type[Settings | Template], stored: str | bytes) -> Mapping[str, Any]:
    """The same of JSON of what `spelled_out` made. Kept, since lists show the same ones again and again:
    don't change it."""
    found: dict[str, Any] = shown(decode(stored, kind, DOCUMENT))
    return found


def shown_whole(
    name: str,
    model: str,
    org: str | None,
    replicas: int,
    boxes_per_replica: int,
    settings: str | bytes,
    template: str | bytes,
) -> dict[str, Any]:
    """A spec for people, of its parts as they are stored. The outer one may be changed."""
    return {
        "name": name,
        "model": model,
        **({"org": org} if org else {}),
        "replicas": replicas,
        "boxes_per_replica": boxes_per_replica,
        **shown_stored(Settings, settings),
        **shown_stored(Template, template),
    }


def read(kind: type[T], stored: Mapping[str, Any]) -> T:
    """What `spelled_out` made."""
    return msgspec.convert(stored, kind)


def merged(spec: WorkloadSpec, patch: Mapping[str, Any]) -> WorkloadSpec:
    """The spec with a merge patch (RFC 7396) over it: null removes. Raises Wrong."""
    return from_values(_merge(spelled_out(spec), patch, 0))


def _merge(target: Any, patch: Any, depth: int) -> Any:
    if depth > DEPTH_MAX:
        raise Wrong([Problem("", "This is deeper than a spec can be.")])
    if not isinstance(patch, Mapping):
        return patch
    found = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = _merge(found.get(key), value, depth + 1)
    return found


def masked(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Variables of engines by their names only: they may be secret. Who applies it is refused, and does
    not set them to what is shown here."""
    engine = values["engine"]
    if "environment" not in engine:
        return values
    environment = dict.fromkeys(engine["environment"], MASKED)
    return {**values, "engine": {**engine, "environment": environment}}
