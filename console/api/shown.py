"""How answers show what a schema reads from models: related objects by one of their attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, TypeVar

from pydantic import BaseModel, BeforeValidator

from console.accounts.browser import SignedInRequest

# What resolvers of schemas get as `context`, besides what they read from.
Context = Mapping[str, SignedInRequest]
S = TypeVar("S", bound=BaseModel)


def read(schema: type[S], found: object, request: SignedInRequest) -> S:
    """What the API would make of it, if a view returned it."""
    return schema.model_validate(found, context={"request": request})


def by(attribute: str) -> BeforeValidator:
    """Show an object by this attribute; what has none, as null or text, as it is."""
    return BeforeValidator(lambda value: getattr(value, attribute, value))


OR_NULL: Final = BeforeValidator(lambda value: value or None)

KeyOf = Annotated[int, by("pk")]
NameOf = Annotated[str, by("name")]
SlugOf = Annotated[str, by("slug")]
UsernameOf = Annotated[str, by("username")]
PrefixOf = Annotated[str, by("prefix")]
