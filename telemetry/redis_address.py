"""The address of a Redis, as every process takes it: parsed in one place.

    redis://user:password@host:6379/0                one server
    rediss://user:password@host:6379/0               with TLS
    unix://user:password@/run/redis.sock?db=0        a Unix socket
    redis+sentinel://user:password@a,b,c:26379/name/0  the server that Sentinels call the primary
    rediss+sentinel://…                              with TLS, to Sentinels and servers

Behind the question mark: options of the client, such as `ssl_ca_certs`. With Sentinels also
`sentinel_username` and `sentinel_password`, if they ask for their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, TypedDict
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

PORT: Final = 6379
SENTINEL_PORT: Final = 26379
SENTINELS_MAX: Final = 16
DATABASES_MAX: Final = 1024

ALLOWED: Final = (
    "a URL that begins with `redis://`, `rediss://` or `unix://`, or with `redis+sentinel://` or "
    "`rediss+sentinel://` and names Sentinels and their primary: "
    "`redis+sentinel://user:password@host1,host2,host3:26379/name/0`"
)
_SENTINEL: Final = "+sentinel"
_SENTINEL_OPTIONS: Final = ("sentinel_username", "sentinel_password")
# Where one of these is in a password as it is, a part of the password is taken for something else.
ESCAPE: Final = "In a password write %2F for /, %3F for ?, %40 for @, %5B for [ and %5D for ]."
WRONG_PORT: Final = "What follows the host is no port from 1 to 65535."
_HOST: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_IPV6: Final = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?")
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")  # what Sentinel takes for the name of a primary

Place = tuple[str, int]


class _Common(TypedDict):
    user: str
    password: str


class WrongAddress(ValueError):
    """A sentence: what is wrong with the address. It never has the password."""


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """One parsed address. Made by `parse`."""

    places: tuple[Place, ...] = ()  # the server, or its Sentinels; none with a Unix socket
    path: str = ""  # of the Unix socket
    primary: str = ""  # the name that Sentinels know the primary by; empty without Sentinels
    is_tls: bool = False
    database: int = 0
    user: str = ""
    password: str = field(default="", repr=False)
    sentinel_user: str = ""
    sentinel_password: str = field(default="", repr=False)
    options: tuple[tuple[str, str], ...] = ()  # of the client

    @property
    def has_sentinels(self) -> bool:
        return bool(self.primary)

    def plain(self, place: Place | None = None, *, scheme: str = "", has_options: bool = True) -> str:
        """The URL of one server, as clients of Redis take it; by default of the first place."""
        at, options = _credentials(self.user, self.password), list(self.options) if has_options else []
        if self.path:
            options.append(("db", str(self.database)))
            return f"unix://{at}{quote(self.path)}{_query(options)}"
        scheme = scheme or ("rediss" if self.is_tls else "redis")
        return f"{scheme}://{at}{_shown(place or self.places[0])}/{self.database}{_query(options)}"

    def of_sentinel(self) -> str:
        """The URL of the first Sentinel."""
        scheme = "rediss" if self.is_tls else "redis"
        at = _credentials(self.sentinel_user, self.sentinel_password)
        return f"{scheme}://{at}{_shown(self.places[0])}{_query(list(self.options))}"


def _credentials(user: str, password: str) -> str:
    found = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "")
    return f"{found}@" if found else ""


def _shown(place: Place) -> str:
    host, port = place
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _query(options: list[tuple[str, str]]) -> str:
    return f"?{urlencode(options)}" if options else ""


def parse(text: str) -> RedisAddress:
    """Raises WrongAddress with a sentence, which quotes nothing that may be a piece of the password."""
    try:
        parts = urlsplit(text)
    except ValueError:
        raise WrongAddress(f"It is no URL. {ESCAPE}") from None
    scheme, is_sentinel = parts.scheme.removesuffix(_SENTINEL), parts.scheme.endswith(_SENTINEL)
    if scheme not in ("redis", "rediss", "unix") or (is_sentinel and scheme == "unix"):
        raise WrongAddress("It begins with none of redis://, rediss://, redis+sentinel:// and unix://.")
    if scheme != "unix" and "@" in parts.path:
        raise WrongAddress(f"The host is missing: an @ comes after a slash. {ESCAPE}")
    if parts.fragment:
        raise WrongAddress("It has a part behind #; write %23 for a # in a password.")
    credentials, at, netloc = parts.netloc.rpartition("@")
    user, colon, password = credentials.partition(":")
    if at and colon and not password:
        raise WrongAddress("The password before the @ is empty.")
    options = _options(parts.query)
    path = unquote(parts.path)
    common: _Common = {"user": unquote(user), "password": unquote(password)}
    if scheme == "unix":
        return _unix(netloc, path, options, common)
    if is_sentinel:
        return _sentinels(netloc, path, options, common, is_tls=scheme == "rediss")
    if "," in netloc:
        raise WrongAddress(f"It names several hosts, which only {scheme}+sentinel:// may.")
    if given := [name for name in _SENTINEL_OPTIONS if name in options]:
        raise WrongAddress(f"{given[0]} is for {scheme}+sentinel:// only.")
    return RedisAddress(
        places=(_place(netloc, PORT),),
        is_tls=scheme == "rediss",
        database=_database(options.pop("db", path.strip("/"))),
        options=tuple(options.items()),
        **common,
    )


def _unix(netloc: str, path: str, options: dict[str, str], common: _Common) -> RedisAddress:
    if netloc:
        raise WrongAddress("A Unix socket has a path and no host: unix:///run/redis.sock.")
    if not path.strip("/"):
        raise WrongAddress("The path of the Unix socket is missing.")
    if "password" in options:
        common["password"] = options.pop("password")
    database = _database(options.pop("db", ""))
    return RedisAddress(path=path, database=database, options=tuple(options.items()), **common)


def _sentinels(
    netloc: str, path: str, options: dict[str, str], common: _Common, *, is_tls: bool
) -> RedisAddress:
    named = netloc.split(",")
    if len(named) > SENTINELS_MAX:
        raise WrongAddress(f"It names {len(named)} Sentinels; {SENTINELS_MAX} are the most.")
    # A port that only the last one has is the port of all, as people write it for PostgreSQL.
    last = _place(named[-1], SENTINEL_PORT)
    places = (*(_place(one, last[1]) for one in named[:-1]), last)
    if len(set(places)) < len(places):
        raise WrongAddress("It names a Sentinel twice.")
    name, _, database = path.strip("/").partition("/")
    if not _NAME.fullmatch(name):
        raise WrongAddress(
            "Behind the Sentinels it has to say by which name they know the primary: …:26379/name/0."
        )
    return RedisAddress(
        places=places,
        primary=name,
        is_tls=is_tls,
        database=_database(options.pop("db", database)),
        sentinel_user=options.pop("sentinel_username", ""),
        sentinel_password=options.pop("sentinel_password", ""),
        options=tuple(options.items()),
        **common,
    )


def _options(query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError:
        raise WrongAddress("What follows the question mark is not name=value&name=value.") from None
    options = dict(pairs)
    if len(options) < len(pairs):
        raise WrongAddress("An option behind the question mark is given twice.")
    if empty := [name for name, value in pairs if not value]:
        raise WrongAddress(f"The option {empty[0]} is empty.")
    return options


def _place(text: str, port_if_none: int) -> Place:
    """A host and its port."""
    bracketed = re.fullmatch(r"\[([^\[\]]+)\](?::(.*))?", text)
    if bracketed:
        host, port, is_host = bracketed[1], bracketed[2], bool(_IPV6.fullmatch(bracketed[1]))
    else:
        host, colon, after = text.partition(":")
        port, is_host = after if colon else None, bool(_HOST.fullmatch(host))
    if not host:
        raise WrongAddress("A host is missing.")
    if not is_host:
        raise WrongAddress(f"A host has characters that host names and addresses don't have. {ESCAPE}")
    if port is None:
        return host, port_if_none
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise WrongAddress(f"{WRONG_PORT} {ESCAPE}")
    return host, int(port)


def _database(text: str) -> int:
    if not text:
        return 0
    if not re.fullmatch(r"[0-9]{1,4}", text) or int(text) >= DATABASES_MAX:
        raise WrongAddress(
            f"What names the database is no number from 0 to {DATABASES_MAX - 1}. {ESCAPE}"
        )
    return int(text)
