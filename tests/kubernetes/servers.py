"""PostgreSQL and Redis of the tests as pods reach them: over the network, as those of somebody else."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from console.stack import redis as redis_server
from console.stack.postgres import SOCKET_NAME
from tests.embedded import running
from tests.kubernetes.bed import Bed
from tests.kubernetes.proxy import Proxy
from tests.prepared import database


@contextlib.contextmanager
def for_pods(bed: Bed) -> Iterator[tuple[str, str]]:
    """The URLs of an empty database and of Redis. Theirs are sockets of files that only their user may
    open."""
    with contextlib.ExitStack() as opened:
        here = urlsplit(opened.enter_context(database()))
        folder = Path(parse_qs(here.query)["host"][0])
        postgres = Proxy(folder / SOCKET_NAME, bed.host)
        opened.callback(postgres.close)
        known = here.netloc.rpartition("@")[0]
        database_url = f"postgresql://{known}@{bed.host}:{postgres.port}{here.path}?sslmode=disable"

        # One of its own: processes of the fleet use its first database, since none of them may SELECT.
        home = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-redis-")))
        made = redis_server.prepare(home / "r", durable=False)
        opened.enter_context(running(made, home / "log"))
        here = urlsplit(made.url)
        redis = Proxy(Path(unquote(here.path)), bed.host)
        opened.callback(redis.close)
        options = {key: value for key, [value] in parse_qs(here.query).items()}
        known, number = here.netloc.rpartition("@")[0], options.pop("db", "0")
        redis_url = f"redis://{known}@{bed.host}:{redis.port}/{number}?{urlencode(options)}"
        yield database_url, redis_url
