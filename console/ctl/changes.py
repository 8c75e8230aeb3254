"""Changing resources: apply, diff, delete, and the actions of the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from console.ctl.catalogue import Reference, fetch
from console.ctl.client import Answer, Client, Item, at
from console.ctl.failures import NotFound, Usage
from console.ctl.manifests import Fields, Manifest, current, difference, is_same, writable
from console.ctl.resources import Call, named

REASON: Final = "reason"
MERGED: Final = "PUT"  # replaces all, so what a manifest leaves out is sent as it is


class Change(NamedTuple):
    """A request that has to be made; `body` None where nothing differs."""

    manifest: Manifest
    call: Call
    body: Fields | None
    before: Fields | None  # None: there is no such resource yet
    after: Fields
    etag: str

    @property
    def verb(self) -> str:
        return "unchanged" if self.body is None else "created" if self.before is None else "configured"

    def __str__(self) -> str:
        return difference(self.manifest.reference, self.before, self.after)


def planned(client: Client, manifest: Manifest, reason: str) -> Change:
    """What a manifest changes. Fields that it leaves out stay as they are. Raises Usage for a field that
    can't be changed."""
    resource = manifest.reference.resource
    try:
        found = fetch(client, manifest.reference)
    except NotFound:
        if resource.create is None:
            raise
        return _creation(manifest, resource.create, reason)
    said = {name: value for name, value in _all_writable(manifest).items() if name != REASON}
    fixed = resource.create.fields if resource.create else ()
    call = resource.update or Call("PATCH")
    there = current(resource, found.item, sorted({*fixed, *call.fields}))
    wanted = {
        name: merged(there.get(name), value) if call.wrap else value for name, value in said.items()
    }
    differing = {
        name for name, value in wanted.items() if name not in there or not is_same(there[name], value)
    }
    if stuck := sorted(differing - set(call.fields)):
        raise Usage(
            f"{manifest.source}: `{stuck[0]}` of {manifest.reference} can't be changed: it is "
            f"{there.get(stuck[0])!r}, and not {wanted[stuck[0]]!r}."
        )
    before = {name: value for name, value in there.items() if name in call.fields}
    after = {**before, **{name: wanted[name] for name in wanted if name in call.fields}}
    if not differing:
        return Change(manifest, call, None, before, after, found.etag)
    body = after if call.method == MERGED else {name: said[name] for name in sorted(differing)}
    body = _with_reason(body, call, str(manifest.fields.get(REASON) or ""), reason)
    return Change(manifest, call, body, before, after, found.etag)


def _creation(manifest: Manifest, call: Call, reason: str) -> Change:
    resource, _, name = manifest.reference
    fields = writable(call, manifest.fields)
    own = {resource.key: name} if resource.key in call.fields else {}
    written = str(fields.pop(REASON, ""))
    body = _with_reason({**own, **fields}, call, written, reason)
    after = {name: value for name, value in (own | fields).items() if name != REASON}
    return Change(manifest, call, body, None, after, "")


def _all_writable(manifest: Manifest) -> Fields:
    resource = manifest.reference.resource
    every = Call("", fields=tuple({*_fields(resource.create), *_fields(resource.update)}))
    return writable(every, manifest.fields)


def merged(there: Any, wanted: Any) -> Any:
    """What a merge patch (RFC 7396) makes of it."""
    if not isinstance(wanted, dict):
        return wanted
    made = dict(there) if isinstance(there, dict) else {}
    for name, value in wanted.items():
        if value is None:
            made.pop(name, None)
        else:
            made[name] = merged(made.get(name), value)
    return made


def _fields(call: Call | None) -> tuple[str, ...]:
    return call.fields if call else ()


def _with_reason(body: Fields, call: Call, written: str, given: str) -> Fields:
    reason = given or written
    told = {call.wrap: body} if call.wrap else body
    return {**told, REASON: reason} if reason and REASON in call.fields else told


def make(client: Client, change: Change, *, dry_run: bool) -> Answer:
    """Send it. A dry run is checked by the console, and changes nothing."""
    return send(
        client, change.manifest.reference, change.call, change.body or {}, change.etag, dry_run=dry_run
    )


def send(
    client: Client,
    reference: Reference,
    call: Call,
    body: Mapping[str, Any],
    etag: str = "",
    *,
    dry_run: bool = False,
    query: Mapping[str, Any] | None = None,
) -> Answer:
    """Make this call of a resource, naming the ETag that it has to name."""
    resource, parent, _ = reference
    if dry_run and not call.dry:
        raise Usage(f"The console has no dry run of this for a {resource.name}.")
    if call.match == "self" and not etag:
        etag = fetch(client, reference).etag
    if call.match == "parent":
        etag = fetch(client, Reference(named(resource.parent), "", parent)).etag
    return client.ask(
        call.method,
        path_of(reference, call),
        query={**(query or {}), **({"validate_only": True} if dry_run else {})},
        body=None if call.method == "DELETE" else {**call.body, **body},
        if_match=etag or None,
    )


def path_of(reference: Reference, call: Call) -> str:
    """The list's path for what creates one, and else the item's, with what the call adds."""
    resource, parent, name = reference
    parents = [parent] if resource.parent else []
    if resource.single:
        return at(resource.path, *parents) + call.path
    if call is resource.create and not call.path:
        return at(resource.path, *parents)
    if call.path.startswith("/{"):
        return at(resource.path + call.path, *parents, name)
    return at(f"{resource.path}/{{{resource.key}}}", *parents, name) + call.path


def body_of(call: Call, fields: Fields, reason: str) -> Fields:
    """The body of an action, with only the fields that it takes. Raises Usage for others."""
    if unknown := [name for name in fields if name not in call.fields]:
        raise Usage(f"It takes no --{unknown[0].replace('_', '-')}.")
    return _with_reason(fields, call, "", reason)


def operation_of(answer: Answer) -> Item | None:
    """The operation that an answer tells of, if it has begun one."""
    body = answer.body
    if answer.status != 202 or not isinstance(body, dict) or "progress" not in body:
        return None
    return body
