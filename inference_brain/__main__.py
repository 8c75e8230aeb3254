"""`python -m inference_brain`: what the brain does from a command line. See `--help`."""

from __future__ import annotations

import argparse
import sys

from telemetry.garbage import loading
from telemetry.script import begin, program


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["serve"]:  # a daemon reads its environment, too
        with loading():
            from inference_brain import serve

        return serve.main(arguments[1:])
    if arguments[:1] == ["replay"]:
        from inference_brain.replay import command

        return command.main(arguments[1:])
    _parser().parse_args(arguments)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("inference_brain"),
        description="The Inference Brain: each request goes where its first token comes soonest.",
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    verbs.add_parser("serve", help="serve OpenAI's API before the replicas of a desired document")
    verbs.add_parser("replay", help="play a trace against any server with OpenAI's API, and time it")
    return parser


if __name__ == "__main__":
    sys.exit(begin(main))
