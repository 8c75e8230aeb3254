"""Which consoles a person works with, and their tokens: a file that nobody else may read.

`$XDG_CONFIG_HOME/tidegate/contexts.json`, by default below `~/.config`. `TIDEGATE_ADDRESS`,
`TIDEGATE_TOKEN` and `TIDEGATE_CA` take its place, so that a job of automation needs no file.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import ssl
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx
import msgspec

from console.ctl.failures import Usage
from telemetry.decoder import DOCUMENT, Malformed, decode

ADDRESS: Final = "TIDEGATE_ADDRESS"
TOKEN: Final = "TIDEGATE_TOKEN"  # noqa: S105 - the name of a variable
CA: Final = "TIDEGATE_CA"
CONTEXT: Final = "TIDEGATE_CONTEXT"
FILE: Final = "contexts.json"
PEM_BYTES_MAX: Final = 1 << 20
LOG_IN: Final = "Log in first: tidegatectl login ADDRESS"


class Context(msgspec.Struct, frozen=True, omit_defaults=True):
    """A console and a token. `authorities`: PEM of those that are trusted, if not the system's."""

    address: str
    token: str
    authorities: str = ""

    def verify(self) -> ssl.SSLContext:
        """Who may vouch for the console: nobody where there is no TLS. To read the system's authorities
        takes longer than most answers do. Raises Usage."""
        if urlsplit(self.address).scheme == "http":
            return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            trusted = ssl.create_default_context(cadata=self.authorities or None)
        except (ssl.SSLError, ValueError) as error:
            raise Usage(
                f"The authorities of {self.address} are no certificates. Log in again."
            ) from error
        trusted.minimum_version = ssl.TLSVersion.TLSv1_2
        return trusted


class Contexts(msgspec.Struct, frozen=True, omit_defaults=True):
    current: str = ""
    contexts: dict[str, Context] = {}


def folder(variables: Mapping[str, str] = os.environ) -> Path:
    return Path(variables.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "tidegate"


def read() -> Contexts:
    """Those that are stored. Raises Usage for a file that others may read or that can't be read."""
    path = folder() / FILE
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid != os.geteuid():
                raise Usage(f"{path} has tokens, and others may read it. Run: chmod 600 {path}")
            return decode(file.read(DOCUMENT.bytes_max + 1), Contexts, DOCUMENT)
    except FileNotFoundError:
        return Contexts()
    except OSError as error:
        raise Usage(f"{path} can't be read: {error.strerror}.") from error
    except Malformed as error:
        raise Usage(f"{path} is not a file of contexts: {error}.") from error


def store(name: str, context: Context) -> None:
    """Keep this context under a name, and use it from now on."""
    with _locked():
        known = read()
        _write(Contexts(current=name, contexts={**known.contexts, name: context}))


def use(name: str) -> None:
    with _locked():
        known = read()
        _named(known, name)
        _write(Contexts(current=name, contexts=known.contexts))


def remove(name: str) -> None:
    with _locked():
        known = read()
        _named(known, name)
        left = {other: context for other, context in known.contexts.items() if other != name}
        _write(Contexts(current="" if known.current == name else known.current, contexts=left))


def chosen(name: str | None, variables: Mapping[str, str] = os.environ) -> Context:
    """The context of this name, of the environment, or the current one. Raises Usage without any."""
    name = name or variables.get(CONTEXT)
    address, token = variables.get(ADDRESS), variables.get(TOKEN)
    if not name and address:
        if not token:
            raise Usage(f"{ADDRESS} is set, and {TOKEN} is not.")
        return made(address, token, variables.get(CA))
    known = read()
    name = name or known.current
    if not name:
        raise Usage(LOG_IN)
    return _named(known, name)


def made(address: str, token: str, ca: str | None, *, plain: bool = False) -> Context:
    """A context of what somebody typed. Raises Usage for what can't be one."""
    try:
        parts = urlsplit(address if "://" in address else f"https://{address}")
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        httpx.URL(parts.geturl()).host.encode("idna")
    except (ValueError, httpx.InvalidURL):  # of which those of IDNA are some
        parts, is_address = urlsplit(""), False
    if not is_address or parts.query or parts.fragment or parts.username or parts.password:
        raise Usage(f"{address!r} is not the address of a console. Write https://console.example")
    if parts.scheme == "http" and not plain and not _is_loopback(parts.hostname or ""):
        raise Usage(
            f"Others on the network could read your token on its way to {address}. Use https, or log "
            "in with --plain where the network is trusted."
        )
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise Usage("That is not a token: a token is one line of letters, digits and signs.")
    authorities = _authorities(Path(ca)) if ca else ""
    return Context(parts.geturl().rstrip("/"), token, authorities)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _authorities(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(PEM_BYTES_MAX + 1)
        if len(raw) > PEM_BYTES_MAX:
            raise Usage(f"{path} can't be used as the authorities: it is larger than 1 MiB.")
        text = raw.decode("ascii")
        ssl.create_default_context(cadata=text or " ")  # with nothing it would trust the system's
    except (OSError, UnicodeError, ssl.SSLError) as error:
        reason = (
            error.strerror if isinstance(error, FileNotFoundError) else "it has no certificates in PEM"
        )
        raise Usage(f"{path} can't be used as the authorities: {reason}.") from error
    return text


def _named(known: Contexts, name: str) -> Context:
    try:
        return known.contexts[name]
    except KeyError:
        there = ", ".join(sorted(known.contexts)) or "none"
        raise Usage(f"There is no context {name!r}. There are: {there}.") from None


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Keep two log-ins from losing one of them."""
    there = folder()
    try:
        there.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(there, os.O_RDONLY)
    except OSError as error:
        raise Usage(f"{there} can't be written: {error.strerror}.") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(contexts: Contexts) -> None:
    """Replace the file at once; it is 0600 from its beginning."""
    path = folder() / FILE
    raw = msgspec.json.format(msgspec.json.encode(contexts, order="sorted"), indent=2)
    if len(raw) >= DOCUMENT.bytes_max:
        raise Usage(f"{path} would be too large. Remove contexts that are not used any more.")
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(raw + b"\n")
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except OSError as error:
        raise Usage(f"{path} can't be written: {error.strerror}.") from error
