"""Where the shards of a driver are, where its document has them, and the way there."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

from kvss_agent.client import Address, Credentials
from kvss_agent.security.confirmations import ShardCover
from kvss_agent.security.trust import Trust
from swdriver_shim.cache_map.codec import CachePath
from swdriver_shim.daemon.left_homes import At, HomeAddress, LeftHomes
from swdriver_shim.data_plane.agent_control import AgentControl
from swdriver_shim.data_plane.homes import Home, SlotPull
from swdriver_shim.data_plane.paths import PathSpec, PathTraffic, labels_of
from swdriver_shim.data_plane.shard import Shard
from swdriver_shim.data_plane.shard.control import ShardControl
from swdriver_shim.data_plane.slow_transfers import KEPT_PER_ORG, SlowTransfer
from swdriver_shim.data_plane.worker.client import RemoteShard
from swdriver_shim.desired import ControlSpec, Desired, HomeSpec
from telemetry.emit.transfers import Transfer

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 5.0  # between attempts to move a shard

MakeRemote = Callable[[str, int, Home, PathSpec | None], RemoteShard]


def homes_of(told: Desired) -> dict[At, HomeSpec]:
    return {(home.group, home.index): home for home in told.homes}


class ShardHomes:
    """All methods may be called from any thread, `open_*` and `follow` by one at a time."""

    def __init__(
        self,
        told: Callable[[], Desired],
        stopped: threading.Event,
        software: str,
        notes: Path | None,
        trust: Trust | None,
    ) -> None:
        """`told`: the document that is followed now. `notes`: a folder for what the next process of this
        driver continues with. `trust` has the certificate that is shown to agents, `software` is the
        version that they are told. Raises OSError for notes that can't be read."""
        self.desired: Mapping[At, HomeSpec] = {}
        self._told = told
        self._stopped = stopped
        self._software = software
        self._notes = notes
        self._trust = trust
        self._left = LeftHomes(notes / "places" if notes else None)
        self._shards: Mapping[At, ShardControl] = {}
        self._current: dict[At, HomeSpec] = {}
        self._moving: dict[At, threading.Thread] = {}

    # What the document says

    def open_here(self, homes: Mapping[At, HomeSpec]) -> dict[At, Shard]:
        """Shards whose bytes this process moves."""
        opened = {
            at: Shard(
                f"{at[0]}.{at[1]}",
                self._home(home),
                self._notes,
                home.path,
                self._earlier_homes(at, home),
            )
            for at, home in homes.items()
        }
        self._shards, self._current = opened, dict(homes)
        return opened

    def open_remote(self, homes: Mapping[At, HomeSpec], make: MakeRemote) -> dict[At, RemoteShard]:
        """Stand-ins for shards whose bytes workers move."""
        opened = {at: make(*at, self._home(home), home.path) for at, home in homes.items()}
        for at, shard in opened.items():
            shard.earlier_homes = self._earlier_homes(at, homes[at])
        self._shards, self._current = opened, dict(homes)
        return opened

    def follow(
        self, homes: Mapping[At, HomeSpec], removed: Collection[str], moved: Collection[str]
    ) -> None:
        """Go where the document has them, while requests continue. Agents as in `set_agents`."""
        earlier, self.desired = self.desired, homes
        for shard in self._shards.values():
            shard.set_agents(removed, moved)
        for at, home in homes.items():
            if at in earlier and _place(home) != _place(earlier[at]):
                self._move(at, home)
            elif at in earlier and _place(home) == _place(self._current[at]):
                self._shards[at].set_path(home.path)  # the fabric may have changed around it

    def note_left(self, before: Mapping[At, HomeSpec], now: Mapping[At, HomeSpec]) -> None:
        """Store the homes that are other ones now: a move may be on its way there, and bytes that are
        stored meanwhile are there already. Raises OSError."""
        for at, home in before.items():
            if at not in now or _place(now[at]) != _place(home):
                self._left.add(at, _place(home))

    def _earlier_homes(self, at: At, home: HomeSpec) -> list[Home]:
        """Where an earlier process may have left bytes of this shard."""
        slot_bytes = 0  # slots of any size: they are only emptied
        left = [Home(*place, self._credentials, slot_bytes) for place in self._left.left_by(at)]
        here = self._home(home)
        return [one for one in left if one != here]

    def remove_emptied(self, following: threading.Lock) -> None:
        """Strike off the left homes of shards at which nothing is left. Homes that a move adds meanwhile
        stay. `following`: held while a document is followed; only then is known which shards are about
        to move."""
        if not following.acquire(blocking=False):
            return
        try:
            marks = {at: self._left.marks(at) for at in self._shards}
            settled = [at for at in self._shards if self.state(at) == "here"]
        finally:
            following.release()
        for at in settled:
            if marks[at] and not self._shards[at].has_former_homes:
                self._left.remove(at, marks[at])

    def release(self) -> None:
        """Have workers let go of their shards: the next process has them."""
        for shard in self._shards.values():
            if isinstance(shard, RemoteShard) and not shard.release():
                log.warning("The worker of shard %s does not say that it has closed it", shard.name)

    # Moves

    def _move(self, at: At, new: HomeSpec) -> None:
        """Move a shard in a thread of its own, while requests continue."""
        control = self._control(at, new.control) if new.control else None
        driver = self._told().driver
        earlier = self._moving.get(at)

        def run() -> None:
            if earlier:
                earlier.join()
            old = self._current[at]
            pull = SlotPull(control, new.shard, old.address, old.shard, driver)
            # Another document may have come meanwhile, also one that wants it to stay where it is.
            while _place(self.desired[at]) == _place(new) != _place(old):
                if self._save_left(at, old) and self._shards[at].move(self._home(new), pull, new.path):
                    self._current[at] = new
                    if _place(told := self.desired[at]) == _place(new):
                        self._shards[at].set_path(told.path)  # it may be another one by now
                    return
                if self._stopped.wait(RETRY_SECONDS):
                    return

        self._moving[at] = threading.Thread(target=run, name=f"move {at}", daemon=True)
        self._moving[at].start()

    def _save_left(self, at: At, old: HomeSpec) -> bool:
        """Store that a shard is about to leave this home. Returns whether that is on disk."""
        try:
            self._left.add(at, _place(old))
        except OSError as error:
            log.warning("Shard %s.%d can't move: its old home can't be stored: %s", *at, error)
            return False
        return True

    def _home(self, home: HomeSpec) -> Home:
        groups = {group.name: group for group in self._told().model.shape().groups}
        slot_bytes = groups[home.group].slot_bytes[home.index]
        return Home(home.address, home.shard, self._credentials, slot_bytes)

    def _credentials(self) -> Credentials:
        certified = self._trust.client_certificate() if self._trust else None
        told = self._told()
        return Credentials(told.driver, told.secret, software=self._software, certified=certified)

    def _control(self, at: At, given: ControlSpec) -> AgentControl:
        def capability() -> str:
            told = self.desired[at].control
            return (told and told.capability) or given.capability or ""

        if given.token is not None:
            return AgentControl(given.url, given.token)
        tls = self._trust.client_context if self._trust else None
        return AgentControl(given.url, "", capability, given.key or "", tls)

    # Where they are

    def state(self, at: At) -> str:
        """Of a shard: "here", "moving" or "lost"."""
        moving = self._moving.get(at)
        if moving and moving.is_alive():
            return "moving"
        return "lost" if self._shards[at].slots is None else "here"

    @property
    def are_here(self) -> bool:
        """Whether all shards are there, and where they should be."""
        return bool(self._shards) and all(self.state(at) == "here" for at in self._shards)

    @property
    def lost(self) -> list[At]:
        return [at for at in self._shards if self.state(at) == "lost"]

    def not_emptied(self, tags: Collection[bytes]) -> list[At]:
        """Those that have left a home which may still hold bytes of one of these tags."""
        return [
            at
            for at, shard in self._shards.items()
            if shard.former_homes and any(shard.may_be_elsewhere(tag) for tag in tags)
        ]

    @property
    def are_lost(self) -> bool:
        """Whether none is open."""
        return len(self.lost) == len(self._shards)

    def why_lost(self) -> dict[str, str]:
        """Shards that are not open, and why. Asks no worker."""
        return {shard.name: shard.lost_because for shard in self._shards.values() if shard.slots is None}

    @property
    def is_far(self) -> bool:
        """Whether bytes of some shard come over a network: from where it is, or is about to be."""
        homes = [*self.desired.values(), *self._current.values()]
        return any(not Address.parse(home.address).path for home in homes)

    def cache_path(self) -> CachePath:
        """How most bytes of the cache reach the engine."""
        slot_bytes = {group.name: group.slot_bytes for group in self._told().model.shape().groups}
        sizes = Counter[CachePath]()
        for (group, index), home in self._settled().items():
            is_here = bool(Address.parse(home.address).path)
            path: CachePath = home.path.tier if home.path else "local" if is_here else ""
            sizes[path] += slot_bytes[group][index]
        return max(sizes, key=lambda one: (sizes[one], one), default="")

    def _settled(self) -> dict[At, HomeSpec]:
        """The current homes, with the paths of the document."""
        told, here = self.desired, self._current
        return {at: told[at] if _place(told[at]) == _place(one) else one for at, one in here.items()}

    def covers(self) -> tuple[ShardCover, ...]:
        """What a statement about all of them covers."""
        return tuple(
            ShardCover(group, index, home.address, home.shard)
            for (group, index), home in sorted(self._current.items())
        )

    def shown(self) -> list[dict[str, Any]]:
        """Where they are, for people."""
        return [
            {
                "group": group,
                "index": index,
                "state": self.state((group, index)),
                "node": labels["node"],
                "tier": labels["tier"],
                "link": labels["link"],
            }
            for (group, index), home in sorted(self._settled().items())
            for labels in [labels_of(home.path)]
        ]

    def observed(self) -> list[dict[str, Any]]:
        """The state of each, for the console."""
        return [
            {
                "group": group,
                "index": index,
                "address": self._current[group, index].address,
                "shard": self._current[group, index].shard,
                "slots": shard.slots,
                "state": self.state((group, index)),
                "reason": shard.lost_because,
                "left_to_move": shard.left_to_move(),
                "former_homes": shard.former_homes,
                "former_addresses": [left.address for left in self._left.left_by((group, index))],
                "count_from": shard.count_from(),
            }
            for (group, index), shard in sorted(self._shards.items())
        ]

    # What they have moved

    def traffic(self) -> list[tuple[str, PathTraffic]]:
        """Bytes that each shard has moved, by path. A shard is named after its group and number."""
        shards = sorted(self._shards.items())
        return [(f"{at[0]}.{at[1]}", one) for at, shard in shards for one in shard.traffic()]

    def take_slowest(self, orgs: Mapping[bytes, str]) -> list[Transfer]:
        """The slowest transfers of each org and direction, over all shards, since the last call. `orgs`:
        their names, by tag."""
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


def _place(home: HomeSpec) -> HomeAddress:
    return HomeAddress(home.address, home.shard)
