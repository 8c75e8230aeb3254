"""To whom something is told, and what they answer: HTTP and SMTP, with an end to every wait."""

from __future__ import annotations

import asyncio
import json
import re
import smtplib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.message import EmailMessage
from email.utils import formatdate
from http import HTTPStatus
from ssl import create_default_context
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import httpx
from django.conf import settings

from console.alerts import messages as form
from console.alerts.messages import Message
from console.alerts.models import SENTENCE_CHARACTERS_MAX, Channel
from kvss_agent.http.exchange import PLAIN, run

SECONDS_MAX: Final = 10.0  # for a request and its answer; of a mail, for each step of a conversation
ANSWER_BYTES_MAX: Final = 2048
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]+")


@dataclass(frozen=True, slots=True)
class Outcome:
    sent: bool
    answer: str  # in which nothing stands that opens anything


Sender = Callable[[Channel, Sequence[Message]], Outcome]


def send(channel: Channel, messages: Sequence[Message]) -> Outcome:
    """Tell them, once; what fails is an outcome and never an exception.

    The caller gives those kinds that know no groups one message at a time: see `takes_groups`.
    """
    try:
        outcome = _SENDERS[Channel.Kind(channel.kind)](channel, messages)
    except (httpx.HTTPError, httpx.InvalidURL, smtplib.SMTPException, OSError, UnicodeError) as error:
        outcome = Outcome(sent=False, answer=f"{type(error).__name__}: {error}")
    return Outcome(outcome.sent, _harmless(channel, outcome.answer))


def takes_groups(channel: Channel) -> bool:
    """An incident of PagerDuty is opened and resolved by the key of one alert."""
    return channel.kind != Channel.Kind.PAGERDUTY


def _webhook(channel: Channel, messages: Sequence[Message]) -> Outcome:
    body = json.dumps(form.as_webhook(messages)).encode()
    signed = {}
    if channel.secret:
        signed["X-Tidegate-Signature"] = form.signature(channel.secret, body, int(time.time()))
    return _post(channel, body, {"Idempotency-Key": form.idempotency_key(messages), **signed})


def _slack(channel: Channel, messages: Sequence[Message]) -> Outcome:
    return _post(channel, json.dumps(form.as_slack(messages)).encode())


def _pagerduty(channel: Channel, messages: Sequence[Message]) -> Outcome:
    [message] = messages
    return _post(channel, json.dumps(form.as_pagerduty(message, channel.secret)).encode())


def _post(channel: Channel, body: bytes, headers: Mapping[str, str] | None = None) -> Outcome:
    """A redirection is no success, and is not followed: whom we talk to is what an admin has chosen."""
    told = {
        "Content-Type": "application/json",
        "Accept-Encoding": "identity",
        "User-Agent": "Tidegate",
        **(headers or {}),
    }
    status, said = run(_posted(channel.address, body, told))
    names = {one.value: one.phrase for one in HTTPStatus}
    return Outcome(
        sent=200 <= status < 300, answer=f"{status} {names.get(status, '')}: {said}".rstrip(" :")
    )


async def _posted(address: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, str]:
    """The status, and the beginning of what is said to it. One deadline is for all of it; what comes
    compressed is not looked at. Raises httpx's errors and TimeoutError."""
    said = b""
    async with (
        asyncio.timeout(SECONDS_MAX),
        httpx.AsyncClient(timeout=SECONDS_MAX, follow_redirects=False) as client,
        client.stream("POST", address, content=body, headers=headers) as response,
    ):
        if response.headers.get("content-encoding", "").strip().lower() in PLAIN:
            async for piece in response.aiter_raw():
                said += piece
                if len(said) >= ANSWER_BYTES_MAX:
                    break
        return response.status_code, said[:ANSWER_BYTES_MAX].decode(errors="replace")


def _email(channel: Channel, messages: Sequence[Message]) -> Outcome:
    """All that is said of one episode is one conversation, and what is sent again has the same id."""
    mail, key = EmailMessage(), form.idempotency_key(messages)
    receivers = [one.strip() for one in channel.address.split(",")]
    mail["From"], mail["To"] = settings.MAIL_FROM, ", ".join(receivers)
    mail["Subject"] = _CONTROL.sub(" ", form.subject_line(messages))
    mail["Date"], mail["Message-ID"] = formatdate(), f"<{key}@tidegate>"
    mail["References"] = " ".join(f"<{one.dedup_key}@tidegate>" for one in messages[:20])
    mail.set_content(form.as_text(messages))
    with _smtp() as server:
        refused = server.send_message(mail, settings.MAIL_FROM, receivers)
    if refused:
        return Outcome(sent=False, answer=f"refused for {', '.join(sorted(refused))}")
    return Outcome(sent=True, answer=f"taken for {len(receivers)} by {_smtp_host()}")


def _smtp() -> smtplib.SMTP:
    """A connection to the server of the settings, logged in where they say as whom."""
    if not settings.SMTP_URL:
        raise smtplib.SMTPException("there is no mail server: set TIDEGATE_SMTP_URL")
    parts = urlsplit(settings.SMTP_URL)
    place: dict[str, Any] = {"host": parts.hostname, "timeout": SECONDS_MAX}
    if parts.scheme == "smtps":
        server: smtplib.SMTP = smtplib.SMTP_SSL(
            port=parts.port or 465, context=create_default_context(), **place
        )
    else:
        server = smtplib.SMTP(port=parts.port or 587, **place)
    if parts.scheme == "smtp+tls":
        server.starttls(context=create_default_context())
    if parts.username:
        server.login(unquote(parts.username), unquote(parts.password or ""))
    return server


def _smtp_host() -> str:
    return urlsplit(settings.SMTP_URL).hostname or ""


def _harmless(channel: Channel, text: str) -> str:
    """What may be stored and shown: without the address, which is a secret as a rule, and the key."""
    text = _CONTROL.sub(" ", text)
    for secret in (channel.secret, channel.address, urlsplit(channel.address).path.strip("/")):
        if len(secret) > 3:
            text = text.replace(secret, "…")
    return text[:SENTENCE_CHARACTERS_MAX]


_SENDERS: Final[Mapping[Channel.Kind, Sender]] = {
    Channel.Kind.WEBHOOK: _webhook,
    Channel.Kind.SLACK: _slack,
    Channel.Kind.PAGERDUTY: _pagerduty,
    Channel.Kind.EMAIL: _email,
}
