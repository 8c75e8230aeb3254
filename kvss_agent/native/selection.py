"""The mover that this process uses, and switching to the compiled one when it has been built."""

from __future__ import annotations

import logging
import os
import threading
from typing import Final, Protocol
from weakref import WeakSet

from kvss_agent.mover import PYTHON, Mover
from kvss_agent.native import loader
from kvss_agent.native.builder import Unavailable
from kvss_agent.native.loader import Choice, best, choice

NICENESS: Final = 15  # of the compiler: it takes a few seconds of a core
_log = logging.getLogger(__name__)


class MoverUser(Protocol):
    """What moves bytes and can go on with another mover."""

    def use_mover(self, mover: Mover) -> None: ...


_lock: Final = threading.Lock()
_users: Final[WeakSet[MoverUser]] = WeakSet()
_mover: Mover = PYTHON


def current() -> Mover:
    """The mover of this process. Whoever follows it has switched to it when this returns.

    Until it is compiled, looks for a build each time: another process may have finished one. Raises
    Unavailable only if `KVSS_NATIVE` is `require`.
    """
    global _mover  # noqa: PLW0603 - one for the process
    with _lock:
        if _mover is not PYTHON:
            return _mover
        mover = best()
        if mover is not _mover:
            _mover = mover
            for user in list(_users):
                user.use_mover(mover)
        return mover


def follow(user: MoverUser) -> None:
    """Have the user switch whenever the mover of this process changes. It is held weakly."""
    with _lock:
        _users.add(user)
        user.use_mover(_mover)


def build_in_background() -> None:
    """Build the compiled mover in a thread of low priority, and switch to it. Returns at once.

    A failure is one line in the log, and the Python mover stays in use. Where `KVSS_NATIVE` is `require`
    it is built before this returns. Raises Unavailable then, and ValueError for another value.
    """
    if choice() is Choice.REQUIRE:
        loader.require(build=True)
    elif choice() is Choice.AUTO and current() is PYTHON:
        threading.Thread(target=_build_and_switch, name="build mover", daemon=True).start()


def _build_and_switch() -> None:
    # On Linux the priority is a thread's own, and its child processes inherit it.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    try:
        loader.require(build=True)
    except Unavailable as reason:
        if threading.main_thread().is_alive():  # or else the process is ending, which ends the compiler
            _log.warning("The compiled mover cannot be built, the Python mover stays: %s", reason)
        return
    current()
