"""What became of a question to another process: its answer, or in a sentence why there is none.

`kvss_agent.http.exchange` and `kvss_agent.http.blocking_exchange` ask. This is for whoever hands answers
on, and does without what speaks HTTP.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

import msgspec

from telemetry.decoder import ANSWER, Limits, Malformed, decode, excerpt
from telemetry.units import size

T = TypeVar("T")

AT_ONCE_MAX: Final = 128  # questions
SENTENCE_CHARACTERS_MAX: Final = 500
PLAIN: Final = ("", "identity")  # encodings of what was not compressed
COMPRESSED: Final = "Its answer is compressed, which nobody asked for."
# By OpenSSL's X509_V_ERR_…: expired; self-signed, or by who is not believed; another name.
_OTHERS: Final = "Its certificate is of another authority."
_VERIFIED: Final = {
    10: "Its certificate has expired.",
    18: _OTHERS,
    19: _OTHERS,
    20: _OTHERS,
    62: "Its certificate is of another process: another key than the one that has joined.",
}


class Fault(StrEnum):
    """In what way an answer is none."""

    UNREACHED = "unreached"
    UNTRUSTED = "untrusted"  # its certificate is not the one that it should have
    BROKEN = "broken"  # not HTTP, or not all of it
    LATE = "late"
    TOO_LONG = "too_long"
    COMPRESSED = "compressed"
    MALFORMED = "malformed"
    REFUSED = "refused"  # a status that says no
    FAILED = "failed"  # on our side


class Unanswered(Exception):
    """Why there is no answer, in a sentence."""

    def __init__(self, fault: Fault, sentence: str) -> None:
        super().__init__(excerpt(sentence, SENTENCE_CHARACTERS_MAX))
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Budget:
    """`seconds`: for all of an exchange. `bytes_max`: of the body of an answer."""

    seconds: float
    bytes_max: int = ANSWER.bytes_max


class _Problem(msgspec.Struct):
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that has arrived whole. Names are those of httpx's responses."""

    status_code: int
    content: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status_code < 300

    def read(self, kind: type[T] | msgspec.json.Decoder[T], limits: Limits = ANSWER) -> T:
        """What it says, typed. Raises Malformed."""
        return decode(self.content, kind, limits)

    @property
    def refusal(self) -> str:
        """What it says against it, in a sentence."""
        if 300 <= self.status_code < 400:
            return f"It answered {self.status_code}. Redirections are not followed."
        try:
            detail = self.read(_Problem).detail
        except Malformed:
            detail = ""
        return excerpt(f"It answered {self.status_code}. {detail}".strip(), SENTENCE_CHARACTERS_MAX)


def unreached(error: Exception) -> Unanswered:
    """What went wrong on the way to it, its certificate included."""
    if distrust := _distrust(error):
        return Unanswered(Fault.UNTRUSTED, distrust)
    return Unanswered(Fault.UNREACHED, f"It does not answer: {str(error) or type(error).__name__}.")


def _distrust(error: BaseException) -> str:
    """In a sentence, why its certificate was not believed; nothing if that is not why."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, ssl.SSLCertVerificationError):
        found = found.__cause__ or found.__context__
    if found is None:
        return ""
    return _VERIFIED.get(found.verify_code, f"It is not believed: {found.verify_message}.")


def too_long(bytes_max: int, told: str = "") -> Unanswered:
    """An answer of which more came than is read. `told`: the length that it announced, if it did."""
    most = f"at most {size(bytes_max)} is read."
    if told.isdecimal():
        return Unanswered(Fault.TOO_LONG, f"Its answer has {size(int(told[:18]))}; {most}")
    return Unanswered(Fault.TOO_LONG, f"Its answer is longer than what is read of it: {most}")
