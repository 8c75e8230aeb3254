"""What a replica gets: path, headers and body of a request, with a claim for its driver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from inference_brain.api.requests import Chat, Completion, Generation, StreamOptions, sent_on
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
        self._kept: dict[tuple[bytes, str, str], tuple[float, str]] = {}

    def mint(self, driver: DriverSpec, org: str, rules: Rules, now: float) -> str | None:
        """For a driver; None if it takes no claims."""
        if driver.claims_key is None:
            return None
        if rules != AS_USUAL:
            return mint(driver.claims_key, driver.name, org, rules, now=now)
        key = (driver.claims_key, driver.name, org)
        at, claim = self._kept.get(key, (0.0, ""))
        if not claim or not at <= now < at + CLAIM_KEPT_SECONDS:
            if len(self._kept) >= CLAIMS_KEPT:
                self._kept.clear()
            claim = mint(driver.claims_key, driver.name, org, now=now)
            self._kept[key] = now, claim
        return claim


def body_for(
    replica: Replica, request: Generation, org: OrgSpec, claim: str | None, tokens: Iterable[int] | None
) -> bytes:
    """The body as this replica gets it. `tokens`: of its prompt, if they are known."""
    spec = replica.spec
    more: dict[str, Any] = {"model": replica.served_as}
    if claim is not None:
        more["kv_transfer_params"] = {"tidegate": claim}
    if spec.engine in _KNOW_SALTS:
        more["cache_salt"] = salt_of(org)  # the engine's own cache is not shared between orgs either
    if request.is_stream and spec.engine in _ALWAYS_TELL_USAGE:
        asked = request.stream_options
        options = asked if isinstance(asked, StreamOptions) else StreamOptions()
        more["stream_options"] = {
            "include_usage": True,
            **({"continuous_usage_stats": True} if options.continuous_usage_stats else {}),
        }
    if tokens is not None and takes_tokens(replica, request):
        more["prompt"] = list(tokens)
    return sent_on(request, more)


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
    return isolation_tag(org.name, org.secret).hex()
