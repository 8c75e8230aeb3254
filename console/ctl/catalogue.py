"""Reading resources of the table: by name, as lists, and what belongs to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from console.ctl.client import Client, Item, at
from console.ctl.failures import NotFound, Refused, Usage
from console.ctl.resources import BY_NAME, Resource, named


class Reference(NamedTuple):
    """One resource, as it was named: `node/ax-1`, `job/chat/job-1`."""

    resource: Resource
    parent: str
    name: str

    def __str__(self) -> str:
        parts = [self.resource.name, *([self.parent] if self.resource.parent else [])]
        return "/".join(parts if self.resource.single else [*parts, self.name])


class Found(NamedTuple):
    """An item with its ETag, which is empty where it has none."""

    item: Item
    etag: str


def referred(resource: Resource, name: str) -> Reference:
    """Raises Usage for a name that can't be one of this resource."""
    if not name:
        raise Usage(f"A {resource.name} has a name.")
    if not resource.parent:
        return Reference(resource, "", name)
    if resource.single:
        return Reference(resource, name, name)
    parent, _, own = name.partition("/")
    if not parent or not own:
        raise Usage(
            f"A {resource.name} is named by its {resource.parent} and itself: {resource.parent}/NAME"
        )
    return Reference(resource, parent, own)


def references(words: list[str], default: str = "") -> list[Reference]:
    """What `KIND NAME…` and `KIND/NAME…` name; without a kind it is the default one."""
    if len(words) > 1 and "/" not in words[0] and words[0] in BY_NAME:
        resource = named(words[0])
        return [referred(resource, name.removeprefix(f"{resource.name}/")) for name in words[1:]]
    found = []
    for word in words:
        kind, slash, name = word.partition("/")
        if slash and kind in BY_NAME:
            found.append(referred(named(kind), name))
        elif default:
            found.append(referred(named(default), word))
        elif BY_NAME.get(word) and BY_NAME[word].single and not BY_NAME[word].parent:
            found.append(Reference(BY_NAME[word], "", word))
        else:
            raise Usage(f"Say what it is: KIND {word}, or KIND/{word}.")
    return found


def fetch(client: Client, reference: Reference) -> Found:
    """One item. Raises NotFound, also where only a list tells of it."""
    resource, parent, name = reference
    names = (*([parent] if resource.parent else []), *([] if resource.single else [name]))
    if resource.item_path is not None:
        try:
            answer = client.ask("GET", at(resource.item_path, *names))
        except Refused as error:
            if error.status != 404:
                raise
            raise NotFound(f"There is no {reference}, or you may not see it.") from error
        item = client.as_kind(answer.body, Item)
        return Found(with_kind(resource, item, parent), answer.etag)
    for item in listed(client, resource, parent=parent):
        if str(item[resource.key]) == name:
            return Found(item, "")
    raise NotFound(f"There is no {reference}, or you may not see it.")


def listed(
    client: Client,
    resource: Resource,
    query: Mapping[str, Any] | None = None,
    *,
    parent: str = "",
    most: int | None = None,
) -> Iterator[Item]:
    """Items of a list; without a parent's name, those of all parents."""
    if resource.parent and not parent:
        above = named(resource.parent)
        for one in listed(client, above):
            yield from listed(client, resource, query, parent=str(one[above.key]), most=most)
        return
    names = [parent] if resource.parent else []
    if resource.single:
        yield fetch(client, Reference(resource, parent, parent)).item
        return
    if resource.within:
        above = named(resource.parent)
        found = fetch(client, Reference(above, "", parent)).item[resource.within]
    elif resource.paged:
        found = client.items(at(resource.path, *names), query or {}, most)
    else:
        found = client.as_kind(client.get(at(resource.path, *names), **(query or {})), list[Item])
    for item in found:
        yield with_kind(resource, item, parent)


def with_kind(resource: Resource, item: Item, parent: str) -> Item:
    """The item as a manifest has it: first of what kind it is, and whose."""
    kind = {} if "kind" in item else {"kind": resource.name}
    return {**kind, **({resource.parent: parent} if resource.parent else {}), **item}
