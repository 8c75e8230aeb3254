"""Where weights are: a folder on a mount, or a prefix in an S3 bucket."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol
from urllib.parse import urlsplit

from workload_manager.spec import WeightsSpec
from workload_manager.weights.errors import WeightsError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config, S3Credential, S3Store

S3: Final = "s3://"
FILES_MAX: Final = 10_000
PAGE_FILES: Final = 1000
REGION: Final = "us-east-1"
CREDENTIALS: Final = frozenset({"access_key_id", "secret_access_key", "session_token", "region"})
SMALL_BYTES_MAX: Final = 64 << 20
_DENIED: Final = (
    *("403 Forbidden", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"),
    *("ExpiredToken", "InvalidToken"),
)
_CODE: Final = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")
_NAME: Final = re.compile(r"[^\x00-\x1f\x7f/\\][^\x00-\x1f\x7f\\]{0,1000}")
BUCKET: Final = r"[a-z0-9][a-z0-9.-]{1,62}"
_REGION: Final = re.compile(r"[a-z0-9-]{1,40}")  # of a host's name, which must lead nowhere else


class SourceFile(NamedTuple):
    """`version`: another one has other bytes: an ETag, or the time of a change."""

    name: str
    size: int
    version: str


class Source(Protocol):
    def files(self) -> Sequence[SourceFile]:
        """By name. Raises WeightsError."""

    def small(self, name: str) -> bytes:
        """A whole file. Raises WeightsError."""


def opened(spec: WeightsSpec, credentials: Mapping[str, str]) -> Source:
    """Raises WeightsError."""
    if spec.source.startswith(S3):
        return Bucket(spec, credentials)
    return Folder(Path(spec.source))


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def files(self) -> Sequence[SourceFile]:
        try:
            if not self.path.is_absolute():
                raise WeightsError("BadSource", f"{self.path} is no absolute path and no s3:// address.")
            if not self.path.is_dir():
                raise WeightsError("NotFound", f"There is no folder {self.path} on this machine.")
            found = []
            for path in sorted(self.path.rglob("*")):
                if path.is_file():
                    told = path.stat()
                    name = str(path.relative_to(self.path))
                    found.append(SourceFile(name, told.st_size, str(told.st_mtime_ns)))
                if len(found) > FILES_MAX:
                    raise WeightsError("BadSource", f"{self.path} has more than {FILES_MAX} files.")
        except OSError as error:
            raise WeightsError(
                "Unreadable", f"{self.path} can't be read: {error.strerror or error}."
            ) from error
        if not found:
            raise WeightsError("NotFound", f"The folder {self.path} has no files.")
        return found

    def small(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise WeightsError(
                "Unreadable", f"{self.path / name} can't be read: {error.strerror or error}."
            ) from error


class Bucket:
    """A prefix of a bucket. All credentials are those given: nothing is taken from the environment."""

    def __init__(self, spec: WeightsSpec, credentials: Mapping[str, str]) -> None:
        """Raises WeightsError."""
        bucket, _, prefix = spec.source.removeprefix(S3).partition("/")
        if not re.fullmatch(BUCKET, bucket) or {".", ".."}.intersection(prefix.split("/")):
            raise WeightsError("BadSource", f"{spec.source} is not s3://BUCKET/PREFIX.")
        if unknown := sorted(credentials.keys() - CREDENTIALS):
            known = ", ".join(sorted(CREDENTIALS))
            raise WeightsError(
                "BadSource", f"Credentials of weights have no {unknown[0]}; they have {known}."
            )
        if not _REGION.fullmatch(credentials.get("region", REGION)):
            raise WeightsError("BadSource", "The region of the credentials is none.")
        self.source = spec.source
        self.place = f"{spec.endpoint or ''} {bucket} {prefix.strip('/')}"
        self.store = _store(bucket, prefix.strip("/"), spec.endpoint, credentials)

    def files(self) -> Sequence[SourceFile]:
        import obstore

        found: list[SourceFile] = []
        with translated(self.source):
            for page in obstore.list(self.store, chunk_size=PAGE_FILES):
                for one in page:
                    name = one["path"]
                    if name.endswith("/") or not one["size"]:  # a folder, as consoles of S3 make it
                        continue
                    _check_name(name)
                    found.append(SourceFile(name, one["size"], one["e_tag"] or ""))
                if len(found) > FILES_MAX:
                    raise WeightsError("BadSource", f"{self.source} has more than {FILES_MAX} files.")
        if not found:
            raise WeightsError("NotFound", f"There is nothing at {self.source}.")
        return sorted(found)

    def small(self, name: str) -> bytes:
        import obstore

        with translated(self.source):
            return bytes(obstore.get_range(self.store, name, start=0, length=SMALL_BYTES_MAX))


def _check_name(name: str) -> None:
    """It becomes a path below our folder, and nowhere else."""
    if not _NAME.fullmatch(name) or any(part in ("", ".", "..") for part in name.split("/")):
        raise WeightsError("BadSource", f"An object is named {name[:100]!r}, which is no file name.")


def _store(bucket: str, prefix: str, endpoint: str | None, credentials: Mapping[str, str]) -> S3Store:
    from obstore.store import S3Store

    region = credentials.get("region", REGION)
    where: S3Config = {
        "region": region,
        # Said in any case: otherwise the environment would.
        "endpoint": endpoint or f"https://s3.{region}.amazonaws.com",
        "virtual_hosted_style_request": False,
    }
    client: ClientConfig = {
        "connect_timeout": timedelta(seconds=5),
        "timeout": timedelta(seconds=120),
        "allow_http": urlsplit(endpoint or "").scheme == "http",
    }
    retry: RetryConfig = {
        "max_retries": 2,
        "retry_timeout": timedelta(seconds=20),
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=2),
            "base": 2,
        },
    }
    more: dict[str, object] = {}
    if credentials.get("access_key_id"):
        shown: S3Credential = {
            "access_key_id": credentials["access_key_id"],
            "secret_access_key": credentials.get("secret_access_key", ""),
            "token": credentials.get("session_token"),
            "expires_at": None,
        }
        more["credential_provider"] = lambda: shown
    else:
        where["skip_signature"] = True  # a public bucket
    return S3Store(
        bucket,
        prefix=prefix or None,
        config=where,
        client_options=client,
        retry_config=retry,
        **more,  # type: ignore[arg-type]
    )


@contextlib.contextmanager
def translated(source: str) -> Iterator[None]:
    """What the library raises is a WeightsError with a name."""
    from obstore import exceptions

    try:
        yield
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise WeightsError("Denied", f"{source} may not be read: {short(error)}") from error
    except exceptions.PreconditionError as error:
        raise WeightsError("Changed", f"{source} was changed while it was read.") from error
    except FileNotFoundError as error:
        raise WeightsError("NotFound", f"{source} is not there: {short(error)}") from error
    except exceptions.GenericError as error:
        # Of a listing, the library does not tell these from a server that fails.
        if "NoSuchBucket" in str(error):
            raise WeightsError("NotFound", f"There is no bucket for {source}.") from error
        if any(code in str(error) for code in _DENIED):
            raise WeightsError("Denied", f"{source} may not be read: {short(error)}") from error
        raise WeightsError("Unreachable", f"{source} can't be reached: {short(error)}") from error
    except exceptions.BaseError as error:
        raise WeightsError("Unreadable", f"{source} can't be read: {short(error)}") from error


def short(error: BaseException) -> str:
    """What the library says, without the dump of its structures behind it, as a sentence. Of what the
    server says only the code: the rest may repeat keys and tokens that it was sent."""
    said, _, document = str(error).partition("\n\nDebug source:")[0].partition("<")
    code = _CODE.search(document)
    said = " ".join(f"{said}{code[1] if code else ''}".split())[:300].rstrip(": ")
    return said if said.endswith(".") else f"{said}."
