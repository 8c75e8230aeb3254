"""`tidegatectl`: run a command, and exit with the code of its failure."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from console.ctl import completion, contexts, fleet_upgrade, login, logs, reads, top, writes
from console.ctl.arguments import parser
from console.ctl.cells import spoken
from console.ctl.client import Client
from console.ctl.failures import Exit, Failed, Unavailable
from console.ctl.output import Screen
from telemetry.version import tidegate_version

Run = Callable[[Client, argparse.Namespace, Screen], Any]
# With a console. Everything else has no need of one.
COMMANDS: Final[dict[str, Run]] = {
    "get": reads.get,
    "describe": reads.describe,
    "explain": reads.explain,
    "logs": logs.logs,
    "wait": reads.wait,
    "whoami": reads.whoami,
    "top": top.top,
    "apply": writes.apply,
    "diff": writes.diff,
    "delete": writes.delete,
    "upgrade-fleet": fleet_upgrade.upgrade_fleet,
    "rollout status": reads.status,
    "rollout history": reads.history,
}


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        if words[:1] == [completion.COMPLETE]:
            sys.stdout.write("".join(f"{one}\n" for one in completion.complete(words[1:])))
            code = int(Exit.OK)
        else:
            code = _run(parser().parse_args(words))
        sys.stdout.flush()
    except Failed as error:
        sys.stderr.write(spoken(f"tidegatectl: {error}\n", sys.stderr.encoding))
        return error.code
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # Whatever is still to be written at the end has to go somewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.BROKEN_PIPE
    return code


def _run(given: argparse.Namespace) -> int:
    screen = Screen()
    match given.command:
        case "login":
            login.log_in(given, screen)
        case "context":
            login.contexts_of(given, screen)
        case "completion":
            sys.stdout.write(completion.SCRIPTS[given.shell])
        case "version" if given.client:
            screen.say(f"tidegatectl {tidegate_version()}")
        case _:
            with Client(contexts.chosen(given.context), given.request_timeout) as client:
                return int(_of_console(given)(client, given, screen) or Exit.OK)
    return Exit.OK


def _of_console(given: argparse.Namespace) -> Run:
    if "does" in given:
        return writes.act
    if given.command == "rollout":
        return COMMANDS[f"rollout {given.rollout}"]
    return _version if given.command == "version" else COMMANDS[given.command]


def _version(client: Client, _: argparse.Namespace, screen: Screen) -> None:
    """Ours first, which is known also where the console does not answer."""
    screen.say(f"tidegatectl {tidegate_version()}")
    try:
        for name, version in client.versions().items():
            screen.say(f"{'console' if name == 'tidegate' else f'  {name}'} {version}")
    except Unavailable as error:
        raise Unavailable(f"The console's version is not known: {error}") from error
