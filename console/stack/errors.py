"""What a person can mend is said in a sentence, with an exit code, and never as a traceback."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path


class StackError(Exception):
    """The stack cannot start or go on; the message is for a person and says what to do."""

    def __init__(self, sentence: str, *, exit_code: int = os.EX_UNAVAILABLE) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


@contextlib.contextmanager
def sentences(doing: str, path: Path) -> Iterator[None]:
    """Turn what the file system refuses into a StackError that names the deed and the path."""
    try:
        yield
    except OSError as error:
        raise _in_words(error, doing, path) from error


def _in_words(error: OSError, doing: str, path: Path) -> StackError:
    where = error.filename if isinstance(error.filename, str) else str(path)
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            why, code = f"the disk (or the quota) that holds {where} is full", os.EX_IOERR
        case errno.EACCES | errno.EPERM:
            why = f"{user_name()} has no permission for {where}"
            code = os.EX_NOPERM
        case errno.EROFS:
            why = f"{where} is on a read-only file system"
            code = os.EX_NOPERM
        case errno.ENOTDIR | errno.EEXIST:
            why, code = f"{where} is in the way and is not a directory", os.EX_CANTCREAT
        case _:
            why, code = f"{where}: {error.strerror or error}", os.EX_OSERR
    return StackError(f"Cannot {doing}: {why}.", exit_code=code)


def user_name() -> str:
    """Who we are, also where the user has no entry in the password file."""
    import pwd

    try:
        return f"user {pwd.getpwuid(os.geteuid()).pw_name}"
    except KeyError:
        return f"user {os.geteuid()}"
