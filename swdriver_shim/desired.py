"""What a driver is told to be: the desired document. Checked as a whole before any of it is done.

Orgs, policies and tokens change while it runs, and a shard that gets another home moves there. The model
and its layout do not: another model is another driver.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import asdict
from typing import Annotated, Final, Literal, Self

import msgspec
from msgspec import Meta, field, structs

from kvss_agent.data_plane.address import Address
from kvss_agent.data_plane.constants import DATA_KEY_BYTES, SECRET_BYTES_MIN
from kvss_agent.desired import Document, Name, WholeDocument
from kvss_agent.documents import Invalid, decode, whole
from swdriver_shim.data_plane.paths import PathSpec
from swdriver_shim.keys import COLUMN_TOKENS, UNIT_TOKENS_MAX, Namespace, isolation_tag
from swdriver_shim.keys import SECRET_BYTES_MIN as ORG_SECRET_BYTES_MIN
from swdriver_shim.layout import GROUPS_MAX, SHARDS_MAX, Group, Layout
from swdriver_shim.policy import OrgPolicies

ORGS_MAX: Final = 100_000
AGENTS_REMOVED_MAX: Final = 4096
SIBLINGS_MAX: Final = 64
BORROWERS_MAX: Final = 4096
CLAIMS_KEY_BYTES_MIN: Final = 32
SHA256: Final = r"^[0-9a-f]{64}$"

Text = Annotated[str, Meta(max_length=500)]
# Of a model that an engine reports: a database takes it, and a page shows it.
PRINTED: Final = r"^[^\x00-\x1f\x7f\ud800-\udfff]*$"
Printed = Annotated[str, Meta(max_length=500, pattern=whole(PRINTED))]
# Of an agent that is known by its key.
AgentAddress = Annotated[str, Meta(pattern=r"^tls:.+#[0-9a-f]{64}$", max_length=500)]
TOKEN_BYTES_MAX: Final = 1 << 30  # of one token in one shard
WINDOW_MAX: Final = 1 << 40


# What files in tier 2 are called after, with a number behind it.
GroupName = Annotated[str, Meta(pattern=whole(r"^[a-z0-9_-][a-z0-9._-]{0,57}$"))]


class GroupSpec(Document, frozen=True, omit_defaults=True):
    """See `Group`. One that contradicts itself is refused while a document is read."""

    name: GroupName
    bytes_per_token: tuple[Annotated[int, Meta(ge=1, le=TOKEN_BYTES_MAX)], ...] = ()
    window: Annotated[int, Meta(ge=1, le=WINDOW_MAX)] | None = None
    alone: bool = False
    bytes_per_state: tuple[Annotated[int, Meta(ge=1, le=TOKEN_BYTES_MAX)], ...] = ()
    tokens_per_state: Annotated[int, Meta(ge=COLUMN_TOKENS, le=WINDOW_MAX)] = COLUMN_TOKENS

    def __post_init__(self) -> None:
        self.shape()

    @classmethod
    def of(cls, group: Group) -> Self:
        return cls(**asdict(group))

    def shape(self) -> Group:
        return Group(**structs.asdict(self))


class ModelSpec(Document, frozen=True):
    """What makes KV of the same tokens different, and its shape. `unit_tokens`: so many are stored and
    found as one, where an engine's blocks want it."""

    name: Annotated[str, Meta(min_length=1, max_length=500, pattern=whole(PRINTED))]
    groups: Annotated[tuple[GroupSpec, ...], Meta(min_length=1, max_length=GROUPS_MAX)]
    revision: Printed = ""
    kv_dtype: Printed = ""
    layout: Printed = ""
    unit_tokens: Annotated[
        int, Meta(ge=COLUMN_TOKENS, le=UNIT_TOKENS_MAX, multiple_of=COLUMN_TOKENS)
    ] = COLUMN_TOKENS

    def shape(self) -> Layout:
        """Raises ValueError for groups that contradict each other."""
        return Layout(tuple(one.shape() for one in self.groups))

    def namespace(self, adapter: str = "") -> Namespace:
        """Two drivers that say the same of the model and not of its shape have nothing in common: who
        is wrong, or lies, is so for himself only."""
        shape = hashlib.sha256(msgspec.json.encode(self.groups)).hexdigest()
        return Namespace(self.name, self.revision, self.kv_dtype, self.layout, adapter, shape)


