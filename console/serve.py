"""`python -m console.serve`: the ASGI server, on a socket that somebody else opened, or on its own.

The socket outlives the process: while the server is started again, connections wait in it instead of
being refused. `make up` passes one, and so does systemd with socket activation (`--fd 3`). With a
certificate it is HTTPS, and no proxy is needed in front. What bounds connections and requests:
`console.guard`.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import socket
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

from telemetry.script import begin
from telemetry.stop import LEAVE_SECONDS, STOPS, exit_within


def main(arguments: Sequence[str], program: str = "python -m console.serve") -> int:
    """Serve until SIGTERM. Returns an exit code."""
    parser = argparse.ArgumentParser(prog=program, description="Serve the console.")
    parser.add_argument("--fd", type=int, help="a listening socket, by its file descriptor")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on without --fd (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port", type=int, default=8400, help="port to listen on without --fd (default: 8400)"
    )
    parser.add_argument(
        "--tls-certificate", metavar="FILE", type=Path, help="PEM: with it the console is HTTPS"
    )
    parser.add_argument("--tls-key", metavar="FILE", type=Path, help="PEM: the key of --tls-certificate")
    options = parser.parse_args(arguments)
    if (options.tls_certificate is None) != (options.tls_key is None):
        parser.error("--tls-certificate and --tls-key are given both or not at all")
    import uvicorn

    from console.live.messages import MESSAGE_BYTES_MAX
    from kvss_agent.http.server import BoundedServer
    from kvss_agent.http.websocket import BoundedWebSocket
    from kvss_agent.process.daemon import listen

    try:
        tls = _tls(options.tls_certificate, options.tls_key) if options.tls_key else None
    except OSError as error:  # of ssl, too
        print(f"The certificate can't be used: {error}.", file=sys.stderr)
        return os.EX_CONFIG
    try:
        listener = (
            socket.socket(fileno=options.fd)
            if options.fd is not None
            else listen((options.host, options.port))
        )
    except OSError as error:
        print(f"The console cannot start: {error}.", file=sys.stderr)
        return 1
    gc.disable()  # while all is loaded: nothing of it is garbage, and looking takes a fifth of the time
    config = uvicorn.Config(
        "console.asgi:application",
        http="httptools",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the settings say how many proxies to believe
        timeout_graceful_shutdown=5,
        ws=BoundedWebSocket,
        ws_max_size=MESSAGE_BYTES_MAX,
        ws_per_message_deflate=False,  # each viewer would cost a compressor, for frames of a kilobyte
    )
    config.load()  # with Django's settings
    from console.guard import POLICY

    server = BoundedServer(config, POLICY, tls)
    # Once it has ended uvicorn sends itself what it was told, to whoever had the signal before. By
    # default SIGTERM kills it then, and Ctrl-C prints a traceback. Threads may wait for PostgreSQL yet.
    for number in STOPS:
        signal.signal(number, lambda *_: exit_within(LEAVE_SECONDS))
    server.run(sockets=[listener])
    return os.EX_OK


def _tls(certificate: Path, key: Path) -> ssl.SSLContext:
    """Raises OSError for files that hold no certificate or not its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(certificate, key)
    return context


if __name__ == "__main__":
    sys.exit(begin(lambda: main(sys.argv[1:])))
