"""`python -m workload_manager`: what a manager does from a command line. See `--help`."""

from __future__ import annotations

import argparse
import sys

from telemetry.garbage import loading
from telemetry.script import add_verb, begin, program


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["run"]:
        with loading():
            from workload_manager import run

        return run.main(arguments[1:])
    if arguments[:1] == ["compile"]:
        from workload_manager.compiler import command

        return command.main(arguments[1:])
    if arguments[:1] == ["execute"]:
        from workload_manager import execution

        return execution.main(arguments[1:])
    if arguments == ["tidy"]:
        from workload_manager import tidy

        return tidy.main()
    if arguments == ["spare"]:
        with loading():  # all that it may become: to have imported this is what it is for
            from workload_manager import execution, run, spare
            from workload_manager.compiler import command

        return spare.wait(main)
    _parser().parse_args(arguments)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("workload_manager"),
        description="Instances of workloads: an engine each, and what it needs.",
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    add_verb(verbs, "run", "run the engine of one instance, until it is gone")
    add_verb(verbs, "compile", "check a model and an engine, and say what they need")
    add_verb(verbs, "execute", "ask an engine what a job lists, and end it")
    add_verb(verbs, "tidy", "delete what drivers have left here that were removed from the fleet")
    add_verb(verbs, "spare", "be ready to do one of these, and wait for being told which")
    return parser


if __name__ == "__main__":
    sys.exit(begin(main))
