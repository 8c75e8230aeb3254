"""A driver that follows its desired document and reports how far it is."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec import structs

from kvss_agent.documents import Conflict
from kvss_agent.http.api import CONTROLLER, is_token
from kvss_agent.http.server import HttpPolicy
from kvss_agent.limits.shares import FairShare, Shares
from kvss_agent.process.membership import MembershipStatus
from kvss_agent.security.confirmations import DriverStatement, NotConfirmedYet, Question
from kvss_agent.security.trust import Trust
from swdriver_shim import desired as documents
from swdriver_shim.cache.request_log import PromptKeys, cut_keys
from swdriver_shim.cache_map.codec import SPACE_BYTES
from swdriver_shim.cache_map.follower import Follower
from swdriver_shim.cache_map.recalls import Recalled
from swdriver_shim.daemon.left_homes import At
from swdriver_shim.daemon.shard_homes import MakeRemote, ShardHomes, homes_of
from swdriver_shim.daemon.stored_document import PurgedTags, StoredDocument
from swdriver_shim.decider.decider import Decider, Snapshots
from swdriver_shim.desired import Desired, HomeSpec, ModelSpec, OrgSpec, token_hash
from swdriver_shim.driver import Driver
from swdriver_shim.keys import Keys, Namespace
from swdriver_shim.lending import LendBody, LentAnswer, digest_of, token_for
from swdriver_shim.objects import LocalObjects
from swdriver_shim.policy import OrgPolicies
from telemetry.emit.transfers import Transfer
from telemetry.metrics import LabelLimits
from telemetry.units import duration

log = logging.getLogger(__name__)

TRANSFER_BYTES: Final = 2 << 30  # of requests and answers that are under way
TRANSFER_BYTES_RESERVED: Final = 16 << 20  # for each org, though others have taken everything
VERBS_AT_ONCE: Final = 256
VERBS_OF_ONE_ORG: Final = 32  # so that whoever waits, for tier 2 or an agent, leaves threads to others
VERBS_WAITING: Final = 4096
ANOTHER_MODEL: Final = (
    "This engine's model, or the layout of its KV, is another one than that of the document: end its "
    "job and start it again."
)
ANOTHER_DRIVER: Final = (
    "It is of driver {}, and this is {}: each engine needs a name and a state directory of its own."
)
KEYS_MAX: Final = 4096  # makers of keys that are kept: one for each org and adapter

T = TypeVar("T")


def owner_of(org: str) -> str:
    """The owner that connections of this org's callers count for."""
    return f"org:{org}"