class ControlSpec(Document, frozen=True):
    """The control API of an agent: it is asked to pull when a shard moves there.

    A console gives a `capability` for that move, and the fingerprint of the agent's `key`. The agent's
    own `token` is for a driver whose document somebody has written by hand.
    """

    url: Annotated[str, Meta(pattern=r"^https?://", max_length=500)]
    token: Annotated[str, Meta(min_length=20, max_length=500)] | None = None
    capability: Annotated[str, Meta(pattern=r"^tgp_", max_length=4000)] | None = None
    key: Annotated[str, Meta(pattern=whole(r"^[0-9a-f]{64}$"))] | None = None


class HomeSpec(Document, frozen=True):
    """Where a shard of a group is: which agent, and what it is called there.

    Without `control` a shard that moves here starts empty. `path`: how its bytes get there, where it is
    known; they are counted by it.
    """

    group: Name
    index: Annotated[int, Meta(ge=0, lt=SHARDS_MAX)]
    address: Annotated[str, Meta(max_length=500)]
    shard: Name
    control: ControlSpec | None = None
    path: PathSpec | None = None


class SiblingHome(Document, frozen=True):
    """Where a shard of a sibling is, for the agent that has the same shard of ours. `path`: how bytes
    get from there to here, by which they are counted. `bytes_per_second`: how fast at most."""

    group: Name
    index: Annotated[int, Meta(ge=0, lt=SHARDS_MAX)]
    address: Annotated[str, Meta(max_length=500)]
    shard: Name
    path: Literal["node", "leaf", "spine"]
    bytes_per_second: Annotated[int, Meta(ge=1, lt=1 << 62)] | None = None


class SiblingSpec(Document, frozen=True):
    """A driver of the same model and layout, and of no other orgs, whose columns this one may borrow.

    `url` and `key`: its API, and the fingerprint of the key that it has there. `token`: what it is shown
    (`lending.token_for`).
    """

    driver: Name
    url: Annotated[str, Meta(pattern=r"^https?://", max_length=500)]
    token: Annotated[str, Meta(pattern=whole(SHA256))]
    homes: Annotated[tuple[SiblingHome, ...], Meta(min_length=1, max_length=SHARDS_MAX)]
    key: Annotated[str, Meta(pattern=whole(r"^[0-9a-f]{64}$"))] | None = None


class OrgSpec(Document, frozen=True, omit_defaults=True):
    """An org: what its keys are made with, what it wants, and whose requests are its own.

    Its columns in tier 2 are encrypted with `data_key`, where its policy wants that; without a key they
    are not kept there.
    """

    name: Name
    secret: Annotated[bytes, Meta(min_length=ORG_SECRET_BYTES_MIN, max_length=256)]
    policies: OrgPolicies = OrgPolicies()
    data_key: Annotated[bytes, Meta(min_length=DATA_KEY_BYTES, max_length=DATA_KEY_BYTES)] | None = None
    tokens: tuple[Annotated[str, Meta(pattern=whole(SHA256))], ...] = ()  # SHA-256 of each, in hex
    # In place of `secret`, of models of which everything was purged: what is older has other names.
    secrets: dict[
        Annotated[str, Meta(max_length=500)],
        Annotated[bytes, Meta(min_length=ORG_SECRET_BYTES_MIN, max_length=256)],
    ] = field(default_factory=dict)

    @property
    def tag(self) -> bytes:
        return isolation_tag(self.name, self.secret)

    def of_model(self, model: str) -> OrgSpec:
        """As a driver of this model has it."""
        if not self.secrets:
            return self
        return structs.replace(self, secret=self.secrets.get(model, self.secret), secrets={})


