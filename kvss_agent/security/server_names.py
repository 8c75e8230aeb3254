"""What a process logs about TLS clients whose server name (SNI) is not ASCII.

CPython decodes the name before it calls `SSLContext.sni_callback`. If that fails, it refuses the
handshake with a fatal alert, and reports the error to `sys.unraisablehook`, which prints a traceback.
The name is a client's to choose, so this is no fault of ours: it is one line of the log.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

log = logging.getLogger(__name__)


class _Hook:
    """Logs undecodable server names. Hands every other error to the hook that was installed before."""

    def __init__(self, before: Callable[[UnraisableHookArgs], object]) -> None:
        self._before = before

    def __call__(self, unraisable: UnraisableHookArgs, /) -> None:
        error, name = unraisable.exc_value, unraisable.object
        # The callback's own errors name the callback, and those of finalizers an object: never bytes.
        if isinstance(error, UnicodeDecodeError) and isinstance(name, bytes) and error.object == name:
            log.info("Refused a TLS handshake: the server name %r is not ASCII", name)
        else:
            self._before(unraisable)


def log_undecodable() -> None:
    """Log such names as one line, in the whole process. Call it where `sni_callback` is set; calls
    after the first change nothing."""
    if not isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = _Hook(sys.unraisablehook)
