"""What a brain is told to be: the desired document. Checked as a whole before any of it is done.

It says which models are served by which replicas, and which orgs may ask, with what. A brain keeps the
last one, so that it starts and serves while the console is away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, field

from kvss_agent.desired import Document, Name, WholeDocument
from kvss_agent.documents import Invalid, decode, whole
from swdriver_shim.desired import (
    CLAIMS_KEY_BYTES_MIN,
    ORGS_MAX,
    PRINTED,
    SHA256,
    SIBLINGS_MAX,
    ModelSpec,
)
from swdriver_shim.keys import SECRET_BYTES_MIN as ORG_SECRET_BYTES_MIN
from swdriver_shim.keys import isolation_tag

MODELS_MAX: Final = 1000
REPLICAS_MAX: Final = 4096
TOKENS_MAX: Final = 1 << 24  # of a prompt and its answer
SECONDS_MAX: Final = 24 * 3600
PER_MINUTE_MAX: Final = 1 << 40
Text = Annotated[str, Meta(min_length=1, max_length=500, pattern=whole(PRINTED))]
Url = Annotated[str, Meta(pattern=whole(r"^(https?://[^\s/?#@]+(/[^\s?#]*)?)?$"), max_length=500)]
PerMinute = Annotated[int, Meta(ge=1, le=PER_MINUTE_MAX)]


class DriverSpec(Document, frozen=True, omit_defaults=True):
    """The Tidegate driver in, or beside, a replica: whose cache map is followed, and for whom claims are
    signed. `model`: as the driver has it; keys of columns are made with it. `siblings`: the drivers
    that it may borrow columns from."""

    name: Name
    model: ModelSpec
    claims_key: Annotated[bytes, Meta(min_length=CLAIMS_KEY_BYTES_MIN, max_length=256)] | None = None
    siblings: Annotated[tuple[Name, ...], Meta(max_length=SIBLINGS_MAX)] = ()


class ReplicaSpec(Document, frozen=True, omit_defaults=True):
    """One engine that serves a model, over OpenAI's API at `url`. Without a driver its cache is guessed
    at. `draining`: it gets no new requests. `served_as`: what the engine calls the model, if that is
    another name. `api_key`: what the engine wants to be shown. `endpoint`: where its address is: here,
    or in Redis, where the orchestrator's leader puts it and changes it more often than documents."""

    name: Name
    url: Url = ""
    engine: Literal["vllm", "sglang", "other"] = "vllm"
    driver: DriverSpec | None = None
    draining: bool = False
    served_as: Annotated[str, Meta(max_length=500, pattern=whole(PRINTED))] = ""
    api_key: Annotated[str, Meta(max_length=4000, pattern=whole(r"^[\x21-\x7e]*$"))] = ""
    endpoint: Literal["document", "redis"] = "document"


class ServedModel(Document, frozen=True, omit_defaults=True):
    """A model as clients name it. `tokenizer`: a folder with `tokenizer.json`, and `chat_template.jinja`
    or `tokenizer_config.json`, on the brain's machine; empty: its prompts are sent on as text, and
    requests are placed by load. `orgs`: which may use it; None: all that the document names."""

    name: Text
    tokens_max: Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
    replicas: Annotated[tuple[ReplicaSpec, ...], Meta(max_length=REPLICAS_MAX)]
    tokenizer: Annotated[str, Meta(max_length=500, pattern=whole(PRINTED))] = ""
    orgs: tuple[Name, ...] | None = None


class Limits(Document, frozen=True, omit_defaults=True):
    """What an org may ask for, over all brains; None: without a limit. `weight`: its share of replicas
    that others want as well. `priority`: the highest that its requests may name."""

    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None
    concurrent: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    queued: Annotated[int, Meta(ge=0, le=1_000_000)] = 256
    weight: Annotated[int, Meta(ge=1, le=1_000_000)] = 100
    priority: Annotated[int, Meta(ge=0, le=100)] = 35
    wait_seconds: Annotated[float, Meta(gt=0, le=SECONDS_MAX)] = 60.0  # in a queue, at most


class OrgSpec(Document, frozen=True, omit_defaults=True):
    """An org: what keys of its columns are made with, the hashes of its callers' tokens, and its limits.
    `secrets`: in place of `secret`, of models of which everything was purged."""

    name: Name
    secret: Annotated[bytes, Meta(min_length=ORG_SECRET_BYTES_MIN, max_length=256)]
    tokens: tuple[Annotated[str, Meta(pattern=whole(SHA256))], ...] = ()
    limits: Limits = Limits()
    secrets: dict[
        Annotated[str, Meta(max_length=500)],
        Annotated[bytes, Meta(min_length=ORG_SECRET_BYTES_MIN, max_length=256)],
    ] = field(default_factory=dict)

    def secret_of(self, model: str) -> bytes:
        """For columns of this model, as its drivers call it."""
        return self.secrets.get(model, self.secret)

    @property
    def tags(self) -> frozenset[bytes]:
        """All isolation tags that its columns may carry."""
        return frozenset(isolation_tag(self.name, one) for one in (self.secret, *self.secrets.values()))


class Desired(WholeDocument, frozen=True, omit_defaults=True):
    """Of a brain."""

    brain: Name
    models: Annotated[tuple[ServedModel, ...], Meta(max_length=MODELS_MAX)] = ()
    orgs: Annotated[tuple[OrgSpec, ...], Meta(max_length=ORGS_MAX)] = ()

    def callers(self) -> dict[str, OrgSpec]:
        """Whose requests come with which token, by its hash."""
        return {token: org for org in self.orgs for token in org.tokens}


_DECODER: Final = msgspec.json.Decoder(Desired)


def parse(raw: bytes) -> Desired:
    """The document, whole and consistent. Raises Invalid."""
    desired = decode(raw, _DECODER)
    if problems := list(_problems(desired)):
        raise Invalid(" ".join(problems))
    return desired


def _problems(desired: Desired) -> Iterator[str]:
    orgs = {org.name for org in desired.orgs}
    for name in _repeated(org.name for org in desired.orgs):
        yield f"There are two entries for org {name}."
    if any(True for _ in _repeated(token for org in desired.orgs for token in org.tokens)):
        yield "A token belongs to one org only."
    for name in _repeated(model.name for model in desired.models):
        yield f"There are two entries for model {name}."
    for model in desired.models:
        for name in _repeated(replica.name for replica in model.replicas):
            yield f"Model {model.name} has two replicas named {name}."
        for name in sorted(set(model.orgs or ()) - orgs):
            yield f"Model {model.name} is for org {name}, of which nothing is said."
        for replica in model.replicas:
            if not replica.url and replica.endpoint == "document":
                yield f"Replica {replica.name} of model {model.name} has no URL."
            try:
                if replica.driver:
                    replica.driver.model.shape()
            except ValueError as error:
                yield f"The layout of replica {replica.name}: {error}."


def _repeated(names: Iterable[str]) -> Iterator[str]:
    return (name for name, count in Counter(names).items() if count > 1)
