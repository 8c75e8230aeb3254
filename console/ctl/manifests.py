"""Manifests: documents in YAML or JSON, each with the kind and the name of a resource."""

from __future__ import annotations

import contextlib
import difflib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from console.ctl.catalogue import Reference, referred
from console.ctl.failures import Usage
from console.ctl.output import WITH_EXPONENT, yaml_of
from console.ctl.resources import BY_NAME, RESOURCES, Call, Resource, value_at
from telemetry.decoder import INTEGER_MAX, INTEGER_MIN, Limits, Malformed, decode_once

Fields = dict[str, Any]
STDIN: Final = "-"
SUFFIXES: Final = (".yaml", ".yml", ".json")
BYTES_MAX: Final = 4 << 20
DEPTH_MAX: Final = 32
NO: Final = "no"


class Manifest(NamedTuple):
    """`fields`: what is wanted, without kind and name. `source` says where it is from."""

    reference: Reference
    fields: Fields
    source: str


class _Loader(yaml.SafeLoader):
    """No aliases, which can make much of little, no name twice, and times stay texts."""

    yaml_implicit_resolvers = {
        sign: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for sign, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise self._wrong("aliases are not read: write it out")
        if self.depth >= DEPTH_MAX:
            raise self._wrong("it is nested too deep")
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def _wrong(self, problem: str) -> yaml.MarkedYAMLError:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001 - as it is inherited
        names: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise yaml.MarkedYAMLError(
                    problem="a name is a text: put it in quotes", problem_mark=key.start_mark
                )
            if key.value in names:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value!r} is there twice", problem_mark=key.start_mark
                )
            names.add(key.value)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(*WITH_EXPONENT)


def load(paths: Sequence[str]) -> list[Manifest]:
    """The manifests of files, of folders' files and of standard input (`-`). Raises Usage with the place
    of what is wrong."""
    found = [
        manifest for path in paths for source, text in _texts(path) for manifest in parse(text, source)
    ]
    if not found:
        raise Usage("There are no manifests in it.")
    seen: set[str] = set()
    for manifest in found:
        if str(manifest.reference) in seen:
            raise Usage(f"{manifest.source}: {manifest.reference} is there twice.")
        seen.add(str(manifest.reference))
    return found


def _texts(path: str) -> Iterator[tuple[str, str]]:
    try:
        if path == STDIN:
            yield "standard input", sys.stdin.buffer.read(BYTES_MAX + 1).decode()
            return
        there = Path(path)
        files = [there]
        if there.is_dir():
            files = sorted(one for one in there.iterdir() if one.suffix in SUFFIXES)
        for file in files:
            with file.open("rb") as opened:
                yield str(file), opened.read(BYTES_MAX + 1).decode()
    except UnicodeDecodeError as error:
        raise Usage(f"{path} is not UTF-8.") from error
    except OSError as error:
        raise Usage(f"{path} can't be read: {error.strerror}.") from error


