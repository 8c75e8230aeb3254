"""What a process confirms of a purge: a statement of its own, signed with its identity.

    question = Question(operation, challenge, epoch, scopes)             # the console's
    signed = sign(identity, AgentStatement(...))                         # what it is told
    statement = opened(signed, public_key, question, "node:ax-1", AgentStatement)

A statement names the operation, the epoch and the scopes that it was asked about, and says what it
covers. The challenge is made anew for each question, so a statement of an earlier time answers no other
question. What is signed are the bytes that are sent: nobody has to agree on how to write a value.

That nothing is left is said by these statements only, and never by the status of an HTTP answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from telemetry import decoder
from telemetry.decoder import ANSWER, Count, Malformed, Seconds

if TYPE_CHECKING:
    from kvss_agent.security.identity import ProcessIdentity

PURPOSE: Final = b"tidegate purge confirmation 1\0"  # before what is signed
NO_IDENTITY: Final = "It has no identity to sign with: it is of an earlier version, so update it."
SCOPES_MAX: Final = 256
SECONDS_MAX: Final = 5.0

Hex16 = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$")]
Operation = Annotated[str, Meta(pattern=r"^[0-9a-f-]{36}$")]
Text = Annotated[str, Meta(max_length=2000)]


class NotConfirmed(Exception):
    """Why an answer confirms nothing, in a sentence."""


class NotConfirmedYet(Exception):
    """Why a process can't confirm it yet, in a sentence."""


class Scope(Struct, frozen=True, forbid_unknown_fields=True):
    """All that carries a tag; with a namespace, what of it is of one model."""

    tag: Hex16
    namespace: Hex16 | None = None


class Question(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Remove all of these scopes, and say so. `org`: whose they are, for drivers and brains. `epoch`:
    from which on the org has other tags. `seconds`: how long to wait, at most. `withdrawn`: the driver
    may not serve the org any more, whose tags stay as they are; a later document may bring it back.
    `idle`: the driver's job has ended, so that its shards are no longer its own, and nobody waits for
    those that it can't reach."""

    operation: Operation
    challenge: Hex16
    epoch: Count
    scopes: Annotated[tuple[Scope, ...], Meta(min_length=1, max_length=SCOPES_MAX)]
    org: Annotated[str, Meta(max_length=200)] = ""
    seconds: Annotated[float, Meta(ge=0, le=SECONDS_MAX)] = 0.0
    withdrawn: bool = False
    idle: bool = False


class Statement(Struct, frozen=True, kw_only=True):
    """What every confirmation says."""

    identity: Text  # node:ax-1, driver:job7 or brain:east
    operation: Operation
    challenge: Hex16
    epoch: Count
    scopes: tuple[Scope, ...]
    at: Seconds  # since 1970, by the clock of who says it

    def answers(self, question: Question, identity: str) -> str:
        """Why it is no answer to this; empty if it is."""
        if self.identity != identity:
            return "It is a statement of another process."
        if (self.operation, self.epoch) != (question.operation, question.epoch):
            return "It is a statement on another purge."
        if self.challenge != question.challenge:
            return "It is a statement of an earlier time."
        return "" if self.scopes == question.scopes else "It does not speak of all that was asked for."


class StoreCover(Struct, frozen=True):
    """A store of tier 2 in which nothing of the scopes is left; and how much there was."""

    place: Text
    state: Text  # "in use", "retiring", "empty"
    files: Count
    bytes: Count


class MemoryCover(Struct, frozen=True):
    """A shard's memory at an agent, of which every slot was looked at."""

    shard: Text
    slots: Count
    columns: Count


class AgentStatement(Statement, frozen=True, kw_only=True, tag="agent", tag_field="kind"):
    """Of an agent: nothing of the scopes is left in its memory, nor in any store that it has."""

    stores: tuple[StoreCover, ...]
    memory: tuple[MemoryCover, ...]


class ShardCover(Struct, frozen=True):
    """A shard of a driver, and where it is."""

    group: Text
    index: Count
    agent: Text
    shard: Text


class DriverStatement(Statement, frozen=True, kw_only=True, tag="driver", tag_field="kind"):
    """Of a driver: it serves nothing under these tags any more, has dropped the keys that it had for
    them, and has removed what it had on all homes of its shards, former ones included. Where the org was
    `withdrawn`, a later document may tell it the same keys again."""

    org: Text
    shards: tuple[ShardCover, ...]
    columns: Count
    bytes: Count
    files: Count
    file_bytes: Count
    withdrawn: bool = False

    def answers(self, question: Question, identity: str) -> str:
        if self.withdrawn != question.withdrawn:
            return "It is a statement on another kind of removal."
        return super().answers(question, identity)


class MapCover(Struct, frozen=True):
    """A driver whose cache map a brain follows, and how many columns of the scopes it has forgotten."""

    driver: Text
    columns: Count


class BrainStatement(Statement, frozen=True, kw_only=True, tag="brain", tag_field="kind"):
    """Of a brain: it has applied a desired document under which the org has none of these tags; it makes
    no keys with them any more, and no map that it follows has a column of them."""

    org: Text
    maps: tuple[MapCover, ...]


class Signed(Struct, frozen=True):
    """As it is sent: the statement, in JSON, and the signature over just these bytes."""

    payload: bytes
    signature: bytes


S = TypeVar("S", bound=Statement)


def sign(identity: ProcessIdentity, statement: Statement) -> Signed:
    payload = msgspec.json.encode(statement)
    return Signed(payload, identity.sign(PURPOSE + payload))


def opened(raw: bytes, public_key: str, question: Question, identity: str, kind: type[S]) -> S:
    """The statement in an answer, if this process has made it, on this question. Raises NotConfirmed."""
    if not public_key:
        raise NotConfirmed(NO_IDENTITY)
    from kvss_agent.security.identity import (
        verify,  # with certificates: who asks nobody knows scopes, too
    )

    try:
        signed = decoder.decode(raw, Signed, ANSWER)
        if not verify(public_key, PURPOSE + signed.payload, signed.signature):
            raise NotConfirmed("Its confirmation is not signed with its key.")
        statement: S = decoder.decode(signed.payload, kind, ANSWER)
    except Malformed as error:
        raise NotConfirmed(f"Its answer is not a confirmation: {error}.") from error
    if why := statement.answers(question, identity):
        raise NotConfirmed(why)
    return statement
