"""`python -m swdriver_shim`: what the driver does from a command line. See `--help`."""

from __future__ import annotations

import argparse
import sys

from telemetry.garbage import loading
from telemetry.script import begin, program


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["serve"]:  # a daemon reads its environment, too
        with loading():
            from swdriver_shim.daemon import serve

        return serve.main(arguments[1:])
    if arguments[:1] == ["replay"]:
        from swdriver_shim.replay import command

        return command.main(arguments[1:])
    _parser().parse_args(arguments)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("swdriver_shim"), description="The driver of a KV prompt cache."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    verbs.add_parser("serve", help="run a driver as a daemon, told what to be over HTTP")
    verbs.add_parser(
        "replay",
        help="serve the requests of a trace through an emulated engine, and say what the cache did",
    )
    return parser


if __name__ == "__main__":
    sys.exit(begin(main))