def shares_of(transfer_bytes: int) -> tuple[FairShare, FairShare]:
    """The shares of orgs: bytes of requests and answers, and verbs that are carried out at once."""
    reserved = min(TRANSFER_BYTES_RESERVED, transfer_bytes // 8)
    transfers = Shares(transfer_bytes, transfer_bytes // 2, reserved, VERBS_WAITING)
    verbs = Shares(VERBS_AT_ONCE, VERBS_OF_ONE_ORG, 1, VERBS_WAITING, VERBS_WAITING // 8)
    return FairShare(transfers), FairShare(verbs)


class Shim:
    """Follows its desired document. All methods may be called from any thread."""

    def __init__(
        self,
        name: str,
        state_dir: Path | None,
        software: str = "",
        *,
        token: str = "",
        model: ModelSpec | None = None,
        remote_shard: MakeRemote | None = None,
        notes: Path | None = None,
        trust: Trust | None = None,
        transfer_bytes: int = TRANSFER_BYTES,
        promotion: int = 0,
    ) -> None:
        """Without `state_dir` the document is not stored, and has to be set after each start. `notes`, a
        folder of `state_dir` by default, is for what the next process continues with (`snapshot`).
        What is stored is sealed with a key that follows from `token`. `model`: the only one that the
        engine can use; documents of others are refused.
        `promotion`: bytes per second that prompts expected soon may be recalled with, in advance.
        `trust` has the certificate that is shown to agents. `remote_shard` makes the stand-in for a
        shard of a group where workers have the shards; then only the engine loads and stores columns."""
        self._remote_shard = remote_shard
        self._promotion = promotion
        self._notes = notes or (state_dir / "notes" if state_dir else None)
        self.trust = trust
        self.name = name
        self.software = software
        self.started_at = time.time()
        self.desired: Desired | None = None
        self.observed_generation = 0
        self.membership_status = MembershipStatus()  # with the console
        self.document_at = 0.0  # when the document that is followed was received, or stored
        self._model = model
        self._document = StoredDocument(state_dir / "desired.json", token) if state_dir else None
        self._followed = StoredDocument(self._notes / "followed", token) if self._notes else None
        self._purged_tags = PurgedTags(state_dir / "purged_tags" if state_dir else None)
        self._lock = threading.Lock()
        self.fronts: Mapping[str, Mapping[str, int]] = {}  # for LMCache, by org: what became of requests
        self._driver: Decider | None = None
        self._callers: Mapping[str, OrgSpec] = {}
        self._keys: dict[tuple[str, bytes, Namespace], Keys] = {}  # by org, its secret and namespace
        self._orgs_by_tag: Mapping[bytes, OrgSpec] = {}
        self._stopped = threading.Event()
        self.shards = ShardHomes(lambda: self._told, self._stopped, software, self._notes, trust)
        self.limits = LabelLimits()  # of its metrics
        self.http = HttpPolicy(owners=self._owners)
        self.recalls: Counter[str] = Counter()  # that brains asked for, by `Recalled`
        self.transfers, self.verbs = shares_of(transfer_bytes)

    def start(self) -> None:
        """Follow the document that was stored last. Raises OSError."""
        stored = self._document.read() if self._document else None
        if stored is None:
            return
        if why := self._misfit(stored.document):
            log.warning("The stored desired document is ignored. %s", why)
            return
        log.info(
            "Following the stored desired document, generation %d, %s old",
            stored.document.generation,
            duration(max(0.0, time.time() - stored.at)),
        )
        with self._lock:
            self._follow(self._purged_tags.without_purged(stored.document))
            self.document_at = stored.at

    def stop(self, *, hands_over: bool = False) -> None:
        """Stop for good: a document that comes later is refused. It would open shards that the next
        process has by then. `hands_over`: that process may be there already, and workers go on without
        their shards."""
        self._stopped.set()
        with self._lock:
            driver, self._driver = self._driver, None
        if driver:
            driver.close()
        if hands_over:
            self.shards.release()

    # Documents and purges

    def set_desired(self, raw: bytes) -> Desired:
        """Store a document and follow it. Setting an equal document again changes nothing.

        Raises Invalid; Conflict for an older generation, for the current one with other contents, for
        another model or driver, and after `stop`; OSError if it can't be stored.
        """
        parsed = documents.parse(raw)
        if why := self._misfit(parsed):
            raise Conflict(why)
        with self._lock:
            self._check_runs()
            told = self._purged_tags.without_purged(parsed)
            if self.desired:
                if told.repeats(self.desired):
                    self.document_at = time.time()
                    return told
                if (told.model, told.driver) != (self.desired.model, self.desired.driver):
                    raise Conflict("A process serves one model and one driver: start another process.")
            if self._document:
                self._document.write(msgspec.json.encode(told))
            self._follow(told)
            self.document_at = time.time()
        return told

    def _check_runs(self) -> None:
        if self._stopped.is_set():
            raise Conflict("This driver is stopping.")

    def _misfit(self, told: Desired) -> str:
        """Why an engine can't follow this document; empty if it can."""
        if self._model is None:
            return ""
        if told.driver != self.name:
            return ANOTHER_DRIVER.format(told.driver, self.name)
        return "" if told.model == self._model else ANOTHER_MODEL

    def ban_tags(self, tags: Collection[str]) -> None:
        """Never serve these tags again. An org that has one is left out of the document, with its keys
        and callers, until a document gives it another secret: an older document can't restore what was
        purged. Raises OSError."""
        with self._lock:
            self._check_runs()
            self._purged_tags.add(tags)
            self._leave_out(tags)

    def _leave_out(self, tags: Collection[str]) -> None:
        """Go on with the document without the orgs that have these tags. Raises OSError."""
        orgs = self.desired.orgs if self.desired else ()
        kept = tuple(org for org in orgs if org.tag.hex() not in tags)
        if self.desired and len(kept) < len(orgs):
            told = structs.replace(self.desired, orgs=kept)
            if self._document:
                self._document.write(msgspec.json.encode(told))
            self._follow(told)

    def _why_not_purged(self, lost: Sequence[At], tags: Collection[str]) -> str:
        if lost:
            return "Shard {}.{} is lost.".format(*lost[0])
        for group, index in self.shards.not_emptied([bytes.fromhex(tag) for tag in tags]):
            return f"Shard {group}.{index} has moved, and its former home is not emptied yet."
        return "The purge is still running."

    def purge(self, question: Question) -> DriverStatement:
        """Purge everything with these tags, and return a statement of it. Raises NotConfirmedYet with a
        sentence while the purge is still running, and OSError. May be called again.

        Where the org is withdrawn, nothing is banned: the document does not name it, and only a later
        one can. To a driver whose job has ended no document comes, so it leaves the org out by itself.

        A driver whose job has ended reaches none of its shards. Agents have freed them and speak for
        themselves, so its statement names no shard. As long as it reaches one, it waits as always."""
        tags = list(dict.fromkeys(scope.tag for scope in question.scopes))
        if not question.withdrawn:
            self.ban_tags(tags)
        with self._lock:
            self._check_runs()
            if question.withdrawn and question.idle:
                self._leave_out(tags)
            driver = self._driver
        self._check_not_served(tags)
        lost = self.shards.lost
        has_none = question.idle and self.shards.are_lost
        until = time.monotonic() + (0 if has_none else question.seconds)
        receipts = [
            driver.removals.finish_purge(
                question.org, bytes.fromhex(tag), max(0.0, until - time.monotonic())
            )
            for tag in tags
            if driver
        ]
        if not has_none and not all(receipt.done for receipt in receipts):
            raise NotConfirmedYet(self._why_not_purged(lost, tags))
        self._check_not_served(tags)  # a document may have come meanwhile
        return DriverStatement(
            identity=f"driver:{self.name}",
            operation=question.operation,
            challenge=question.challenge,
            epoch=question.epoch,
            scopes=question.scopes,
            at=time.time(),
            org=question.org,
            shards=() if has_none else self.shards.covers(),
            columns=sum(one.columns for one in receipts),
            bytes=sum(one.bytes for one in receipts),
            files=sum(one.tier2_files for one in receipts),
            file_bytes=sum(one.tier2_bytes for one in receipts),
            withdrawn=question.withdrawn,
        )

    def _check_not_served(self, tags: Collection[str]) -> None:
        """Raises NotConfirmedYet while a document names an org with one of these tags."""
        with self._lock:
            served = self.desired.orgs if self.desired else ()
            if any(org.tag.hex() in tags for org in served):
                raise NotConfirmedYet("It has not applied the document yet that does not name the org.")

    def _follow(self, told: Desired) -> None:
        """Apply a document. The first one is applied after the one that an earlier process followed, so
        that the changes between them reach what that process has left."""
        driver = self._driver
        if driver is None and (earlier := self._earlier_document(told)):
            driver = self._apply(earlier, None)
        before = self.shards.desired
        self._driver = self._apply(told, driver)  # no request before the policy of its org
        self._save_followed(told, before)

    def _earlier_document(self, told: Desired) -> Desired | None:
        """The document that an earlier process of this driver followed, with the homes of now; None if
        there is none. Raises OSError if the homes that have changed since can't be stored."""
        try:
            stored = self._followed.read() if self._followed else None
        except OSError as error:
            log.warning("The document that was followed before can't be read: %s", error)
            return None
        if stored is None:
            return None
        earlier = stored.document
        if (earlier.model, earlier.driver) != (told.model, told.driver):
            return None
        self.shards.note_left(homes_of(earlier), homes_of(told))
        return structs.replace(earlier, secret=told.secret, homes=told.homes)

    def _save_followed(self, told: Desired, before: Mapping[At, HomeSpec]) -> None:
        """Store the document, and the homes that were desired before it."""
        if self._followed is None:
            return
        try:
            self.shards.note_left(before, self.shards.desired)
            self._followed.write(msgspec.json.encode(told))
        except OSError as error:
            log.warning("The document that is followed can't be stored: %s", error)

    def _apply(self, told: Desired, driver: Decider | None) -> Decider:
        """If it fails, the document before it is the one that is followed: the same one is applied once
        more when it comes again."""
        before, self.desired = self.desired, told
        try:
            return self._applied(told, before, driver)
        except BaseException:
            self.desired = before
            raise

    def _applied(self, told: Desired, before: Desired | None, driver: Decider | None) -> Decider:
        homes = homes_of(told)
        if driver is None:
            driver = self._start(told, homes)
            if self._promotion and not driver.layout.groups[0].alone:
                driver.set_promotion_budget(self._promotion)
        self.shards.follow(homes, told.agents_removed, told.agents_moved)
        tls = self.trust.client_context if self.trust else lambda: None
        driver.siblings.follow(told.siblings, told.driver, digest_of(told.model), tls)
        driver.set_data_keys(_data_keys(told))
        # Before policies, which take the ledger's lock: what is committed after that asks for these.
        self._callers = told.callers()
        driver.set_policies(*_policies_and_tags(told))
        self._keys.clear()
        self._orgs_by_tag = {org.tag: org for org in told.orgs}
        secrets = {org.name: org.secret for org in told.orgs}
        for org in before.orgs if before else ():
            if secrets.get(org.name) != org.secret:  # nobody can ask for it any more
                driver.removals.start_purge(org.name, org.tag)
        self.observed_generation = told.generation
        return driver

    def _start(self, told: Desired, homes: Mapping[At, HomeSpec]) -> Decider:
        shape, name = told.model.shape(), told.model.name
        snapshots: Snapshots | None = None
        if self._notes:
            snapshots = Snapshots(
                self._notes, self._keys_of, *_policies_and_tags(told), _data_keys(told)
            )

        def in_order(shards: Mapping[At, T]) -> list[list[T]]:
            return [
                [shards[group.name, index] for index in range(group.shards)] for group in shape.groups
            ]

        if self._remote_shard:
            far = in_order(self.shards.open_remote(homes, self._remote_shard))
            return Decider(shape, name, far, snapshots=snapshots)
        here = in_order(self.shards.open_here(homes))
        return Driver(shape, name, here, snapshots=snapshots)

    def _keys_of(self, org: str, namespace: Namespace) -> Keys | None:
        """None for an org or a model that is not served here."""
        told, found = self.desired, self.org(org)
        if told is None or found is None or told.model.namespace(namespace.adapter) != namespace:
            return None
        return self.keys(found, namespace.adapter)

    @property
    def _told(self) -> Desired:
        if self.desired is None:
            raise RuntimeError("there is no document yet")
        return self.desired

    # Callers

    def caller(self, token: str) -> OrgSpec | None:
        """The org that this token belongs to. What a request says never decides it."""
        return self._callers.get(token_hash(token)) if token else None

    def _owners(self) -> list[str]:
        """The owners that have reserved places among connections."""
        told = self.desired
        if told is None:
            return [CONTROLLER]
        siblings = (f"sibling:{name}" for name in told.borrowers)
        return [CONTROLLER, *(owner_of(org.name) for org in told.orgs), *siblings]

    def permit(self, token: str, org: OrgSpec) -> Callable[[], bool]:
        """Whether this token still is one of this org, with the tag that it had."""

        def may() -> bool:
            found = self.caller(token)
            return found is not None and (found.name, found.secret) == (org.name, org.secret)

        return may

    def org(self, name: str) -> OrgSpec | None:
        """The org of this name in the document."""
        told = self.desired
        return next((org for org in told.orgs if org.name == name), None) if told else None

    def keys(self, org: OrgSpec, adapter: str = "") -> Keys:
        if self.desired is None:
            raise Conflict("The driver has no desired document yet.")
        namespace = self.desired.model.namespace(adapter)
        found = self._keys.get((org.name, org.secret, namespace))
        if found is None:
            if len(self._keys) >= KEYS_MAX:
                self._keys.clear()
            unit = self.desired.model.unit_tokens
            found = Keys(org.name, org.secret, namespace, unit)
            self._keys[org.name, org.secret, namespace] = found
        return found

    def objects(self, org: OrgSpec) -> LocalObjects:
        """Raises Conflict if this driver stores prefixes, and before there is a document."""
        if not self.mover.keeps_objects:
            raise Conflict("This driver stores prefixes; for objects its group has to be `alone`.")
        return LocalObjects(self.mover, self.keys(org))

    def objects_of(self, name: str) -> LocalObjects | None:
        """The objects of the org of this name; None if there is no such org or no document."""
        org = self.org(name)
        with contextlib.suppress(Conflict):
            return self.objects(org) if org else None
        return None

    @property
    def has_driver(self) -> bool:
        return self._driver is not None

    @property
    def driver_or_none(self) -> Decider | None:
        """None before there is a document, and after `stop`."""
        return self._driver

    @property
    def driver(self) -> Decider:
        """Raises Conflict before there is a document."""
        if self._driver is None:
            raise Conflict("The driver has no desired document yet.")
        return self._driver

    def follow_cache(self) -> Follower | None:
        """What follows the cache for brains; None before there is a document, and for objects."""
        follower = self._driver.follow_cache() if self._driver else None
        if follower:
            follower.path_now = self.shards.cache_path
        return follower

    def recall(self, space: bytes, keys: Sequence[bytes], sibling: str = "") -> Recalled:
        """Bring what tier 2 has of a prompt into memory, or what this sibling has: of these keys, in the
        space of one org and the model's namespace."""
        driver, tag = self._driver, space[:-SPACE_BYTES]
        maker = self._maker_of(tag) if driver else None
        if maker is None or maker.namespace.digest()[:SPACE_BYTES] != space[-SPACE_BYTES:]:
            return Recalled.UNKNOWN
        if not sibling:
            is_asked = self.driver.prefetch_ahead(PromptKeys(maker, list(keys)))
        elif (found := self.driver.siblings.find(sibling)) is None:
            return Recalled.NO_SIBLING
        else:
            is_asked = self.driver.borrow(PromptKeys(maker, list(keys)), found)
        return Recalled.ASKED if is_asked else Recalled.BUSY

    def _maker_of(self, tag: bytes) -> Keys | None:
        """Of the org that has this isolation tag now."""
        org = self._orgs_by_tag.get(tag)
        return self.keys(org) if org else None

    def lend(self, body: LendBody) -> LentAnswer:
        """Where the columns of a prompt are, for a sibling. Raises Conflict if it has another model."""
        driver, told = self.driver, self._told
        if body.model != digest_of(told.model):
            raise Conflict("This driver's KV is of another model, revision, dtype, layout or shape.")
        maker = self._maker_of(body.tag)
        keys = cut_keys(body.keys)
        found = driver.lend(PromptKeys(maker, list(keys)), body.start) if maker else []
        return LentAnswer(tuple(map(tuple, found)))

    def borrower(self, name: str, token: str) -> str | None:
        """Whose request this is, if it may borrow here and shows what the console has made of our secret
        for it; None for anybody else."""
        told = self.desired
        if told is None or name not in told.borrowers:
            return None
        return f"sibling:{name}" if is_token(token, token_for(told.secret, name)) else None

    @property
    def mover(self) -> Driver:
        """The driver, if it moves bytes itself. Raises Conflict if an engine does."""
        driver = self.driver
        if not isinstance(driver, Driver):
            raise Conflict("This driver is part of an engine: only the engine loads and stores.")
        return driver

    # Status

    def take_slowest(self) -> list[Transfer]:
        """The slowest transfers of each org and direction, over all shards, since the last call."""
        told = self.desired
        orgs = {org.tag: org.name for org in told.orgs} if told else {}
        return self.shards.take_slowest(orgs)

    @property
    def is_ready(self) -> bool:
        """All shards are there, and where they should be, and the driver has looked at them."""
        driver = self._driver
        if driver is None or not driver.ledger.is_reachable:
            return False
        return self.shards.are_here

    def observed(self) -> dict[str, Any]:
        """The state of the driver and its shards, beside what is desired."""
        self.shards.remove_emptied(self._lock)
        told = self.desired
        return {
            "generation": told.generation if told else 0,
            "observed_generation": self.observed_generation,
            "document_at": self.document_at,
            "name": self.name,
            "software": self.software,
            "started_at": self.started_at,
            "ready": self.is_ready,
            "console": self.membership_status.shown(),
            "model": told.model.name if told else None,
            "orgs": len(told.orgs) if told else 0,
            "shards": self.shards.observed(),
            "groups": [asdict(group) for group in self._driver.statistics.groups()]
            if self._driver
            else [],
        }


def _policies_and_tags(told: Desired) -> tuple[dict[str, OrgPolicies], dict[str, bytes]]:
    return {org.name: org.policies for org in told.orgs}, {org.name: org.tag for org in told.orgs}


def _data_keys(told: Desired) -> dict[str, bytes]:
    return {org.name: org.data_key for org in told.orgs if org.data_key}
