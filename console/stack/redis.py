"""A Redis of our own: its files, its command line, and whether it answers."""

from __future__ import annotations

import hmac
import signal
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import redis

from console.environment import remove_data
from console.redis_client import connected
from console.stack import endpoint, keys, leftovers, privileges, redis_users
from console.stack.binaries import Redis, find_redis
from console.stack.endpoint import Endpoint, UnixEndpoint
from console.stack.errors import StackError, sentences
from console.stack.redis_users import User

MEMORY_MAX = "512mb"
# Nobody sends more than a megabyte at once; to the server of telemetry others than us connect, too.
BULK_MAX = "1mb"
QUERY_MAX = "4mb"


@dataclass(frozen=True)
class RedisServer:
    """One server with everything it owns under `home`. Made by `prepare`, run by whoever asks."""

    home: Path
    installation: Redis
    endpoint: Endpoint
    password: str  # of the user `default`, who may do everything: for who runs the server
    users: tuple[User, ...] = ()
    strict: bool = False

    stop_signal = signal.SIGTERM  # writes everything down first

    @property
    def version(self) -> str:
        return ".".join(map(str, self.installation.version))

    @property
    def url(self) -> str:
        return self.url_of("", self.password)

    def url_of(self, user: str, password: str | None = None) -> str:
        """How a user reaches it; without a password: with that of its role."""
        password = self.passwords[user] if password is None else password
        credentials = f"{quote(user, safe='')}:{password}" if password else quote(user, safe="")
        # RESP2 is what every version speaks without surprises.
        if isinstance(self.endpoint, UnixEndpoint):
            return f"unix://{credentials}@{quote(str(self.endpoint.path))}?db=0&protocol=2"
        return f"redis://{credentials}@{self.endpoint}/0?protocol=2"

    @property
    def passwords(self) -> dict[str, str]:
        """By role: they follow from the one that is kept."""
        return {
            user.name: hmac.digest(self.password.encode(), user.name.encode(), "sha256").hex()
            for user in self.users
        }

    @property
    def command(self) -> list[str]:
        launch = privileges.launcher(dies_with_us=self.stop_signal)
        return [*launch, str(self.installation.path), str(self.home / "redis.conf")]

    def answers(self, timeout_seconds: int = 2) -> bool:
        """Whether it takes connections and is done loading."""
        try:
            with connected(self.url, timeout_seconds) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def stop_leftover(self) -> bool:
        """Stop a server that a killed supervisor left behind on these files."""
        return leftovers.stop_server(
            self.home / "redis.pid",
            self.home,
            names=frozenset({"redis-server", "valkey-server"}),
            how=self.stop_signal,
        )


def prepare(
    home: Path, *, durable: bool = True, users: tuple[User, ...] = (), strict: bool = False
) -> RedisServer:
    """The server over `home`, its configuration written. Nothing is running afterwards. `strict`: it
    takes nothing large from anybody."""
    with sentences("make a directory for Redis", home):
        home.mkdir(parents=True, exist_ok=True)
        home.chmod(0o700)
    server = RedisServer(
        home=home.resolve(),
        installation=find_redis(),
        endpoint=endpoint.choose(home.resolve() / "redis.sock"),
        password=keys.kept(home.with_name(f"{home.name}.password")),
        users=users,
        strict=strict,
    )
    server.stop_leftover()
    _refuse_older_than(server)
    with sentences("configure Redis", home):
        # In a file and not on the command line, where everybody could read the password.
        keys.write_private(home / "redis.conf", _configuration(server, durable=durable))
    return server


def _refuse_older_than(server: RedisServer) -> None:
    """An older Redis overlooks what a newer one has stored and starts empty: better not at all."""
    made_by = server.home / "made-by"
    with sentences("note the version of Redis", made_by):
        newest = made_by.read_text().strip() if made_by.exists() else "0"
        if int(newest) > server.installation.version[0]:
            sentence = (
                f"The data is of Redis {newest}, but only {server.version} is installed. Install "
                f"Redis {newest} again, or {remove_data()}."
            )
            raise StackError(sentence)
        keys.write_private(made_by, f"{server.installation.version[0]}\n")


def _quoted(path: Path) -> str:
    """As redis.conf wants a word with blanks or quotes in it."""
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _configuration(server: RedisServer, *, durable: bool) -> str:
    home = server.home
    if isinstance(server.endpoint, UnixEndpoint):
        listens = ["port 0", f"unixsocket {_quoted(server.endpoint.path)}", "unixsocketperm 700"]
    else:
        listens = [f"bind {endpoint.LOOPBACK}", f"port {server.endpoint.port}"]
    lines = [
        *listens,
        f"requirepass {server.password}",
        f"dir {_quoted(home)}",
        f"pidfile {_quoted(home / 'redis.pid')}",
        "daemonize no",
        "databases 16",
        f"appendonly {'yes' if durable else 'no'}",
        "appendfsync everysec",
        'save ""',
        f"maxmemory {MEMORY_MAX}",
        "maxmemory-policy noeviction",
        "set-proc-title no",
        *(
            [f"proto-max-bulk-len {BULK_MAX}", f"client-query-buffer-limit {QUERY_MAX}"]
            if server.strict
            else []
        ),
        *redis_users.lines(server.users, server.passwords),
    ]
    return "\n".join(lines) + "\n"
