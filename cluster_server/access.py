"""Who may ask: whoever can open the Unix socket, a console by its certificate, and the owner of a
JWT. All others may ask once for health, and for nothing else."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import jwt
from cryptography import x509
from google.protobuf.message import DecodeError
from grpc import aio

from kvss_agent.security.certificates import Role, peer_of

log = logging.getLogger(__name__)

AUDIENCE: Final = "tidegate-cluster"
LEEWAY_SECONDS: Final = 30
REQUIRED_CLAIMS: Final = ["exp", "iat", "aud", "iss", "sub"]
TOKEN_CHARACTERS_MAX: Final = 8192
OPEN: Final = (
    "/grpc.health.v1.Health/Check"  # and not Watch: it would have a place for as long as it likes
)
CERTIFICATE: Final = "x509_pem_cert"  # as gRPC calls it


class Refused(Exception):
    def __init__(self, status: grpc.StatusCode, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True, slots=True)
class JwtSettings:
    key: str = field(repr=False)
    algorithm: str
    issuer: str
    audience: str = AUDIENCE

    def check(self, token: str) -> None:
        """Raises Refused."""
        try:
            jwt.decode(
                token[:TOKEN_CHARACTERS_MAX],
                self.key,
                algorithms=[self.algorithm],
                issuer=self.issuer,
                audience=self.audience,
                leeway=LEEWAY_SECONDS,
                options={"require": REQUIRED_CLAIMS},
            )
        except jwt.InvalidTokenError as error:
            raise Refused(grpc.StatusCode.UNAUTHENTICATED, f"The JWT is not valid: {error}.") from None


def check(
    peer: str,
    properties: Mapping[str, Any],
    metadata: Mapping[str, str | bytes],
    tokens: JwtSettings | None,
    console_name: str = "",
) -> None:
    """`peer` and `properties`: what gRPC knows of the connection. `console_name`: the host name in a
    console's certificate that another authority has issued than a console's own. Raises Refused."""
    if peer.startswith("unix:"):  # the system has let it in
        return None
    shown = b"".join(properties.get(CERTIFICATE, ()))
    certificate = x509.load_pem_x509_certificate(shown) if shown else None
    found = peer_of(certificate) if certificate else None
    if found and found.role is Role.CONSOLE:
        return None
    if certificate and console_name and console_name in _host_names(certificate):
        return None
    said = str(metadata.get("authorization", ""))
    scheme, _, token = said.partition(" ")
    if tokens and scheme.lower() == "bearer":
        return tokens.check(token.strip())
    if shown:
        raise Refused(
            grpc.StatusCode.PERMISSION_DENIED,
            f"The certificate is of {found.topic if found else 'no process of the fleet'}: a console's "
            "is required.",
        )
    wanted = "A bearer JWT is required." if tokens else "A console's certificate is required."
    raise Refused(grpc.StatusCode.UNAUTHENTICATED, wanted)


def _host_names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.DNSName)


class Gate(aio.ServerInterceptor):  # type: ignore[misc]
    """Before each call. Also decodes requests, so that one that is none is refused as such."""

    def __init__(self, tokens: JwtSettings | None, console_name: str = "") -> None:
        self._tokens = tokens
        self._console_name = console_name

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or details.method == OPEN or handler.request_streaming:
            # Reflection streams its requests; it is asked for by those who may ask for all else.
            return self._guarded_stream(handler) if self._is_reflection(details) else handler
        decode, wrapped = handler.request_deserializer, None
        if handler.response_streaming:

            async def stream(raw: bytes, context: Any) -> Any:
                request = await self._admitted(raw, decode, context)
                answers = handler.unary_stream(request, context)
                if inspect.isawaitable(answers):  # it writes them itself
                    await answers
                    return
                async for answer in answers:
                    yield answer

            wrapped = grpc.unary_stream_rpc_method_handler(
                stream, response_serializer=handler.response_serializer
            )
        else:

            async def unary(raw: bytes, context: Any) -> Any:
                request = await self._admitted(raw, decode, context)
                return await handler.unary_unary(request, context)

            wrapped = grpc.unary_unary_rpc_method_handler(
                unary, response_serializer=handler.response_serializer
            )
        return wrapped

    @staticmethod
    def _is_reflection(details: Any) -> bool:
        return bool(details.method.startswith("/grpc.reflection."))

    def _guarded_stream(self, handler: Any) -> Any:
        if handler is None:
            return None

        async def stream(requests: Any, context: Any) -> Any:
            await self._admit(context)
            async for answer in handler.stream_stream(requests, context):
                yield answer

        return grpc.stream_stream_rpc_method_handler(
            stream, handler.request_deserializer, handler.response_serializer
        )

    async def _admitted(self, raw: bytes, decode: Any, context: Any) -> Any:
        await self._admit(context)
        try:
            return decode(raw)
        except DecodeError:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "The request is no message of this method."
            )

    async def _admit(self, context: Any) -> None:
        metadata = dict(context.invocation_metadata() or ())
        try:
            check(context.peer(), context.auth_context(), metadata, self._tokens, self._console_name)
        except Refused as error:
            log.warning("Refused a call of %s: %s", context.peer(), error)
            await context.abort(error.status, str(error))
