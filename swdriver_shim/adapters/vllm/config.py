"""What an engine's configuration says of its driver: the console that it joins, or a file.

    {"console": "https://console.example.org", "join": "/run/secrets/join", "name": "job7"}

With a console the rest comes from there, see `joining`. Without one a file says it all: the driver, its
orgs and its agents.

    {
      "driver": "job7", "secret": "…base64…",
      "model": {"name": "llama", "revision": "r1"},
      "orgs": [{"name": "acme", "secret": "…base64…", "policies": {"policy": {"tiers": "dram+tier2"}}}],
      "claims_key": "…base64…",
      "agent": {"url": "http://127.0.0.1:8410", "token": "…", "address": "unix:.kvss/data.sock",
                "memory_bytes": 8589934592}
    }

The shape of the KV is not in it: the engine knows that. Instead of an `agent` of its own, on which the
engine creates shards, the file may have `homes`, as in a driver's desired document: shards that were
granted before, with the sizes that the engine names when it refuses others.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, field

from kvss_agent.data_plane.address import Address
from kvss_agent.data_plane.constants import SECRET_BYTES_MIN
from kvss_agent.desired import Document, Name
from kvss_agent.documents import Invalid, decode
from kvss_agent.process.options import redis_url
from kvss_agent.process.settings import REDIS_URL
from swdriver_shim.adapters.join_config import RANK, JoinConfig, NameSpec
from swdriver_shim.adapters.vllm.blocks import Unsupported
from swdriver_shim.desired import (
    CLAIMS_KEY_BYTES_MIN,
    Desired,
    HomeSpec,
    ModelSpec,
    OrgSpec,
    Text,
    parse,
)
from swdriver_shim.layout import SHARDS_MAX

WAIT_SECONDS: Final = 0.2
WAIT_SECONDS_MAX: Final = 60.0
SECRET_BYTES: Final = 32

Secret = Annotated[bytes, Meta(min_length=SECRET_BYTES_MIN, max_length=256)]


class AgentSpec(Document, frozen=True):
    """An agent that serves this engine only, with the token of its API. The engine creates shards of so
    many bytes there. `tier2` is passed to the agent unchanged."""

    url: Annotated[str, Meta(pattern=r"^https?://", max_length=500)]
    token: Annotated[str, Meta(min_length=20, max_length=500)]
    address: Annotated[str, Meta(max_length=500)]
    memory_bytes: Annotated[int, Meta(ge=1 << 20)]
    tier2: dict[str, Any] | None = None


class ApiSpec(Document, frozen=True):
    """The address of the driver's own API, and the controller's token."""

    host: str
    port: Annotated[int, Meta(ge=1, lt=65536)]
    token: Annotated[str, Meta(min_length=20, max_length=500)]


class EngineConfig(Document, frozen=True):
    driver: Name
    secret: Secret  # which agents know it by
    model: NameSpec
    claims_key: Annotated[bytes, Meta(min_length=CLAIMS_KEY_BYTES_MIN, max_length=256)]
    orgs: Annotated[tuple[OrgSpec, ...], Meta(min_length=1)]
    agent: AgentSpec | None = None
    homes: Annotated[tuple[HomeSpec, ...], Meta(max_length=SHARDS_MAX)] = field(default_factory=tuple)
    # The org of requests without a valid claim; not cached by default. It can't be claimed, so that
    # only such requests share its columns.
    unsigned_org: Name | None = None
    # How long a request waits for tier 2, at most.
    wait_seconds: Annotated[float, Meta(ge=0, le=WAIT_SECONDS_MAX)] = WAIT_SECONDS
    # Compute what takes longer to load than to compute, as measured.
    only_if_faster: bool = True
    # Files of a LoRA adapter are never changed in place: see `AdapterNames`.
    fixed_adapters: bool = False
    api: ApiSpec | None = None
    # URL of the Redis that receives telemetry, as the daemon's `--telemetry`.
    telemetry: Text | None = None
    # Where the engine's state is saved for its next start, so that columns in agents' memory outlive a
    # restart. Without it only tier 2 does.
    state_dir: Annotated[str, Meta(max_length=4096)] | None = None
    generation: Annotated[int, Meta(ge=1)] = 1

    def desired(self, model: ModelSpec, homes: tuple[HomeSpec, ...]) -> Desired:
        """The driver's document, checked as one. Raises Invalid."""
        return parse(
            msgspec.json.encode(
                Desired(
                    generation=self.generation,
                    driver=self.driver,
                    secret=self.secret,
                    model=model,
                    homes=homes,
                    orgs=self.orgs,
                )
            )
        )


