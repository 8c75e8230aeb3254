"""Sends notifications over HTTP and SMTP, with a timeout on every wait."""

from __future__ import annotations

import asyncio
import json
import re
import smtplib
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.message import EmailMessage
from email.utils import formatdate
from functools import cache
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import httpx
from django.conf import settings

from console.alerts.delivery import messages as bodies
from console.alerts.delivery.messages import Message
from console.alerts.models import TEXT_CHARACTERS_MAX, Channel
from kvss_agent.http.answers import PLAIN
from kvss_agent.http.exchange import run

SECONDS_MAX: Final = 10.0  # for a request and its answer; for each step of an SMTP session
ANSWER_BYTES_MAX: Final = 2048
SECRET_CHARACTERS_MIN: Final = 8  # of a part of an address
_BETWEEN: Final = re.compile("[/?=#:;]")  # parts of a part
_WORDS: Final = re.compile("[a-z_.-]+|[A-Z_.-]+")  # of one case and without digits
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]+")


@dataclass(frozen=True, slots=True)
class Outcome:
    sent: bool
    answer: str  # without secrets


Sender = Callable[[Channel, Sequence[Message]], Outcome]


def send(channel: Channel, messages: Sequence[Message]) -> Outcome:
    """Try once. A failure is an outcome, never an exception.

    Kinds that do not take groups get one message at a time: see `takes_groups`.
    """
    try:
        outcome = _SENDERS[Channel.Kind(channel.kind)](channel, messages)
    except (httpx.HTTPError, httpx.InvalidURL, smtplib.SMTPException, OSError, UnicodeError) as error:
        outcome = Outcome(sent=False, answer=f"{type(error).__name__}: {error}")
    return Outcome(outcome.sent, _without_secrets(channel, outcome.answer))


def takes_groups(channel: Channel) -> bool:
    """PagerDuty opens and resolves an incident by the key of one alert."""
    return channel.kind != Channel.Kind.PAGERDUTY


def _webhook(channel: Channel, messages: Sequence[Message]) -> Outcome:
    body = json.dumps(bodies.as_webhook(messages)).encode()
    signed = {}
    if channel.secret:
        signed["X-Tidegate-Signature"] = bodies.signature(channel.secret, body, int(time.time()))
    return _post(channel, body, {"Idempotency-Key": bodies.idempotency_key(messages), **signed})


def _slack(channel: Channel, messages: Sequence[Message]) -> Outcome:
    return _post(channel, json.dumps(bodies.as_slack(messages)).encode())


def _pagerduty(channel: Channel, messages: Sequence[Message]) -> Outcome:
    [message] = messages
    return _post(channel, json.dumps(bodies.as_pagerduty(message, channel.secret)).encode())


def _post(channel: Channel, body: bytes, headers: Mapping[str, str] | None = None) -> Outcome:
    """A redirect is a failure and is not followed: an admin chose the address we connect to."""
    sent = {
        "Content-Type": "application/json",
        "Accept-Encoding": "identity",
        "User-Agent": "Tidegate",
        **(headers or {}),
    }
    status, text = run(_posted(channel.address, body, sent))
    names = {one.value: one.phrase for one in HTTPStatus}
    return Outcome(
        sent=200 <= status < 300, answer=f"{status} {names.get(status, '')}: {text}".rstrip(" :")
    )


@cache
def _trusted() -> ssl.SSLContext:
    """Reading all authorities takes longer than sending a notification."""
    return httpx.create_ssl_context()


async def _posted(address: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, str]:
    """The status and the beginning of the body, within one deadline. A compressed body is not read.
    Raises httpx's errors and TimeoutError."""
    text = b""
    async with (
        asyncio.timeout(SECONDS_MAX),
        httpx.AsyncClient(timeout=SECONDS_MAX, follow_redirects=False, verify=_trusted()) as client,
        client.stream("POST", address, content=body, headers=headers) as response,
    ):
        if response.headers.get("content-encoding", "").strip().lower() in PLAIN:
            async for piece in response.aiter_raw():
                text += piece
                if len(text) >= ANSWER_BYTES_MAX:
                    break
        return response.status_code, text[:ANSWER_BYTES_MAX].decode(errors="replace")


