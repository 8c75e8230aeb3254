"""A Redis of our own: its files, its command line, and whether it answers."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import redis

from console.stack import endpoint, keys, leftovers, privileges
from console.stack.binaries import Redis, find_redis
from console.stack.endpoint import Endpoint, UnixEndpoint
from console.stack.errors import StackError, sentences

MEMORY_MAX = "512mb"


@dataclass(frozen=True)
class RedisServer:
    """One server with everything it owns under `home`. Made by `prepare`, run by whoever asks."""

    home: Path
    installation: Redis
    endpoint: Endpoint
    password: str

    stop_signal = signal.SIGTERM  # writes everything down first

    @property
    def version(self) -> str:
        return ".".join(map(str, self.installation.version))

    @property
    def url(self) -> str:
        # RESP2 is what every version speaks without surprises.
        if isinstance(self.endpoint, UnixEndpoint):
            path = quote(str(self.endpoint.path))
            return f"unix://:{self.password}@{path}?db=0&protocol=2"
        return f"redis://:{self.password}@{self.endpoint}/0?protocol=2"

    @property
    def command(self) -> list[str]:
        launch = privileges.launcher(dies_with_us=self.stop_signal)
        return [*launch, str(self.installation.path), str(self.home / "redis.conf")]

    def answers(self, timeout_seconds: int = 2) -> bool:
        """Whether it takes connections and is done loading."""
        client = redis.Redis.from_url(
            self.url, socket_timeout=timeout_seconds, socket_connect_timeout=timeout_seconds
        )
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
        finally:
            client.close()

    def stop_leftover(self) -> bool:
        """Stop a server that a killed supervisor left behind on these files."""
        return leftovers.stop_server(
            self.home / "redis.pid",
            self.home,
            names=frozenset({"redis-server", "valkey-server"}),
            how=self.stop_signal,
        )


def prepare(home: Path, *, durable: bool = True) -> RedisServer:
    """The server over `home`, its configuration written. Nothing is running afterwards."""
    with sentences("make a directory for Redis", home):
        home.mkdir(parents=True, exist_ok=True)
        home.chmod(0o700)
    server = RedisServer(
        home=home.resolve(),
        installation=find_redis(),
        endpoint=endpoint.choose(home.resolve() / "redis.sock"),
        password=keys.kept(home.with_name(f"{home.name}.password")),
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
                f"The data was made by Redis {newest}, and here is only {server.version}. Install "
                f"Redis {newest} again, or throw the data away with `make clean DATA=1`."
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
    ]
    return "\n".join(lines) + "\n"
