"""Explanations for the controller of why an org's prompt was hit or missed, by the name of a request, by
tokens, or by the keys of columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from http import HTTPStatus
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from kvss_agent.documents import Invalid
from kvss_agent.http.api import Refused
from swdriver_shim.cache.misses import ColumnState
from swdriver_shim.cache.request_log import PromptKeys, RequestRecord
from swdriver_shim.daemon.shim import Shim
from swdriver_shim.daemon.verbs import TOKENS_MAX, RequestName, Token
from swdriver_shim.desired import OrgSpec
from swdriver_shim.keys import KEY_BYTES

KEYS_MAX: Final = 65_536
NEWEST: Final = 20

Key = Annotated[str, Meta(pattern=f"^[0-9a-f]{{{2 * KEY_BYTES}}}$")]


class ExplainOrgBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An org, and one of: the name of a request, tokens, the keys of columns in hex."""

    org: Annotated[str, Meta(min_length=1, max_length=200)]
    request: RequestName = ""
    tokens: Annotated[list[Token], Meta(max_length=TOKENS_MAX)] = []
    keys: Annotated[list[Key], Meta(max_length=KEYS_MAX)] = []
    adapter: Annotated[str, Meta(max_length=500)] = ""


def explain(shim: Shim, body: ExplainOrgBody) -> dict[str, Any]:
    """Raises Refused for an org or a request that is not known here, Invalid unless one is named."""
    if sum(map(bool, (body.request, body.tokens, body.keys))) != 1:
        raise Invalid("Give one of: request, tokens, keys.")
    org = org_of(shim, body.org)
    result: dict[str, Any] | None = None
    if body.request:
        found = shim.driver.find_request(org.name, body.request)
        if found is None:
            sentence = (
                f"This driver knows no request {body.request}: it is too old, or was served elsewhere."
            )
            raise Refused(HTTPStatus.NOT_FOUND, sentence)
        result = _result(*found)
        groups = shim.driver.explain_keys(PromptKeys(found[0].maker, found[0].keys))
    elif body.keys:
        keys = [bytes.fromhex(key) for key in body.keys]
        groups = shim.driver.explain_keys(PromptKeys(shim.keys(org, body.adapter), keys))
    else:
        groups = shim.driver.explain(shim.keys(org, body.adapter).prompt(body.tokens))
    return {"result": result, "groups": _told(groups), "homes": shim.shards.shown()}


def newest(shim: Shim, org: str) -> list[dict[str, Any]]:
    """The latest requests with a name."""
    org_of(shim, org)
    return [_result(*found) for found in shim.driver.newest_requests(org, NEWEST)]


def org_of(shim: Shim, name: str) -> OrgSpec:
    """Raises Refused for an org that the document does not have."""
    org = shim.org(name)
    if org is None:
        raise Refused(HTTPStatus.NOT_FOUND, "This driver's document does not have this org.")
    return org


def _result(one: RequestRecord, age_seconds: float) -> dict[str, Any]:
    """The result of the request when it was served."""
    return {
        "request": one.request,
        "age_seconds": age_seconds,
        "asked_tokens": one.asked,
        "hit_tokens": one.hit,
        "missed_tokens": {reason.value: tokens for reason, tokens in one.missed.items() if tokens},
        "adapter": one.maker.namespace.adapter,
        "columns": [{"outcome": outcome, "columns": count} for outcome, count in one.runs()],
    }


def _told(groups: Mapping[str, Sequence[ColumnState]]) -> dict[str, Any]:
    return {group: [asdict(one) for one in columns] for group, columns in groups.items()}
