"""Operations of the API: how they are described, and what they answer with."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Final

import ninja
from django.http import HttpRequest
from ninja.errors import ValidationError
from ninja.params.models import ParamModel, QueryModel
from pydantic import BaseModel, create_model

from console.api.problems import Problem

# What checks and writes a schema is made when it is first used, by pydantic, under a lock of its own. To
# make all of them took half of the time in which a web process loads the API, and most are never used.
_BASES: Final[tuple[type[BaseModel], ...]] = (ninja.Schema, *ParamModel.__subclasses__())
UNKNOWN: Final = "extra_forbidden"  # as pydantic calls what a body has and its schema has not
for _base in _BASES:
    _base.model_config["defer_build"] = True


class Router(ninja.Router):
    """The first line of an operation's docstring is its summary, the rest its description."""

    def add_api_operation(
        self, path: str, methods: list[str], view_func: Callable[..., Any], **options: Any
    ) -> None:
        """`response`: what it answers with, or that by status."""
        response = options.pop("response")
        super().add_api_operation(path, methods, view_func, **options)
        operation = self.path_operations[path].operations[-1]
        operation.view_func = _knowing(operation.models, view_func)
        by_status = response if isinstance(response, dict) else {200: response}
        operation.response_models = {status: _answer(shown) for status, shown in by_status.items()}
        summary, _, description = operation.description.partition("\n")
        operation.summary, operation.description = summary.removesuffix("."), description.strip()


def _knowing(models: list[Any], view_func: Callable[..., Any]) -> Callable[..., Any]:
    """A view that refuses parameters of the query that it does not know: a typo, as it is in a body."""
    known = {name for one in models if issubclass(one, QueryModel) for name in one.__ninja_flatten_map__}

    @wraps(view_func)
    def view(request: HttpRequest, **values: Any) -> Any:
        if unknown := request.GET.keys() - known:
            said = f"There is no such parameter; there are {', '.join(sorted(known)) or 'none'}."
            raise ValidationError(
                [{"type": UNKNOWN, "loc": ("query", name), "msg": said} for name in sorted(unknown)]
            )
        return view_func(request, **values)

    return view


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


def documented(*statuses: int) -> dict[Any, Any]:
    """For an operation's `response=`: the statuses every operation may answer, and these."""
    return dict.fromkeys((400, 401, 403, 422, *statuses), Problem)
