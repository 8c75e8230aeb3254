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

from kvss_agent.client import Address, Credentials
from kvss_agent.documents import Conflict
from kvss_agent.http.api import CONTROLLER, is_token
from kvss_agent.http.server import HttpPolicy
from kvss_agent.limits.shares import FairShare, Shares
from kvss_agent.process.membership import MembershipStatus
from kvss_agent.security.confirmations import DriverStatement, NotConfirmedYet, Question, ShardCover
from kvss_agent.security.trust import Trust
from swdriver_shim import desired as documents
from swdriver_shim.cache.request_log import PromptKeys, cut_keys
from swdriver_shim.cache_map.codec import SPACE_BYTES, CachePath
from swdriver_shim.cache_map.follower import Follower
from swdriver_shim.cache_map.recalls import Recalled
from swdriver_shim.daemon.left_homes import HomeAddress, LeftHomes
from swdriver_shim.daemon.stored_document import PurgedTags, StoredDocument
from swdriver_shim.data_plane.agent_control import AgentControl
from swdriver_shim.data_plane.homes import Home, SlotPull
from swdriver_shim.data_plane.paths import PathSpec, PathTraffic, labels_of
from swdriver_shim.data_plane.shard import Shard
from swdriver_shim.data_plane.shard.control import ShardControl
from swdriver_shim.data_plane.slow_transfers import KEPT_PER_ORG, SlowTransfer
from swdriver_shim.data_plane.worker.client import RemoteShard
from swdriver_shim.decider.decider import Decider, Snapshots
from swdriver_shim.desired import ControlSpec, Desired, HomeSpec, ModelSpec, OrgSpec, token_hash
from swdriver_shim.driver import Driver
from swdriver_shim.keys import Keys, Namespace
from swdriver_shim.lending import LendBody, LentAnswer, digest_of, token_for
from swdriver_shim.objects import LocalObjects
from swdriver_shim.policy import OrgPolicies
from telemetry.emit.transfers import Transfer
from telemetry.metrics import LabelLimits
from telemetry.units import duration

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 5.0  # between attempts to move a shard
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
        remote_shard: Callable[[str, int, Home, PathSpec | None], RemoteShard] | None = None,
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
        self._left_homes = LeftHomes(self._notes / "places" if self._notes else None)
        self._lock = threading.Lock()
        self.fronts: Mapping[str, Mapping[str, int]] = {}  # for LMCache, by org: what became of requests
        self._driver: Decider | None = None
        self._shards: dict[tuple[str, int], ShardControl] = {}
        self._homes: dict[tuple[str, int], HomeSpec] = {}  # as desired
        self._current: dict[tuple[str, int], HomeSpec] = {}  # where the shards are now
        self._callers: Mapping[str, OrgSpec] = {}
        self._keys: dict[tuple[str, bytes, Namespace], Keys] = {}  # by org, its secret and namespace
        self._orgs_by_tag: Mapping[bytes, OrgSpec] = {}
        self._moving: dict[tuple[str, int], threading.Thread] = {}
        self._stopped = threading.Event()
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
        for shard in self._shards.values() if hands_over else ():
            if isinstance(shard, RemoteShard) and not shard.release():
                log.warning("The worker of shard %s does not say that it has closed it", shard.name)

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
        lost = [f"{at[0]}.{at[1]}" for at in self._shards if self._state(at) == "lost"]
        has_none = question.idle and len(lost) == len(self._shards)
        until = time.monotonic() + (0 if has_none else question.seconds)
        receipts = [
            driver.removals.finish_purge(
                question.org, bytes.fromhex(tag), max(0.0, until - time.monotonic())
            )
            for tag in tags
            if driver
        ]
        if not has_none and not all(receipt.done for receipt in receipts):
            why = f"shard {lost[0]} is lost" if lost else "the purge is still running"
            raise NotConfirmedYet(f"{why[0].upper()}{why[1:]}.")
        self._check_not_served(tags)  # a document may have come meanwhile
        return DriverStatement(
            identity=f"driver:{self.name}",
            operation=question.operation,
            challenge=question.challenge,
            epoch=question.epoch,
            scopes=question.scopes,
            at=time.time(),
            org=question.org,
            shards=tuple(
                ShardCover(group, index, home.address, home.shard)
                for (group, index), home in sorted(self._current.items())
                if not has_none
            ),
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
        before = self._homes
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
        now = {(home.group, home.index): _place(home) for home in told.homes}
        for home in earlier.homes:
            at = home.group, home.index
            if now.get(at) != _place(home):
                self._left_homes.add(at, _place(home))
        return structs.replace(earlier, secret=told.secret, homes=told.homes)

    def _save_followed(self, told: Desired, before: Mapping[tuple[str, int], HomeSpec]) -> None:
        """Store the document, and the homes that were desired before it: a move may be on its way there,
        and bytes that are stored meanwhile are there already."""
        if self._followed is None:
            return
        try:
            for at, home in before.items():
                if _place(home) != _place(self._homes[at]):
                    self._left_homes.add(at, _place(home))
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
        homes = {(home.group, home.index): home for home in told.homes}
        if driver is None:
            self._current = dict(homes)
            driver = self._start(told, homes)
            if self._promotion and not driver.layout.groups[0].alone:
                driver.set_promotion_budget(self._promotion)
        earlier, self._homes = self._homes, homes
        for shard in self._shards.values():
            shard.set_removed_agents(told.agents_removed)
        for at, home in homes.items():
            if at in earlier and _place(home) != _place(earlier[at]):
                self._move(at, home)
            elif at in earlier and _place(home) == _place(self._current[at]):
                self._shards[at].set_path(home.path)  # the fabric may have changed around it
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

    def _start(self, told: Desired, homes: Mapping[tuple[str, int], HomeSpec]) -> Decider:
        shape, name = told.model.shape(), told.model.name
        snapshots: Snapshots | None = None
        if self._notes:
            snapshots = Snapshots(
                self._notes, self._keys_of, *_policies_and_tags(told), _data_keys(told)
            )

        def in_order(shards: Mapping[tuple[str, int], T]) -> list[list[T]]:
            return [
                [shards[group.name, index] for index in range(group.shards)] for group in shape.groups
            ]

        if self._remote_shard:
            far = {
                at: self._remote_shard(*at, self._home(home), home.path) for at, home in homes.items()
            }
            for at, shard in far.items():
                shard.earlier_homes = self._earlier_homes(at, homes[at])
            self._shards = {**far}
            return Decider(shape, name, in_order(far), snapshots=snapshots)
        here = {
            at: Shard(
                f"{at[0]}.{at[1]}",
                self._home(home),
                self._notes,
                home.path,
                self._earlier_homes(at, home),
            )
            for at, home in homes.items()
        }
        self._shards = {**here}
        return Driver(shape, name, in_order(here), snapshots=snapshots)

    def _earlier_homes(self, at: tuple[str, int], home: HomeSpec) -> list[Home]:
        """Where an earlier process may have left bytes of this shard."""
        places = [place for place in self._left_homes.left_by(at) if place != _place(home)]
        slot_bytes = 0  # slots of any size: they are only emptied
        return [Home(*place, self._credentials, slot_bytes) for place in places]

    def _remove_emptied_homes(self) -> None:
        """Remove the left homes of shards at which nothing is left. Homes that a move adds meanwhile
        stay."""
        if not self._lock.acquire(blocking=False):
            return  # a document is being applied: only then is known which shards are about to move
        try:
            marks = {at: self._left_homes.marks(at) for at in self._shards}
            settled = [at for at in self._shards if self._state(at) == "here"]
        finally:
            self._lock.release()
        for at in settled:
            if marks[at] and not self._shards[at].has_former_homes:
                self._left_homes.remove(at, marks[at])

    def _keys_of(self, org: str, namespace: Namespace) -> Keys | None:
        """None for an org or a model that is not served here."""
        told, found = self.desired, self.org(org)
        if told is None or found is None or told.model.namespace(namespace.adapter) != namespace:
            return None
        return self.keys(found, namespace.adapter)

    def _home(self, home: HomeSpec) -> Home:
        groups = {group.name: group for group in self._told.model.shape().groups}
        slot_bytes = groups[home.group].slot_bytes[home.index]
        return Home(home.address, home.shard, self._credentials, slot_bytes)

    def _credentials(self) -> Credentials:
        certified = self.trust.client_certificate() if self.trust else None
        told = self._told
        return Credentials(told.driver, told.secret, software=self.software, certified=certified)

    @property
    def _told(self) -> Desired:
        if self.desired is None:
            raise RuntimeError("there is no document yet")
        return self.desired

    def _move(self, at: tuple[str, int], new: HomeSpec) -> None:
        """Move a shard in a thread of its own, while requests continue."""
        control = self._control(at, new.control) if new.control else None
        driver = self._told.driver
        earlier = self._moving.get(at)

        def run() -> None:
            if earlier:
                earlier.join()
            old = self._current[at]

            pull = SlotPull(control, new.shard, old.address, old.shard, driver)
            # Another document may have come meanwhile, also one that wants it to stay where it is.
            while _place(self._homes[at]) == _place(new) != _place(old):
                if self._save_left_home(at, old) and self._shards[at].move(
                    self._home(new), pull, new.path
                ):
                    self._current[at] = new
                    if _place(told := self._homes[at]) == _place(new):
                        self._shards[at].set_path(told.path)  # it may be another one by now
                    return
                if self._stopped.wait(RETRY_SECONDS):
                    return

        self._moving[at] = threading.Thread(target=run, name=f"move {at}", daemon=True)
        self._moving[at].start()

    def _save_left_home(self, at: tuple[str, int], old: HomeSpec) -> bool:
        """Store that a shard is about to leave this home. Returns whether that is on disk."""
        try:
            self._left_homes.add(at, _place(old))
        except OSError as error:
            log.warning("Shard %s.%d can't move: its old home can't be stored: %s", *at, error)
            return False
        return True

    def _control(self, at: tuple[str, int], given: ControlSpec) -> AgentControl:
        def capability() -> str:
            told = self._homes[at].control
            return (told and told.capability) or given.capability or ""

        if given.token is not None:
            return AgentControl(given.url, given.token)
        tls = self.trust.client_context if self.trust else None
        return AgentControl(given.url, "", capability, given.key or "", tls)

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
            follower.path_now = self.cache_path
        return follower

    def recall(self, space: bytes, keys: Sequence[bytes], sibling: str = "") -> Recalled:
        """Bring what tier 2 has of a prompt into memory, or what this sibling has: of these keys, in the
        space of one org and the model's namespace."""
        driver, tag = self._driver, space[:-SPACE_BYTES]
        maker = self._maker_of(tag) if driver else None
        if maker is None or maker.namespace.digest()[:SPACE_BYTES] != space[-SPACE_BYTES:]:
            return Recalled.UNKNOWN
        if not sibling:
            is_asked = self.driver.prefetch_ahead(PromptKeys(maker, keys))
        elif (found := self.driver.siblings.find(sibling)) is None:
            return Recalled.NO_SIBLING
        else:
            is_asked = self.driver.borrow(PromptKeys(maker, keys), found)
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
        found = driver.lend(PromptKeys(maker, keys), body.start) if maker else []
        return LentAnswer(tuple(map(tuple, found)))

    def borrower(self, name: str, token: str) -> str | None:
        """Whose request this is, if it may borrow here and shows what the console has made of our secret
        for it; None for anybody else."""
        told = self.desired
        if told is None or name not in told.borrowers:
            return None
        return f"sibling:{name}" if is_token(token, token_for(told.secret, name)) else None

    def cache_path(self) -> CachePath:
        """How most bytes of the cache reach the engine."""
        layout, sizes = self.driver.layout, Counter[CachePath]()
        slot_bytes = {group.name: group.slot_bytes for group in layout.groups}
        for (group, index), home in self._settled().items():
            is_here = bool(Address.parse(home.address).path)
            path: CachePath = home.path.tier if home.path else "local" if is_here else ""
            sizes[path] += slot_bytes[group][index]
        return max(sizes, key=lambda one: (sizes[one], one), default="")

    @property
    def mover(self) -> Driver:
        """The driver, if it moves bytes itself. Raises Conflict if an engine does."""
        driver = self.driver
        if not isinstance(driver, Driver):
            raise Conflict("This driver is part of an engine: only the engine loads and stores.")
        return driver

    # Status

    def traffic(self) -> list[tuple[str, PathTraffic]]:
        """Bytes that each shard has moved, by path. A shard is named after its group and number."""
        shards = sorted(self._shards.items())
        return [(f"{at[0]}.{at[1]}", one) for at, shard in shards for one in shard.traffic()]

    def homes(self) -> list[dict[str, Any]]:
        """Where the shards are, for people."""
        return [
            {
                "group": group,
                "index": index,
                "state": self._state((group, index)),
                "node": labels["node"],
                "tier": labels["tier"],
                "link": labels["link"],
            }
            for (group, index), home in sorted(self._settled().items())
            for labels in [labels_of(home.path)]
        ]

    def _settled(self) -> dict[tuple[str, int], HomeSpec]:
        """The current homes, with the paths of the document."""
        told, here = self._homes, self._current
        return {at: told[at] if _place(told[at]) == _place(one) else one for at, one in here.items()}

    def take_slowest(self) -> list[Transfer]:
        """The slowest transfers of each org and direction, over all shards, since the last call."""
        told = self.desired
        orgs = {org.tag: org.name for org in told.orgs} if told else {}
        kept: dict[tuple[str, str], list[Transfer]] = {}
        for (group, index), shard in sorted(self._shards.items()):
            for slow in shard.take_slowest():
                if org := orgs.get(slow.tag):  # its secret may have changed since
                    one = _transfer(f"{group}.{index}", org, slow)
                    kept.setdefault((org, slow.direction), []).append(one)
        return [
            one
            for each in kept.values()
            for one in sorted(each, key=lambda transfer: transfer.seconds)[-KEPT_PER_ORG:]
        ]

    @property
    def is_far(self) -> bool:
        """Whether bytes of some shard come over a network: from where it is, or is about to be."""
        homes = [*self._homes.values(), *self._current.values()]
        return any(not Address.parse(home.address).path for home in homes)

    def lost_shards(self) -> dict[str, str]:
        """Shards that are not open, and why. Asks no worker."""
        return {shard.name: shard.lost_because for shard in self._shards.values() if shard.slots is None}

    def _state(self, at: tuple[str, int]) -> str:
        """Of a shard: "here", "moving" or "lost"."""
        moving = self._moving.get(at)
        if moving and moving.is_alive():
            return "moving"
        return "lost" if self._shards[at].slots is None else "here"

    @property
    def is_ready(self) -> bool:
        """All shards are there, and where they should be, and the driver has looked at them."""
        driver = self._driver
        if driver is None or not driver.ledger.is_reachable:
            return False
        return bool(self._shards) and all(self._state(at) == "here" for at in self._shards)

    def observed(self) -> dict[str, Any]:
        """The state of the driver and its shards, beside what is desired."""
        self._remove_emptied_homes()
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
            "shards": [
                {
                    "group": group,
                    "index": index,
                    "address": self._current[group, index].address,
                    "shard": self._current[group, index].shard,
                    "slots": shard.slots,
                    "state": self._state((group, index)),
                    "reason": shard.lost_because,
                    "left_to_move": shard.left_to_move(),
                    "former_homes": shard.former_homes,
                    "count_from": shard.count_from(),
                }
                for (group, index), shard in sorted(self._shards.items())
            ],
            "groups": [asdict(group) for group in self._driver.statistics.groups()]
            if self._driver
            else [],
        }


def _transfer(stream: str, org: str, slow: SlowTransfer) -> Transfer:
    labels = labels_of(slow.path)
    return Transfer(
        at=slow.at,
        seconds=slow.seconds,
        direction="out" if slow.direction == "out" else "in",
        org=org,
        request=slow.request,
        stream=stream,
        slot_first=slow.slot_first,
        slot_last=slow.slot_last,
        columns=slow.columns,
        bytes=slow.size,
        session=labels["session"],
        node=labels["node"],
        tier=labels["tier"],
        nic_leaf=labels["nic_leaf"],
        link=labels["link"],
    )


def _policies_and_tags(told: Desired) -> tuple[dict[str, OrgPolicies], dict[str, bytes]]:
    return {org.name: org.policies for org in told.orgs}, {org.name: org.tag for org in told.orgs}


def _data_keys(told: Desired) -> dict[str, bytes]:
    return {org.name: org.data_key for org in told.orgs if org.data_key}


def _place(home: HomeSpec) -> HomeAddress:
    return HomeAddress(home.address, home.shard)
