"""Errors as OpenAI's API has them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from telemetry.decoder import ANSWER, Malformed, decode, excerpt

INVALID: Final = "invalid_request_error"
RATE_LIMITED: Final = "rate_limit_error"
SERVER: Final = "server_error"
_AT: Final = re.compile(r" - at `\$\.?([^`]*)`$")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `([^`]*)`")
_MISSING: Final = re.compile(r"Object missing required field `([^`]*)`")


class ApiError(Exception):
    """An answer that is an error. `code` is for programs, `param` the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.kind,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    def event(self) -> bytes:
        """The last event of a stream that ends with this error; `[DONE]` does not follow."""
        return b"data: " + self.body() + b"\n\n"


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def of_malformed(error: Malformed) -> ApiError:
    """A body that is no JSON, or not of the form that it should have."""
    text = str(error)
    found = _AT.search(text)
    at = re.sub(r"\[\.\.\.\]", "[]", found[1]) if found else ""
    what = _AT.sub("", text)
    if unknown := _UNKNOWN.search(what):
        name = f"{at}.{unknown[1]}" if at else unknown[1]
        return invalid(f"Unrecognized request argument supplied: {name}.", name)
    if missing := _MISSING.search(what):
        name = f"{at}.{missing[1]}" if at else missing[1]
        return invalid(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
    if at:
        return invalid(f"Invalid value for '{at}': {what}.", at, "invalid_value")
    if "JSON" in what or "UTF-8" in what or "truncated" in what:
        return invalid(f"The body is not valid JSON: {what}.")
    return invalid(f"{what}.")


def no_key() -> ApiError:
    return ApiError(
        401,
        "You did not provide an API key. Send it as a bearer token: `Authorization: Bearer KEY`.",
        headers={"www-authenticate": "Bearer"},
    )


def wrong_key() -> ApiError:
    return ApiError(
        401,
        "The API key is not known: it may have been revoked. A new one is known within two seconds.",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def no_such_model(name: str) -> ApiError:
    return ApiError(
        404,
        f"The model `{excerpt(name, 200)}` does not exist or you do not have access to it.",
        code="model_not_found",
        param="model",
    )


def no_such_route(method: str, path: str) -> ApiError:
    return ApiError(
        404, f"Invalid URL ({excerpt(method, 20)} {excerpt(path, 200)}).", code="unknown_url"
    )


def wrong_method(allowed: str) -> ApiError:
    return ApiError(
        405, f"This path takes {allowed} only.", code="method_not_allowed", headers={"allow": allowed}
    )


def too_large(most: int) -> ApiError:
    return ApiError(413, f"The body may have at most {most} bytes.", code="body_too_large")


def takes_too_much() -> ApiError:
    message = "The values in the body take more memory than one request may have here."
    return ApiError(413, message, code="body_too_large")


def too_long(tokens: int, answer: int, most: int, param: str) -> ApiError:
    asked = (
        f"{tokens} in the {param} and {answer} for the answer" if answer else f"{tokens} in the {param}"
    )
    return invalid(
        f"This model's maximum context length is {most} tokens, but you asked for {tokens + answer}: "
        f"{asked}.",
        param,
        "context_length_exceeded",
    )


def unavailable(message: str, code: str, retry_seconds: int | None = 1) -> ApiError:
    headers = {} if retry_seconds is None else {"retry-after": str(retry_seconds)}
    return ApiError(503, message, kind=SERVER, code=code, headers=headers)


def answer_too_large(why: str) -> ApiError:
    return ApiError(502, f"{why} Ask for it as a stream.", kind=SERVER, code="answer_too_large")


def internal(request: str) -> ApiError:
    return ApiError(500, f"Internal error. Its details are in the log, by {request}.", kind=SERVER)


class _Error(msgspec.Struct):
    message: str = ""
    type: str | None = None
    param: Any = None
    code: Any = None


class _Envelope(msgspec.Struct):
    """`{"error": {…}}`, or as older engines have it: the error itself."""

    error: _Error | None = None
    message: str = ""
    detail: Any = None
    type: str | None = None
    param: Any = None


_ENVELOPE: Final = msgspec.json.Decoder(_Envelope)


def of_replica(status: int, raw: bytes) -> ApiError:
    """What a replica has refused a request with, in one form whatever the engine."""
    try:
        told = decode(raw, _ENVELOPE, ANSWER)
    except Malformed:
        told = _Envelope()
    error = told.error or _Error(told.message, told.type, told.param)
    message = error.message or (told.detail if isinstance(told.detail, str) else "")
    if not message:
        message = f"The engine refused the request with status {status}."
    kind = INVALID if status < 500 else SERVER
    code = error.code if isinstance(error.code, str) else None
    param = error.param if isinstance(error.param, str) else None
    return ApiError(status, excerpt(message, 2000), kind=kind, code=code, param=param)


def of_event(raw: bytes, error: Any) -> ApiError:
    """What a replica has ended a stream with, under the status that it might have had."""
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and 400 <= code <= 599 else 500
    return of_replica(status, raw)
