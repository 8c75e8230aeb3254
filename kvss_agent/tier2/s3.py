"""Column files as objects of an S3 bucket: Amazon's, or any service that speaks its protocol.

A PUT publishes all or nothing, so there is nothing unfinished to clean up. Credentials come from where
they usually do: `AWS_*` in the agent's environment, a web identity, or the machine's role; never from a
desired document.

The payload goes unsigned, because its seal says more than the signature would: hashing it once more for
SigV4 costs six times what sending it does.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, TypeVar

import obstore
from obstore import exceptions
from obstore.store import S3Store

from kvss_agent.tier2.address import Scope, parse
from kvss_agent.tier2.backend import (
    Failed,
    Fault,
    Found,
    Incoming,
    Outgoing,
    Progress,
    Removed,
    Seen,
    ignore_progress,
)
from kvss_agent.tier2.index import Caps

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig, RetryConfig, S3Config

PAGE_OBJECTS: Final = 1000  # of a listing, and of a bulk delete
_CHUNK_BYTES: Final = 1 << 20
_T = TypeVar("_T")
_PROBE: Final = ".probe"
PROBE_KEPT: Final = timedelta(hours=1)
_STATUS: Final = re.compile(r"status code: (\d{3})\b")
_NO_PATH: Final = "object with invalid path"
_FULL: Final = re.compile(r"status code: 507\b|<Code>\w*(?:Quota|Full)\w*</Code>")
_FAULTS: Final = {"401": Fault.DENIED, "403": Fault.DENIED, "404": Fault.VANISHED}
_ATTEMPTS: Final = 5  # against another agent that writes what is being purged
_RETRY: Final[RetryConfig] = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=10),
    "backoff": {
        "init_backoff": timedelta(milliseconds=50),
        "max_backoff": timedelta(seconds=1),
        "base": 2,
    },
}


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """What the service refuses is a fault with a name."""
    try:
        yield
    except (exceptions.BaseError, OSError) as error:
        raise Failed(_fault_of(error), _sentence(error)) from error
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if isinstance(error, Exception):
            raise
        # The library has panicked over an answer. That is no Exception: nobody else would expect it.
        raise Failed(Fault.OTHER, f"the library has panicked: {_sentence(error)}") from error


def _fault_of(error: Exception) -> Fault:
    text = str(error)
    if _FULL.search(text):
        return Fault.NO_SPACE
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return Fault.DENIED
    if isinstance(error, FileNotFoundError):  # for who wants to write or list: there is no such bucket
        return Fault.VANISHED
    if isinstance(error, exceptions.GenericError):  # of listings the library says so whatever it is
        status = _STATUS.search(text)
        return _FAULTS.get(status[1], Fault.UNREACHABLE) if status else Fault.UNREACHABLE
    return Fault.OTHER


def _answer(call: Callable[..., _T], *arguments: object) -> _T | Failed:
    try:
        return call(*arguments)
    except Failed as failed:
        return failed


def _sentence(error: BaseException) -> str:
    """What the library says, without the dump of its structures behind it."""
    said = str(error).partition("\n\nDebug source:")[0][:500]
    if _NO_PATH in said:
        said += ". It is not of tier 2, and nothing can be listed beside it: remove it from the bucket"
    return said


class S3:
    """See `Backend`. `endpoint` is empty for Amazon; plain HTTP only if it says so."""

    kind = "s3"
    looks_together = False

    def __init__(
        self,
        bucket: str,
        *,
        prefix: str = "",
        endpoint: str = "",
        region: str = "us-east-1",
    ) -> None:
        client: ClientConfig = {
            "connect_timeout": timedelta(seconds=2),
            "timeout": timedelta(seconds=30),
            "allow_http": endpoint.startswith("http://"),
        }
        where: S3Config = {"region": region, "unsigned_payload": True}
        if endpoint:
            where["endpoint"] = endpoint
        self._store = S3Store(
            bucket,
            prefix=prefix.strip("/") or None,
            config=where,
            client_options=client,
            retry_config=_RETRY,
        )
        self._strangers = 0

    def open(self) -> None:
        try:
            self._put(_PROBE, b"probe")
        except Failed as failed:
            if failed.fault is not Fault.NO_SPACE:  # what is full is read, and emptied
                raise
        else:
            self.delete([_PROBE])

    def properties(self) -> Mapping[str, bool | int]:
        return {"unknown_files": self._strangers}

    def write(self, files: Sequence[Outgoing]) -> list[bool | Failed]:
        return [_answer(self._write, file) for file in files]

    def read(self, files: Sequence[Incoming]) -> list[int | Failed | None]:
        return [_answer(self._read, *file) for file in files]

    def _write(self, file: Outgoing) -> bool:
        body = b"".join(file.parts)
        if not file.intact():
            return False
        try:
            self._put(file.name, body)
        except Failed as failed:
            if failed.fault is Fault.UNREACHABLE:  # the object may be there, and only the answer is lost
                with contextlib.suppress(Failed):  # the first fault is the one to tell
                    self.delete([file.name])
            raise
        return True

    def _put(self, name: str, body: bytes) -> None:
        """Refuses a bucket that keeps old versions: a purge would leave all of them behind."""
        with _translated():
            put = obstore.put(self._store, name, body, use_multipart=False)
            if put["version"] not in (None, "null"):
                obstore.delete(self._store, name)
                raise Failed(Fault.DENIED, "the bucket keeps old versions, which a purge cannot remove")

    def _read(self, name: str, parts: Sequence[memoryview]) -> int | None:
        with _translated():
            try:
                result = obstore.get(self._store, name)
            except FileNotFoundError:
                return None
            return _scatter(result.stream(min_chunk_size=_CHUNK_BYTES), parts)

    def look(self, names: Sequence[str]) -> list[Seen | Failed | None]:
        return [self._look(name) for name in names]

    def _look(self, name: str) -> Seen | None:
        with _translated():
            try:
                found = obstore.head(self._store, name)
            except FileNotFoundError:
                return None
            return Seen(found["size"], found["last_modified"].timestamp())

    def delete(self, names: Sequence[str]) -> None:
        with _translated():
            if names:
                obstore.delete(self._store, list(names))

    def damaged(self, names: Sequence[str]) -> list[bool]:
        self.delete(names)
        return [False] * len(names)

    def files(self, progress: Progress = ignore_progress) -> Iterator[Found]:
        self._strangers = done = 0
        progress(done, None)
        with _translated(), self._checked() as check:
            for page in obstore.list(self._store, chunk_size=PAGE_OBJECTS):
                items = check(page)
                for item in items:
                    address = parse(item["path"])
                    if address is None:
                        self._strangers += 1
                    else:
                        yield Found(address, item["size"], item["last_modified"].timestamp())
                done += len(items)
                progress(done, None)

    def purge(self, scope: Scope) -> Removed:
        columns = size = 0
        found = ""
        with _translated():
            for _ in range(_ATTEMPTS):
                found = ""
                for folder in self._folders_of(scope):
                    with self._checked(folder) as check:
                        for page in obstore.list(self._store, folder, chunk_size=PAGE_OBJECTS):
                            if not (gone := check(page)):
                                continue
                            obstore.delete(self._store, [item["path"] for item in gone])
                            columns += sum(parse(item["path"]) is not None for item in gone)
                            size += sum(item["size"] for item in gone)
                            found = next((item["path"] for item in gone if _counts(item)), found)
                if not found:
                    return Removed(columns, size)
        raise Failed(Fault.OTHER, f"others keep writing what is being purged: {found} is there again")

    def own_faults(self) -> Mapping[str, int]:
        return {}  # it does nothing by itself

    def set_caps(self, caps: Caps) -> None:
        """It has no copies."""

    def tidy(self) -> None:
        """Nothing is left undone."""

    def close(self) -> None:
        """The library closes its connections when nobody refers to it any more."""

    @contextlib.contextmanager
    def _checked(self, folder: str = "") -> Iterator[Callable[[Iterable[ObjectMeta]], list[ObjectMeta]]]:
        """A listing of a folder, which has to show what was put there just before. A proxy may answer
        with a page of its own, such as that it is down, and the library takes that for an empty listing.
        Where the bucket is too full for that, it has to show anything at all, there or elsewhere.

        Gives a function that takes each page and returns what others have put there. It raises Failed
        for a listing that has no end; what it was not shown is told at the end."""
        begins = f"{folder}/{_PROBE}-" if folder else f"{_PROBE}-"
        name = begins + secrets.token_hex(8)
        is_shown = is_full = False
        circle = _Circle()

        def check(page: Iterable[ObjectMeta]) -> list[ObjectMeta]:
            nonlocal is_shown
            listed = list(page)
            circle.check(listed)
            is_shown = is_shown or any(is_full or item["path"] == name for item in listed)
            # What an agent has put there that is under way; of one that was killed it goes as all else.
            recent = datetime.now(UTC) - PROBE_KEPT
            return [
                item
                for item in listed
                if item["path"] != name
                and (not item["path"].startswith(begins) or item["last_modified"] < recent)
            ]

        try:
            self._put(name, b"probe")
        except Failed as failed:
            if failed.fault is not Fault.NO_SPACE:
                raise
            is_full = True
        try:
            yield check
        finally:
            if not is_full:
                obstore.delete(self._store, name)
        if is_full and not is_shown and not any(obstore.list(self._store, chunk_size=1)):
            raise Failed(Fault.NO_SPACE, "the bucket is full, so nobody can tell if it lists all it has")
        if not is_full and not is_shown:
            raise Failed(Fault.UNREACHABLE, "the service does not list what was written just before")

    def _folders_of(self, scope: Scope) -> Sequence[str]:
        if scope.namespace:
            namespaces: Sequence[str] = [scope.namespace.hex()]
        else:
            with self._checked() as check:
                told = obstore.list_with_delimiter(self._store)
                check(told["objects"])
                namespaces = told["common_prefixes"]
        if scope.tag is None:
            return namespaces
        return [f"{namespace}/{scope.tag.hex()}" for namespace in namespaces]


def _counts(item: ObjectMeta) -> bool:
    """Whether a purge is not over while this is there. The mark of a folder, as other tools make it, is
    empty, and the library can't remove it: it knows no name that ends with a slash."""
    return item["size"] > 0 or parse(item["path"]) is not None


class _Circle:
    """Finds out that a listing goes round in circles: each item is compared with one of those before,
    which is replaced ever more rarely, so that any circle is found within a few rounds."""

    def __init__(self) -> None:
        self._seen = ""
        self._left = self._rounds = 1

    def check(self, items: Iterable[ObjectMeta]) -> None:
        """Raises Failed."""
        for item in items:
            if item["path"] == self._seen:
                raise Failed(Fault.UNREACHABLE, f"the service lists {self._seen} again and again")
            self._left -= 1
            if not self._left:
                self._seen = item["path"]
                self._rounds *= 2
                self._left = self._rounds


def _scatter(chunks: Iterable[bytes], parts: Sequence[memoryview]) -> int:
    """Copy what comes to where it belongs, until there is no more or no more room. How many bytes."""
    received, part, filled = 0, 0, 0
    for chunk in chunks:
        rest = memoryview(chunk)
        while rest and part < len(parts):
            room = parts[part][filled:]
            count = min(len(rest), len(room))
            room[:count] = rest[:count]
            rest, received, filled = rest[count:], received + count, filled + count
            if filled == len(parts[part]):
                part, filled = part + 1, 0
        if part == len(parts):
            break
    return received