_DECODER: Final = msgspec.json.Decoder(EngineConfig)


class GovernedConfig(JoinConfig, frozen=True):
    """The console that a vLLM joins. `model`: the weights; by default those that vLLM loads. All
    else is as in `EngineConfig`."""

    model: NameSpec | None = None
    unsigned_org: Name | None = None
    wait_seconds: Annotated[float, Meta(ge=0, le=WAIT_SECONDS_MAX)] = WAIT_SECONDS
    only_if_faster: bool = True
    fixed_adapters: bool = False


def config_of(given: object, rank: int, engines: int) -> EngineConfig | GovernedConfig:
    """The value of `tidegate` in `kv_connector_extra_config`, for one of so many data-parallel engines.
    Raises Invalid, and Unsupported where engines would share a driver."""
    if isinstance(given, str) and given:
        return read(file_of(given, rank, engines))
    if not isinstance(given, dict):
        raise Invalid(
            'kv_connector_extra_config names a console or a file: {"tidegate": {"console": "https://…", '
            '"join": "/run/secrets/join", "name": "job7"}}, or {"tidegate": "/etc/tidegate/job7.json"}.'
        )
    try:
        found: GovernedConfig = msgspec.convert(given, GovernedConfig)
    except msgspec.ValidationError as error:
        raise Invalid(f"`tidegate`: {error}.") from error
    return found.of_rank(rank, engines)


def file_of(path: str, rank: int, engines: int) -> Path:
    """The file that an engine's configuration names, for one of so many data-parallel engines (`{rank}`
    is its rank). Raises Unsupported where they would share one."""
    if (rank or engines > 1) and RANK not in path:
        raise Unsupported(
            "With data parallelism each engine has a driver, and shards, of its own: write a file for "
            f"each, with another `driver` and agent, and name them with {RANK}: /etc/job7-{RANK}.json."
        )
    return Path(path.replace(RANK, str(rank)))


def read(path: Path) -> EngineConfig:
    """Raises Invalid with what is wrong and where."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise Invalid(f"{path} can't be read: {error.strerror}.") from error
    return parse_file(raw, path)


def parse_file(raw: bytes, path: Path) -> EngineConfig:
    """The content of this file. Raises Invalid as `read` does."""
    try:
        found = decode(raw, _DECODER)
    except Invalid as error:
        raise Invalid(f"{path}: {error}") from error
    if (found.agent is None) == (not found.homes):
        raise Invalid(f"{path}: set either `agent` or `homes`.")
    if found.agent:
        try:
            Address.parse(found.agent.address)
        except ValueError as error:
            raise Invalid(f"{path}: the agent's address: {error}.") from error
    if found.telemetry:
        try:
            redis_url(found.telemetry)
        except ValueError:
            raise Invalid(f"{path}: `telemetry` has to be {REDIS_URL}.") from None
    if found.unsigned_org and found.unsigned_org not in {org.name for org in found.orgs}:
        raise Invalid(f"{path}: `unsigned_org` is {found.unsigned_org}, which is not one of `orgs`.")
    return found


def fresh(model: NameSpec, driver: str, orgs: list[str], agent: AgentSpec) -> EngineConfig:
    """A new configuration with new secrets."""
    return EngineConfig(
        driver=driver,
        secret=secrets.token_bytes(SECRET_BYTES),
        model=model,
        claims_key=secrets.token_bytes(SECRET_BYTES),
        orgs=tuple(OrgSpec(name=name, secret=secrets.token_bytes(SECRET_BYTES)) for name in orgs),
        agent=agent,
    )