def _email(channel: Channel, messages: Sequence[Message]) -> Outcome:
    """All mails of an episode form one thread, and a repeated mail has the same id."""
    mail, key = EmailMessage(), bodies.idempotency_key(messages)
    receivers = [one.strip() for one in channel.address.split(",")]
    mail["From"], mail["To"] = settings.MAIL_FROM, ", ".join(receivers)
    mail["Subject"] = _CONTROL.sub(" ", bodies.subject_line(messages))
    mail["Date"], mail["Message-ID"] = formatdate(), f"<{key}@tidegate>"
    mail["References"] = " ".join(f"<{one.dedup_key}@tidegate>" for one in messages[:20])
    mail.set_content(bodies.as_text(messages))
    with _smtp() as server:
        refused = server.send_message(mail, settings.MAIL_FROM, receivers)
    if refused:
        return Outcome(sent=False, answer=f"refused for {', '.join(sorted(refused))}")
    return Outcome(sent=True, answer=f"accepted for {len(receivers)} by {_smtp_host()}")


def _smtp() -> smtplib.SMTP:
    """A connection to the configured server, logged in if credentials are configured."""
    if not settings.SMTP_URL:
        raise smtplib.SMTPException("no mail server is configured: set TIDEGATE_SMTP_URL")
    parts = urlsplit(settings.SMTP_URL)
    place: dict[str, Any] = {"host": parts.hostname, "timeout": SECONDS_MAX}
    if parts.scheme == "smtps":
        server: smtplib.SMTP = smtplib.SMTP_SSL(
            port=parts.port or 465, context=ssl.create_default_context(), **place
        )
    else:
        server = smtplib.SMTP(port=parts.port or 587, **place)
    if parts.scheme == "smtp+tls":
        server.starttls(context=ssl.create_default_context())
    if parts.username:
        server.login(unquote(parts.username), unquote(parts.password or ""))
    return server


def _smtp_host() -> str:
    return urlsplit(settings.SMTP_URL).hostname or ""


def _without_secrets(channel: Channel, text: str) -> str:
    """Text that may be stored and shown: without the key and the address, which often is a secret."""
    text = _CONTROL.sub(" ", text)
    for secret in sorted(_secrets(channel), key=len, reverse=True):  # the whole before its parts
        found = re.escape(secret)
        if secret != channel.secret and _WORDS.fullmatch(secret):  # no part of a longer word
            found = rf"(?<!\w){found}(?!\w)"
        text = re.sub(found, "…", text)
    return text[:TEXT_CHARACTERS_MAX]


def _secrets(channel: Channel) -> set[str]:
    """The key, the address, its path, and each part of the address that may be the secret. Names in it
    are none: they are what answers explain."""
    parts = urlsplit(channel.address)
    path = parts.path.strip("/")
    *within, last = path.split("/")
    userinfo = parts.netloc.rpartition("@")[0]
    values = [one.partition("=") for one in re.split("[&;]", parts.query)]
    pieces = [
        *userinfo.split(":"),
        *(one for one in within if not _WORDS.fullmatch(one)),
        last,
        *(value or name for name, _, value in values),
        parts.fragment,
    ]
    whole = {channel.secret, channel.address, path if within else ""}
    return {one for one in whole if len(one) > 3} | {
        one
        for piece in pieces
        for one in (piece, unquote(piece), *_BETWEEN.split(piece))
        if len(one) >= SECRET_CHARACTERS_MIN
    }


_SENDERS: Final[Mapping[Channel.Kind, Sender]] = {
    Channel.Kind.WEBHOOK: _webhook,
    Channel.Kind.SLACK: _slack,
    Channel.Kind.PAGERDUTY: _pagerduty,
    Channel.Kind.EMAIL: _email,
}
