"""Removing: done once every holder has removed what it had."""

from __future__ import annotations

from collections.abc import Sequence

from kvss_agent.redundancy.parts.holders import need
from kvss_agent.redundancy.parts.state import State
from kvss_agent.tier2.address import Scope, address_of
from kvss_agent.tier2.backend import Failed, Removed


class Remover:
    """All of it raises Failed while a holder can't be asked."""

    def __init__(self, state: State) -> None:
        self._state, self._code, self._holders = state, state.code, state.holders

    def delete(self, names: Sequence[str]) -> None:
        """See `Backend`."""
        addresses = [address_of(name) for name in names]
        answers = self._holders.delete(addresses)
        self._state.incomplete.forget(addresses)
        need(answers, self._code.fragments)

    def purge(self, scope: Scope) -> Removed:
        """See `Backend`. Also fragments that make no file."""
        if scope.namespace not in (None, self._state.namespace):
            return Removed(0, 0)
        tags = [scope.tag] if scope.tag else self._tags()
        files = size = 0
        for tag in tags:
            answers = self._holders.each(lambda holder, _: holder.purge(tag))  # noqa: B023
            need(answers, self._code.fragments)
            removed = [answer for answer in answers.values() if not isinstance(answer, Failed)]
            files += max(its_files for its_files, _ in removed)
            size += sum(its_bytes for _, its_bytes in removed)
        self._state.incomplete.forget_scope(scope)
        return Removed(files, size)

    def _tags(self) -> list[bytes]:
        """Of all fragments, also of those that make no file. Raises Failed if a holder is away."""
        answers = self._holders.each(lambda holder, _: {one.tag for one in holder.listed()})
        need(answers, self._code.fragments)
        return sorted(set().union(*(one for one in answers.values() if not isinstance(one, Failed))))
