"""Which nodes a list shows: the same for the page and the API."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import Q, QuerySet

from console.fleet.models import Node

NOT_JOINED = "not joined"


@dataclass(frozen=True, slots=True)
class NodeFilters:
    q: str = ""
    state: str = ""  # of those that have joined; or NOT_JOINED
    stamp: str = ""
    leaf: str = ""
    label: str = ""  # `rack=7`, or `rack` for whatever value

    def apply(self, found: QuerySet[Node]) -> QuerySet[Node]:
        if self.q:
            found = found.filter(Q(name__contains=self.q) | Q(state_reason__icontains=self.q))
        if self.state:
            found = found.filter(joined_at__isnull=self.state == NOT_JOINED)
        if self.state and self.state != NOT_JOINED:
            found = found.filter(state=self.state)
        if self.stamp:
            found = found.filter(stamp__name=self.stamp)
        if self.leaf:
            found = found.filter(nics__leaf__name=self.leaf).distinct()
        if self.label:
            name, separator, value = self.label.partition("=")
            asked = {"labels__contains": {name: value}} if separator else {"labels__has_key": name}
            found = found.filter(**asked)
        return found

    @property
    def are_set(self) -> bool:
        return any((self.q, self.state, self.stamp, self.leaf, self.label))
