"""Why a command failed, as a sentence and an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple


class Exit(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    REFUSED = 4
    CONFLICT = 5
    TIMEOUT = 6
    UNAVAILABLE = 7
    INTERRUPTED = 130
    BROKEN_PIPE = 141


MEANINGS: Final = {
    Exit.OK: "The command succeeded; with `diff`, nothing differs.",
    Exit.FAILED: "An operation failed, was cancelled or is stuck; with `diff`, something differs.",
    Exit.USAGE: "The command line, a manifest or the file of contexts is wrong. Nothing was changed.",
    Exit.NOT_FOUND: "The resource does not exist, or you may not see it.",
    Exit.REFUSED: "The console refused: not logged in, not allowed, invalid, impossible, over a quota, "
    "or no room.",
    Exit.CONFLICT: "It has changed since it was read, or something in progress has to end first. Try "
    "again.",
    Exit.TIMEOUT: "The console or a condition took longer than the time limit.",
    Exit.UNAVAILABLE: "The console can't be reached, or failed while answering.",
    Exit.INTERRUPTED: "Interrupted with Ctrl-C. A started operation continues.",
    Exit.BROKEN_PIPE: "Whoever read the output closed it.",
}

_BY_STATUS: Final = {404: Exit.NOT_FOUND, 409: Exit.CONFLICT, 412: Exit.CONFLICT, 428: Exit.CONFLICT}
# Of status 409, and yet to try again does not help by itself: it is impossible, or there is no room.
_REFUSALS: Final = {
    "Conflict",
    "CannotUndo",
    "WaitingForCapacity",
    "WaitingForRail",
    "SpineRefusedByRule",
    "NodeCordoned",
    "BoxCordoned",
    "WaitingForDrain",
}


class FieldError(NamedTuple):
    pointer: str
    detail: str


class Failed(Exception):
    """`code` is the exit code, `errors` are about fields of what was sent."""

    code = Exit.FAILED

    def __init__(self, sentence: str, code: Exit | None = None) -> None:
        super().__init__(sentence)
        self.code = code or self.code


class Usage(Failed):
    code = Exit.USAGE


class NotFound(Failed):
    code = Exit.NOT_FOUND


class TimedOut(Failed):
    code = Exit.TIMEOUT


class Unavailable(Failed):
    code = Exit.UNAVAILABLE


class Refused(Failed):
    """A problem document that the console answered with."""

    def __init__(
        self,
        status: int,
        reason: str,
        detail: str,
        errors: Sequence[FieldError] = (),
        request_id: str = "",
        operation_id: str = "",  # of the one that is in the way
    ) -> None:
        super().__init__(detail, code_of(status, reason))
        self.status, self.reason, self.errors, self.request_id = status, reason, errors, request_id
        self.operation_id = operation_id

    def __str__(self) -> str:
        lines = [f"{self.args[0]} ({self.reason})"]
        lines += [f"  {error.pointer}: {error.detail}" for error in self.errors]
        if self.operation_id:
            lines.append(f"  To wait for it: tidegatectl wait operation/{self.operation_id} --for done")
            lines.append(f"  To cancel it: tidegatectl cancel {self.operation_id}")
        if self.status >= 500 and self.request_id:
            lines.append(f"  In the console's log, this is request {self.request_id}.")
        return "\n".join(lines)


def code_of(status: int, reason: str) -> Exit:
    if status >= 500:
        return Exit.UNAVAILABLE
    return Exit.REFUSED if reason in _REFUSALS else _BY_STATUS.get(status, Exit.REFUSED)
