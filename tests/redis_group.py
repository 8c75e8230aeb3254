"""A Redis with a replica and three Sentinels, for tests and measurements of failovers. They are
configured as docs/availability.md says, with TLS as without."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import redis

from console.redis_client import connected
from console.stack import privileges, redis_users
from console.stack.binaries import find_redis
from console.stack.endpoint import LOOPBACK, free_port
from console.stack.redis_users import User
from tests.embedded import running
from tests.live import wait_until

NAME: Final = "tidegate"  # by which Sentinels know the primary
NAME_WITH_TLS: Final = "localhost"  # of all servers, in their certificates, which have no address
PASSWORD: Final = "password-of-a-group-in-tests"  # of every user, and of the Sentinels
SENTINELS: Final = 3
DOWN_AFTER_MS: Final = 1500
WHOLE_SECONDS_MAX: Final = 120.0
ANSWER_SECONDS_MAX: Final = 10  # of one that runs, on a busy machine


@dataclass(frozen=True)
class Node:
    """A server or a Sentinel: its files, and how it is started."""

    home: Path
    port: int
    authority: Path | None = None  # with TLS: whose certificates it has

    stop_signal = signal.SIGTERM

    @property
    def url(self) -> str:
        if self.authority:
            more = f"protocol=2&ssl_ca_certs={self.authority}"
            return f"rediss://:{PASSWORD}@{NAME_WITH_TLS}:{self.port}/0?{more}"
        return f"redis://:{PASSWORD}@{LOOPBACK}:{self.port}/0?protocol=2"

    @property
    def command(self) -> list[str]:
        launch = privileges.launcher(dies_with_us=self.stop_signal)
        return [*launch, str(find_redis().path), str(self.home / "redis.conf")]

    def answers(self, timeout_seconds: int = ANSWER_SECONDS_MAX) -> bool:
        try:
            with connected(self.url, timeout_seconds) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def stop_leftover(self) -> bool:
        return False

    def info(self) -> Mapping[str, Any]:
        with connected(self.url, ANSWER_SECONDS_MAX) as client:
            found: Mapping[str, Any] = client.info("replication")
        return found


class RedisGroup:
    """Two servers, of which Sentinels make one the primary. Ends with `close`. `tls`: certificate, key
    and authorities of all of them. `down_after_ms`: a replica that is without its primary for ten times
    as long before that counts as down is never made the primary."""

    def __init__(
        self,
        directory: Path,
        users: tuple[User, ...] = redis_users.BROKER,
        tls: tuple[Path, Path, Path] | None = None,
        down_after_ms: int = DOWN_AFTER_MS,
    ) -> None:
        self._directory = directory
        self._down_after_ms = down_after_ms
        self._tls = tls
        self._host = NAME_WITH_TLS if tls else LOOPBACK
        self._running: dict[Node, tuple[subprocess.Popen[bytes], contextlib.ExitStack]] = {}
        first, second = self._server("one", users), self._server("two", users)
        self.servers = [first, second]
        self.sentinels = [self._sentinel(f"sentinel{n}", first) for n in range(SENTINELS)]

    def start(self) -> None:
        first, second = self.servers
        self._start(first)
        self._start(second, follows=first)
        for sentinel in self.sentinels:
            self._start(sentinel, "--sentinel")
        self.wait_until_whole()

    def close(self) -> None:
        for node in [*self.servers, *self.sentinels]:
            self._forget(node)

    def url(self, user: str = "", password: str = PASSWORD, options: str = "protocol=2") -> str:
        """How processes reach the primary."""
        at = f"{user}:{password}@" if password else f"{user}@"
        places = ",".join(f"{self._host}:{one.port}" for one in self.sentinels)
        scheme = "redis"
        if self._tls:
            scheme, options = "rediss", f"{options}&ssl_ca_certs={self._tls[2]}"
        return f"{scheme}+sentinel://{at}{places}/{NAME}/0?sentinel_password={PASSWORD}&{options}"

    @property
    def primary(self) -> Node:
        """The server that Sentinels call the primary."""
        for sentinel in self.sentinels:
            try:
                with connected(sentinel.url, ANSWER_SECONDS_MAX) as client:
                    found: Any = client.sentinel_get_master_addr_by_name(NAME)
            except redis.RedisError:
                continue
            return next(one for one in self.servers if one.port == found[1])
        raise LookupError("No Sentinel answers")

    @property
    def replica(self) -> Node:
        primary = self.primary
        return next(one for one in self.servers if one is not primary)

    def kill(self, node: Node) -> None:
        self._running[node][0].kill()
        self._forget(node)

    @contextlib.contextmanager
    def stopped(self, node: Node) -> Iterator[None]:
        """SIGSTOP: its connections stay, and nothing is answered."""
        process = self._running[node][0]
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def bring_back(self, node: Node) -> None:
        """The killed server, as the replica of the other one."""
        self._start(node, follows=next(one for one in self.servers if one is not node))

    def restart(self) -> None:
        """Both servers, from nothing but their files, as Redis has written them since."""
        for node in self.servers:
            self._forget(node)
        for node in self.servers:
            self._start(node)

    def wait_until_whole(self) -> None:
        """One primary with a replica that has all of it, as all Sentinels see it."""
        wait_until("the group is whole", self._is_whole, WHOLE_SECONDS_MAX)

    def wait_for_new_primary(self, before: Node) -> None:
        def is_there() -> bool:
            try:
                now = self.primary
                return now is not before and now.info()["role"] == "master"
            except (redis.RedisError, LookupError):  # a busy machine may answer late
                return False

        wait_until("another server is the primary", is_there, WHOLE_SECONDS_MAX)

    # Inside

    def _is_whole(self) -> bool:
        try:
            primary = self.primary
            found = primary.info()
            replica = found.get("slave0", {})
            if found["role"] != "master" or replica.get("state") != "online":
                return False
            return all(self._agrees(one, primary) for one in self.sentinels)
        except (redis.RedisError, LookupError):
            return False

    def _agrees(self, sentinel: Node, primary: Node) -> bool:
        with connected(sentinel.url, ANSWER_SECONDS_MAX) as client:
            seen: Any = client.sentinel_masters()
            replicas: Any = client.sentinel_slaves(NAME)
        about = seen[NAME]
        return (
            about["port"] == primary.port
            and about["num-other-sentinels"] == SENTINELS - 1
            and not (about["is_sdown"] or about["is_odown"])
            and "failover_in_progress" not in about["flags"]
            and len(replicas) == 1
            and not (replicas[0]["is_sdown"] or replicas[0]["is_disconnected"])
            and replicas[0]["master-link-status"] == "ok"
        )

    def _start(self, node: Node, *more: str, follows: Node | None = None) -> None:
        if follows:
            more = (*more, "--replicaof", self._host, str(follows.port))
        kept = contextlib.ExitStack()
        process = kept.enter_context(running(_With(node, more), node.home / "log"))
        self._running[node] = process, kept

    def _forget(self, node: Node) -> None:
        found = self._running.pop(node, None)
        if found:
            found[0].send_signal(signal.SIGCONT)
            found[1].close()

    def _server(self, name: str, users: tuple[User, ...]) -> Node:
        node = self._node(name)
        lines = [
            f"requirepass {PASSWORD}",
            "masteruser replica",
            f"masterauth {PASSWORD}",
            "appendonly no",
            'save ""',
            *([f"replica-announce-ip {self._host}"] if self._tls else []),
            "repl-diskless-sync yes",
            "repl-diskless-sync-delay 0",
            *redis_users.lines(
                (*users, *redis_users.REPLICATION),
                {one.name: PASSWORD for one in (*users, *redis_users.REPLICATION)},
            ),
        ]
        self._write(node, lines)
        return node

    def _sentinel(self, name: str, primary: Node) -> Node:
        node = self._node(name)
        by_name = ["sentinel resolve-hostnames yes", "sentinel announce-hostnames yes"]
        lines = [
            f"requirepass {PASSWORD}",
            f"sentinel sentinel-pass {PASSWORD}",
            *(by_name if self._tls else []),
            f"sentinel monitor {NAME} {self._host} {primary.port} 2",
            f"sentinel auth-user {NAME} sentinel",
            f"sentinel auth-pass {NAME} {PASSWORD}",
            f"sentinel down-after-milliseconds {NAME} {self._down_after_ms}",
            f"sentinel failover-timeout {NAME} 5000",
            f"sentinel parallel-syncs {NAME} 1",
        ]
        self._write(node, lines)
        return node

    def _node(self, name: str) -> Node:
        home = self._directory / name
        home.mkdir(parents=True)
        return Node(home, free_port(), self._tls[2] if self._tls else None)

    def _write(self, node: Node, lines: list[str]) -> None:
        common = [f"bind {LOOPBACK}", f'dir "{node.home}"', "daemonize no", *self._listening(node.port)]
        (node.home / "redis.conf").write_text("\n".join([*common, *lines]) + "\n")

    def _listening(self, port: int) -> list[str]:
        if self._tls is None:
            return [f"port {port}"]
        certificate, key, authorities = self._tls
        return [
            *("port 0", f"tls-port {port}", "tls-replication yes", "tls-auth-clients no"),
            *(f'tls-cert-file "{certificate}"', f'tls-key-file "{key}"'),
            f'tls-ca-cert-file "{authorities}"',
        ]


class _With:
    """A node with more on its command line."""

    stop_signal = signal.SIGTERM

    def __init__(self, node: Node, more: tuple[str, ...]) -> None:
        self._node = node
        self.command = [*node.command, *more]

    def answers(self, timeout_seconds: int = ANSWER_SECONDS_MAX) -> bool:
        return self._node.answers(timeout_seconds)

    def stop_leftover(self) -> bool:
        return False


@contextlib.contextmanager
def redis_group(
    directory: Path,
    users: tuple[User, ...] = redis_users.BROKER,
    tls: tuple[Path, Path, Path] | None = None,
    down_after_ms: int = DOWN_AFTER_MS,
) -> Iterator[RedisGroup]:
    made = RedisGroup(directory, users, tls, down_after_ms)
    try:
        made.start()
        yield made
    finally:
        made.close()


def seconds_until(answers: Any, at_most: float = 60.0) -> float:
    """How long it takes until this is true, asked again and again."""
    began = time.monotonic()
    wait_until("it works again", answers, at_most)
    return time.monotonic() - began
