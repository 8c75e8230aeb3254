"""`python -m console.stack`: start, stop and inspect the whole stack, or run a part of it."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys

from console import manage
from console.environment import ConfigurationError
from console.stack import commands
from console.stack.engines import ENGINES
from console.stack.errors import StackError
from telemetry.script import add_verb, program


def main() -> int:
    parser = argparse.ArgumentParser(
        prog=program("console.stack"),
        description="The embedded stack: PostgreSQL, Redis and every process of Tidegate.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    up_parser = add_verb(verbs, "up", "start everything in the foreground; Ctrl-C stops it")
    up_parser.add_argument("--engine", choices=ENGINES, default="", help="also serve with a real engine")
    add_verb(verbs, "down", "stop the running stack from another terminal")
    add_verb(verbs, "status", "show the services, their uptime and the address")
    add_verb(verbs, "incident", "stage an incident on the demo and resolve it")
    add_verb(verbs, "rollout", "stage two rollouts on the demo, and undo them")
    logs = add_verb(verbs, "logs", "show the log of a service")
    logs.add_argument("service", nargs="?", help="name of the service; without it, list the services")
    logs.add_argument("-n", "--lines", type=int, default=40, help="number of lines (default: 40)")
    logs.add_argument("-f", "--follow", action="store_true", help="also print new lines as they come")
    add_verb(verbs, "manage", "run a command of Django, such as `manage migrate`")
    add_verb(verbs, "serve", "serve the console to browsers; see `serve --help`")
    if sys.argv[1:2] == ["serve"]:  # which reads its arguments itself, as the next one does
        from console import serve  # with a server for HTTP

        return serve.main(sys.argv[2:], f"{parser.prog} serve")
    if sys.argv[1:2] == ["manage"]:
        return manage.main([f"{parser.prog} manage", *sys.argv[2:]])
    options = parser.parse_args()
    _replace_unencodable_characters()
    try:
        match options.verb:
            case "up":
                from console.stack.up import up  # with the clients of both servers

                return up(options.engine)
            case "down":
                return commands.down()
            case "status":
                return commands.status()
            case "incident" | "rollout":
                return commands.stage(options.verb)
            case _:
                return commands.logs(options.service, options.lines, follow=options.follow)
    except ConfigurationError as error:
        print(f"Tidegate can't start, because of its settings:\n{error}", file=sys.stderr)
        return os.EX_CONFIG
    except StackError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader has closed the pipe
        return 128 + signal.SIGPIPE
    except OSError as error:  # a disk that filled up, a directory that was taken away
        print(f"Tidegate cannot continue: {error}.", file=sys.stderr)
        return os.EX_OSERR
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        _drop_closed_streams()


def _replace_unencodable_characters() -> None:
    """Print question marks where the terminal has no UTF-8, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _drop_closed_streams() -> None:
    """Redirect closed output streams, which Python would report when it flushes at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
