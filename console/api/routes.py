"""Operations of the API: how they are described, and what they answer with."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import ninja
from pydantic import create_model

from console.api.problems import documented


class Router(ninja.Router):
    """The first line of an operation's docstring is its summary, the rest its description."""

    def add_api_operation(
        self, path: str, methods: list[str], view_func: Callable[..., Any], **options: Any
    ) -> None:
        """`response`: what it answers with, or that by status."""
        response = options.pop("response")
        super().add_api_operation(path, methods, view_func, **options)
        operation = self.path_operations[path].operations[-1]
        by_status = response if isinstance(response, dict) else {200: response}
        operation.response_models = {status: _answer(shown) for status, shown in by_status.items()}
        summary, _, description = operation.description.partition("\n")
        operation.summary, operation.description = summary.removesuffix("."), description.strip()


class Answer(ninja.Schema):
    """What ninja puts around an answer: the field `response`."""

    @classmethod
    def model_json_schema(cls, *options: Any, **named: Any) -> dict[str, Any]:
        """A schema, which callers must not change."""
        return cls._schema(*options, **named)

    @classmethod
    @cache
    def _schema(cls, *options: Any, **named: Any) -> dict[str, Any]:
        return super().model_json_schema(*options, **named)


@cache
def _answer(shown: Any) -> type[Answer] | None:
    """The model of all answers that show this. Ninja would make one for each status of each operation,
    most of them for the same problem document, and each costs a millisecond, and two to be described."""
    return None if shown is None else create_model("AnswerOf", __base__=Answer, response=(shown, ...))


def answers(shown: object, *problems: int, status: int = 200) -> dict[Any, Any]:
    """For an operation's `response=`: what it answers with, and the statuses of its problems."""
    return {status: shown, **documented(*problems)}
