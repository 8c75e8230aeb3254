"""What a replica gets: path, headers and body of a request, with a claim for its driver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

import msgspec
from msgspec.structs import replace

from inference_brain.api import requests
from inference_brain.api.requests import Chat, Completion, Generation, StreamOptions
from inference_brain.desired import DriverSpec, OrgSpec
from inference_brain.upstream.fleet import Replica
from swdriver_shim.adapters.claims import SECONDS as CLAIM_SECONDS
from swdriver_shim.adapters.claims import mint
from swdriver_shim.keys import isolation_tag
from swdriver_shim.policy import AS_USUAL, Rules

CLAIM_KEPT_SECONDS: Final = CLAIM_SECONDS // 3  # a claim without rules of its own is used again
CLAIMS_KEPT: Final = 10_000
_KNOW_SALTS: Final = frozenset({"vllm", "sglang"})
_ALWAYS_TELL_USAGE: Final = frozenset({"vllm", "sglang"})


class Claims:
    """Mints claims. Those without rules are kept for a while: they say the same for all requests of an
    org."""

    def __init__(self) -> None:
        self._kept: dict[tuple[bytes, str, str, str], tuple[float, str]] = {}

    def mint(
        self, driver: DriverSpec, org: str, rules: Rules, now: float, sibling: str = ""
    ) -> str | None:
        """For a driver; None if it takes no claims. `sibling`: whom it is to borrow the prompt from."""
        if driver.claims_key is None:
            return None
        if rules != AS_USUAL:
            return mint(driver.claims_key, driver.name, org, rules, sibling=sibling, now=now)
        key = (driver.claims_key, driver.name, org, sibling)
        at, claim = self._kept.get(key, (0.0, ""))
        if not claim or not at <= now < at + CLAIM_KEPT_SECONDS:
            if len(self._kept) >= CLAIMS_KEPT:
                self._kept.clear()
            claim = mint(driver.claims_key, driver.name, org, sibling=sibling, now=now)
            self._kept[key] = now, claim
        return claim


def body_for(
    replica: Replica, request: Generation, org: OrgSpec, claim: str | None, tokens: Iterable[int] | None
) -> bytes:
    """The body as this replica gets it. `tokens`: of its prompt, if they are known."""
    spec = replica.spec
    sent = requests.sent_on(request)
    sent.model = replica.served_as
    if claim is not None:
        sent.kv_transfer_params = {"tidegate": claim}
    if spec.engine in _KNOW_SALTS:
        sent.cache_salt = salt_of(org)  # the engine's own cache is not shared between orgs either
    if request.is_stream and spec.engine in _ALWAYS_TELL_USAGE:
        asked = request.stream_options
        options = asked if isinstance(asked, StreamOptions) else StreamOptions()
        sent.stream_options = replace(options, include_usage=True, include_obfuscation=False)
    if tokens is not None and isinstance(sent, Completion) and takes_tokens(replica, request):
        sent.prompt = list(tokens)
    return msgspec.json.encode(sent)


def takes_tokens(replica: Replica, request: Generation) -> bool:
    """Whether this replica may get the prompt as tokens. Those who want the prompt's text in the answer,
    or after it, need an engine that has it."""
    return (
        replica.spec.engine in _ALWAYS_TELL_USAGE
        and isinstance(request, Completion)
        and isinstance(request.prompt, str)
        and request.echo is not True
        and not isinstance(request.suffix, str)
    )


def headers_for(replica: Replica, request_id: str, trace: Mapping[str, str]) -> dict[str, str]:
    made = {
        "content-type": "application/json",
        "accept": "*/*",
        "x-request-id": request_id,
        **trace,
    }
    if replica.spec.api_key:
        made["authorization"] = f"Bearer {replica.spec.api_key}"
    return made


def path_of(request: Generation) -> str:
    return "/v1/chat/completions" if isinstance(request, Chat) else "/v1/completions"


def salt_of(org: OrgSpec) -> str:
    """What separates an org's prompts in an engine's own cache. It does not reveal the org."""
    return _salt(org.name, org.secret)


@lru_cache(maxsize=4096)
def _salt(org: str, secret: bytes) -> str:
    return isolation_tag(org, secret).hex()
