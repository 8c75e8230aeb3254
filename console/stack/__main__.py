"""`python -m console.stack`: bring the whole stack up, take it down, look at it."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys

from console.environment import ConfigurationError
from console.stack import commands
from console.stack.errors import StackError
from console.stack.up import up


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m console.stack",
        description="The embedded stack: PostgreSQL, Redis and every process of Tidegate.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs.add_parser("up", help="start everything and stay; Ctrl-C stops it")
    verbs.add_parser("down", help="stop what `up` started, from anywhere")
    verbs.add_parser("status", help="what runs, since when, where")
    verbs.add_parser("incident", help="stage an incident on the demo, and end it")
    logs = verbs.add_parser("logs", help="what a service said")
    logs.add_argument("service", nargs="?", help="one service; without it, which there are")
    logs.add_argument("-n", "--lines", type=int, default=40, help="how many lines (default: 40)")
    logs.add_argument("-f", "--follow", action="store_true", help="and whatever is added")
    options = parser.parse_args()
    _replace_what_cannot_be_shown()
    try:
        match options.verb:
            case "up":
                return up()
            case "down":
                return commands.down()
            case "status":
                return commands.status()
            case "incident":
                return commands.incident()
            case _:
                return commands.logs(options.service, options.lines, follow=options.follow)
    except ConfigurationError as error:
        print(f"Tidegate can't start, because of its settings:\n{error}", file=sys.stderr)
        return os.EX_CONFIG
    except StackError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # whoever read us has enough
        return 128 + signal.SIGPIPE
    except OSError as error:  # a disk that filled up, a directory that was taken away
        print(f"Tidegate can't go on: {error}.", file=sys.stderr)
        return os.EX_OSERR
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        _forget_what_nobody_reads()


def _replace_what_cannot_be_shown() -> None:
    """In a terminal that knows no UTF-8 a line has question marks; it is not an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _forget_what_nobody_reads() -> None:
    """Python flushes at its end and complains of a terminal that is gone: let it have none."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