def parse(text: str, source: str) -> list[Manifest]:
    if len(text) > BYTES_MAX:
        raise Usage(f"{source} is larger than 4 MiB.")
    try:
        documents = _json(text) or list(yaml.load_all(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise Usage(f"{source}{place}: {error.problem}.") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise Usage(f"{source} is not YAML: {error}.") from error
    items = [item for one in documents for item in (one if isinstance(one, list) else [one])]
    return [_manifest(item, source) for item in items if item is not None]


def _json(text: str) -> list[Any]:
    """Nothing if it is no JSON, or not right: YAML is almost a superset, and says where it is wrong."""
    with contextlib.suppress(Malformed):
        return [decode_once(text, Limits(BYTES_MAX, depth_max=DEPTH_MAX))]
    return []


def _manifest(item: object, source: str) -> Manifest:
    if not isinstance(item, dict) or not all(isinstance(name, str) for name in item):
        raise Usage(f"{source}: a manifest is a mapping with `kind`.")
    if odd := next(_odd(item), ""):
        raise Usage(f"{source}: {odd} that can be sent.")
    fields = dict(item)
    kind = fields.pop("kind", None)
    inner = BY_NAME[kind.lower()].inner if isinstance(kind, str) and kind.lower() in BY_NAME else ""
    if isinstance(fields.get(inner), dict):
        fields = {name: value for name, value in fields.items() if name == "name"} | fields[inner]
    resource = BY_NAME.get(kind.lower()) if isinstance(kind, str) else None
    if resource is None or not resource.is_applied:
        there = ", ".join(one.name for one in RESOURCES if one.is_applied)
        what = f"`kind: {kind}` can't be applied" if kind else "`kind` is missing"
        raise Usage(f"{source}: {what}. There are: {there}.")
    # YAML reads an unquoted `no` as false.
    fields |= {name: NO for name in resource.says_no if fields.get(name) is False}
    try:
        reference = _reference(resource, fields)
    except Usage as error:
        raise Usage(f"{source}: {error}") from error
    if unknown := sorted(fields.keys() - _known(resource)):
        raise Usage(f"{source}: a {resource.name} has no field `{unknown[0]}`.")
    return Manifest(reference, fields, source)


def _known(resource: Resource) -> set[str]:
    """The fields that a manifest of this kind may have."""
    calls = (resource.create, resource.update)
    return {resource.key, *resource.read_only, *(name for call in calls if call for name in call.fields)}


def _odd(value: object, name: str = "") -> Iterator[str]:
    """What JSON has not: `.nan`, `.inf` and numbers that no console reads, and halves of signs."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"`{name}` is no number"
    if isinstance(value, int) and not INTEGER_MIN <= value <= INTEGER_MAX:
        yield f"`{name}` is no number"
    if isinstance(value, str) and not _is_text(value):
        yield f"`{name}` is no text"
    inner: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = ((name, one) for one in value)
    for key, one in inner:
        if isinstance(value, dict) and not _is_text(str(key)):
            yield f"a name in `{name}` is none"
        yield from _odd(one, str(key))


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _reference(resource: Resource, fields: Fields) -> Reference:
    """Takes the fields that name it out of the others."""
    names = [
        *([resource.parent] if resource.parent else []),
        *([] if resource.single else [resource.key]),
    ]
    said = [fields.pop(name, None) for name in names]
    for name, value in zip(names, said, strict=True):
        if not isinstance(value, str) or not value:
            what = "is missing" if value in (None, "") else f"is {value!r}; put a text in quotes"
            raise Usage(f"`{name}` of this {resource.name} {what}.")
    return referred(resource, "/".join(said) or resource.name)


def writable(call: Call, fields: Mapping[str, Any]) -> Fields:
    """The fields that a call takes. Those that only the console writes are left out, so that what
    `get -o yaml` prints can be applied."""
    return {name: value for name, value in fields.items() if name in call.fields}


def current(resource: Resource, item: Mapping[str, Any], names: Sequence[str]) -> Fields:
    """What there is now, of these fields, as a manifest says it."""
    within = f"{resource.inner}." if resource.inner else ""
    paths = {name: resource.sources.get(name, within + name) for name in names}
    return {
        name: value_at(item, path)
        for name, path in paths.items()
        if path.partition(".")[0] in item and name != "reason"  # which is that of the last change
    }


def _plain(value: Any) -> Any:
    """With whole numbers as people write them: 1 and 1.0 are the same to the console."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal, and `true` is not 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def difference(reference: Reference, before: Fields | None, after: Fields) -> str:
    """A unified diff of the two as YAML; empty if they are equal."""
    old, new = ([] if one is None else yaml_of(_plain(one)).splitlines(True) for one in (before, after))
    return "".join(difflib.unified_diff(old, new, f"{reference} (now)", f"{reference} (applied)"))
