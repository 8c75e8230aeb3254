"""Engines of the tests leave nothing behind, which would fail whatever test comes next."""

from __future__ import annotations

import contextlib
import gc
import socket

from tests.inference_brain.engines import FakeEngine


def test_an_engine_that_is_killed_while_others_connect_leaves_no_socket_open() -> None:
    for _ in range(10):
        with contextlib.ExitStack() as stack, FakeEngine() as engine:
            for _ in range(8):
                client = stack.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", engine.port))
    gc.collect()  # to warn of one that is open is an error
