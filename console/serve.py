"""`python -m console.serve`: the ASGI server, on a socket that somebody else opened, or on its own.

The socket outlives the process: while the server is started again, connections wait in it instead of
being refused. `make up` passes one, and so does systemd with socket activation (`--fd 3`). What bounds
connections and requests: `console.guard`.
"""

from __future__ import annotations

import argparse
import gc
import socket

import uvicorn

from console.live.messages import MESSAGE_BYTES_MAX
from kvss_agent.http.server import BoundedServer
from kvss_agent.process.daemon import listen


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m console.serve", description="Serve the console.")
    parser.add_argument("--fd", type=int, help="a listening socket, by its file descriptor")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on without --fd")
    parser.add_argument("--port", type=int, default=8400, help="port to listen on without --fd")
    options = parser.parse_args()
    listener = (
        socket.socket(fileno=options.fd)
        if options.fd is not None
        else listen((options.host, options.port))
    )
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
        ws="websockets-sansio",
        ws_max_size=MESSAGE_BYTES_MAX,
        ws_per_message_deflate=False,  # each viewer would cost a compressor, for frames of a kilobyte
    )
    config.load()  # with Django's settings
    from console.guard import POLICY

    BoundedServer(config, POLICY).run(sockets=[listener])


if __name__ == "__main__":
    main()
