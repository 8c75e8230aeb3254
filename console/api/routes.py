"""Operations of the API: how they are described, and what they answer with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ninja

from console.api.problems import documented


class Router(ninja.Router):
    """The first line of an operation's docstring is its summary, the rest its description."""

    def add_api_operation(
        self, path: str, methods: list[str], view_func: Callable[..., Any], **options: Any
    ) -> None:
        super().add_api_operation(path, methods, view_func, **options)
        operation = self.path_operations[path].operations[-1]
        summary, _, description = operation.description.partition("\n")
        operation.summary, operation.description = summary.removesuffix("."), description.strip()


def answers(shown: object, *problems: int, status: int = 200) -> dict[Any, Any]:
    """For an operation's `response=`: what it answers with, and the statuses of its problems."""
    return {status: shown, **documented(*problems)}