class Desired(WholeDocument, frozen=True, omit_defaults=True):
    """Of a driver."""

    driver: Name  # as which it connects to agents
    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES_MIN, max_length=256)]
    model: ModelSpec
    homes: Annotated[tuple[HomeSpec, ...], Meta(max_length=SHARDS_MAX)]
    # Addresses of agents whose nodes are no more, and whatever a shard has left there with them.
    agents_removed: Annotated[tuple[Text, ...], Meta(max_length=AGENTS_REMOVED_MAX)] = ()
    # Where agents are now that had another address when shards left them.
    agents_moved: Annotated[tuple[AgentAddress, ...], Meta(max_length=AGENTS_REMOVED_MAX)] = ()
    orgs: Annotated[tuple[OrgSpec, ...], Meta(max_length=ORGS_MAX)] = field(default_factory=tuple)
    siblings: Annotated[tuple[SiblingSpec, ...], Meta(max_length=SIBLINGS_MAX)] = ()
    borrowers: Annotated[tuple[Name, ...], Meta(max_length=BORROWERS_MAX)] = ()  # that may borrow here
    # What gateways sign the claims of an engine's requests with. Daemons have none: their callers have
    # tokens.
    claims_key: Annotated[bytes, Meta(min_length=CLAIMS_KEY_BYTES_MIN, max_length=256)] | None = None

    def callers(self) -> dict[str, OrgSpec]:
        """Whose requests come with which token, by its hash."""
        return {token: org for org in self.orgs for token in org.tokens}


_DECODER: Final = msgspec.json.Decoder(Desired)


def parse(raw: bytes) -> Desired:
    """The document, whole and consistent. Raises Invalid."""
    desired = decode(raw, _DECODER)
    try:
        desired.model.shape()
    except ValueError as error:
        raise Invalid(f"The layout: {error}.") from error
    if problems := list(_problems(desired)):
        raise Invalid(" ".join(problems))
    orgs = tuple(org.of_model(desired.model.name) for org in desired.orgs)
    return structs.replace(desired, orgs=orgs)


def token_hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _problems(desired: Desired) -> Iterator[str]:
    import httpx  # it takes a while, and whoever compiles a layout needs none

    for name, count in Counter(org.name for org in desired.orgs).items():
        if count > 1:
            yield f"There are two entries for org {name}."
    tokens = [token for org in desired.orgs for token in org.tokens]
    if len(set(tokens)) != len(tokens):
        yield "A token belongs to one org only."
    if desired.model.unit_tokens != COLUMN_TOKENS and any(one.alone for one in desired.model.groups):
        yield "Columns that stand alone have no units: unit_tokens is for prefixes."
    wanted = {
        (group.name, index) for group in desired.model.shape().groups for index in range(group.shards)
    }
    given = [(home.group, home.index) for home in desired.homes]
    for group, index in sorted(wanted - set(given)):
        yield f"Shard {index} of group {group} has no home."
    for group, index in sorted(set(given) - wanted):
        yield f"There is no shard {index} of a group {group}."
    if len(set(given)) != len(given):
        yield "A shard has one home."
    yield from _problems_of_siblings(desired, wanted)
    for home in desired.homes:
        control = home.control
        if control and (control.token is None) == (control.capability is None):
            yield f"The home of shard {home.index} of {home.group}: control has a token or a capability."
        try:
            Address.parse(home.address)
            httpx.URL(home.control.url if home.control else "")
        except (ValueError, httpx.InvalidURL) as error:
            yield f"The home of shard {home.index} of {home.group}: {error}."


def _problems_of_siblings(desired: Desired, wanted: Collection[tuple[str, int]]) -> Iterator[str]:
    names = [one.driver for one in desired.siblings]
    for name, count in Counter(names).items():
        if count > 1:
            yield f"There are two entries for sibling {name}."
        if name == desired.driver:
            yield f"{name} is no sibling of its own."
    for one in desired.siblings:
        its = [(home.group, home.index) for home in one.homes]
        if sorted(its) != sorted(wanted):
            yield f"Sibling {one.driver} has other shards than this driver."
        for home in one.homes:
            try:
                Address.parse(home.address)
            except ValueError as error:
                yield f"A home of sibling {one.driver}: {error}."
