"""The command line: its commands and options, made of the table of resources where that says them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any, Final

from console.ctl.examples import EXAMPLES
from console.ctl.failures import MEANINGS
from console.ctl.resources import RESOURCES, Resource, with_action
from telemetry.script import add_verb, program
from telemetry.units import Unreadable, parse_duration

FORMS: Final = ("wide", "json", "yaml", "name")
SHELLS: Final = ("bash", "zsh", "fish")
TIMEOUT_SECONDS: Final = 600.0
INTERVAL_SECONDS: Final = 2.0
OBSERVE_SECONDS: Final = 30.0
SECONDS_MAX: Final = 366 * 86400.0
FLEET_SECONDS: Final = 86400.0
ROLLOUT: Final = "rollout"
# What actions are for, and how their fields are read.
ACTIONS: Final = {
    "scale": "set the number of replicas or boxes",
    "restart": "replace all instances, with their caches taken over",
    "drain": "move everything off a node or a box",
    "cordon": "place nothing new on a node or a box",
    "uncordon": "place on it again",
    "upgrade": "drain a node, wait for its new software, and take it back",
    "restore-rails": "move streams off the spine where rails have room again",
    "acknowledge": "say that you are working on an alert",
    "unacknowledge": "take back an acknowledgment",
    "cancel": "cancel an operation and roll it back",
    "retry": "retry a stuck operation",
    "undo": "undo a change of the audit trail",
    "rollout undo": "go back to an earlier revision",
    "rollout pause": "stop a rollout where it is",
    "rollout resume": "continue a paused rollout",
}
FIELDS: Final[dict[str, tuple[Callable[[str], Any], str]]] = {
    "boxes": (int, "boxes of a session"),
    "replicas": (int, "replicas of a workload"),
    "version": (str, "the version of the software that a node is upgraded to"),
    "revision": (int, "the revision to go back to; by default the one before"),
    "ignore_redundancy": (
        bool,
        "with a node: go on where columns that are stored redundantly could be lost",
    ),
}
FILTERS: Final = {
    "action": "an action, as org.create",
    "actor": "who did it",
    "done": "true or false: whether it has ended",
    "driver": "a driver",
    "ended": "true or false: whether it has ended",
    "faulty": "true or false: whether its answers are wrong",
    "kind": "a kind, as session.resize",
    "label": "a label, as rack=7",
    "leaf": "a leaf",
    "model": "a model",
    "order": "newest or oldest first",
    "org": "an org",
    "q": "what a name or a field has in it",
    "ready": "true or false: whether it is ready",
    "request_id": "the X-Request-ID of a request",
    "rule": "a rule",
    "session": "a session",
    "severity": "page, ticket or notice",
    "since": "no earlier than this, as 2026-11-23T20:00:00Z",
    "stamp": "a stamp",
    "state": "a state",
    "suppressed": "true or false: whether another alert or a silence hides it",
    "target": "a topic, as session:chat",
    "topic": "a topic, as node:ax-1",
    "until": "before this, as 2026-11-23T20:00:00Z",
    "user": "whose token, by name",
    "waiting": "true or false: whether it waits for something",
    "workload": "a workload",
    "whose": "mine or administered",
}
OPTIONS: Final = {"q": "search"}  # where they are called otherwise


class Parser(argparse.ArgumentParser):
    """Raises no SystemExit of its own but for `--help` and errors of usage, with 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options
        )


def parser() -> Parser:
    codes = "\n".join(f"  {int(code):>3}  {meaning}" for code, meaning in MEANINGS.items())
    top = Parser(
        prog=program("console.ctl"),
        description="Look at a Tidegate console's cluster and change it, over the REST API.",
        epilog=f"exit codes:\n{codes}",
    )
    _common(top)
    top.set_defaults(context=None, request_timeout=30.0)
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _log_in(commands)
    _read(commands)
    _change(commands)
    for verb in sorted({verb for resource in RESOURCES for verb in resource.actions}):
        if not verb.startswith(ROLLOUT):
            _action(commands, verb, verb)
    _upgrade_fleet(commands)
    _rollout(commands)
    _about(commands)
    return top


def _command(commands: Any, name: str, text: str, epilog: str = "") -> argparse.ArgumentParser:
    made = add_verb(commands, name, text)
    whole = made.prog.removeprefix(program("console.ctl")).strip()
    example = f"example:\n  {made.prog} {EXAMPLES[whole]}".rstrip()
    made.epilog = f"{epilog}\n\n{example}" if epilog else example
    _common(made)
    return made


def _common(made: argparse.ArgumentParser) -> None:
    """Options that may be before the command or after it, where a default would undo what is before."""
    made.add_argument(
        "--context",
        default=argparse.SUPPRESS,
        metavar="NAME",
        help="the context to use, instead of the current one",
    )
    made.add_argument(
        "--request-timeout",
        type=_duration,
        default=argparse.SUPPRESS,
        metavar="DURATION",
        help="the longest wait for one answer of the console (30s)",
    )


def _log_in(commands: Any) -> None:
    one = _command(commands, "login", "store the address of a console and a token for it")
    one.add_argument("address", help="the console, as https://tidegate.example")
    one.add_argument(
        "--name", metavar="NAME", help="the name of the context; by default the console's host"
    )
    one.add_argument("--ca", metavar="FILE", help="PEM of the authorities to trust, if not the system's")
    one.add_argument(
        "--token-file",
        metavar="FILE",
        help="read the token or JWT from a file, `-` for standard input; by default it is asked for",
    )
    one.add_argument(
        "--plain", action="store_true", help="allow plain HTTP where the network is trusted"
    )
    one = _command(commands, "context", "list contexts, use one, or remove one")
    one.add_argument("verb", nargs="?", choices=("list", "use", "remove"), default="list")
    one.add_argument("name", nargs="?", help="a context")
    _command(commands, "whoami", "show who the console takes you for")


def _read(commands: Any) -> None:
    one = _command(commands, "get", "list resources, or show some by name", epilog=_kinds())
    one.add_argument(
        "what",
        nargs="+",
        metavar="KIND[,KIND] [NAME]",
        help="what to show: KIND, KIND NAME or KIND/NAME",
    )
    _output(one, "table, by default; wide has more columns")
    one.add_argument(
        "-w", "--watch", action="store_true", help="then print rows that change, until Ctrl-C"
    )
    one.add_argument(
        "--interval",
        type=_duration,
        default=INTERVAL_SECONDS,
        metavar="DURATION",
        help="how often to look while watching (2s)",
    )
    one.add_argument("--limit", type=_positive, metavar="N", help="at most so many")
    one.add_argument("--no-headers", action="store_true", help="leave the headings out")
    for name in filters():
        one.add_argument(option_of(name), dest=name, metavar="VALUE", help=_of_filter(name))
    one = _command(commands, "describe", "show all that is known of a resource", epilog=_kinds())
    one.add_argument("what", nargs="+", metavar="KIND NAME", help="KIND NAME or KIND/NAME")
    one = _command(commands, "logs", "print what instances write")
    one.add_argument(
        "what",
        nargs="+",
        metavar="NAME",
        help="a workload: all that run of it; or instance/WORKLOAD/NAME",
    )
    one.add_argument("-f", "--follow", action="store_true", help="go on with what one instance writes")
    one.add_argument("--tail", type=_positive, metavar="N", help="how many of the last lines (200)")
    one = _command(
        commands, "explain", "say why a request was a hit or a miss, and why it went where it did"
    )
    one.add_argument("request", help="the X-Request-ID of its answer, or the engine's name for it")
    one.add_argument("--org", metavar="ORG", help="the org of the request; needed if you see several")
    _output(one, "sentences and tables, by default")
    one = _command(commands, "top", "show current numbers, live at a terminal")
    one.add_argument(
        "what",
        nargs="?",
        choices=("overview", "models", "orgs", "nodes", "drivers"),
        default="overview",
    )
    one.add_argument("--once", action="store_true", help="print them once")
    one.add_argument("--org", metavar="ORG", help="the overview of one org")
    one.add_argument(
        "--interval",
        type=_duration,
        default=INTERVAL_SECONDS,
        metavar="DURATION",
        help="how often to look (2s)",
    )
    one = _command(commands, "wait", "wait until a resource is as it should be")
    one.add_argument("what", nargs="+", metavar="KIND NAME", help="KIND NAME or KIND/NAME")
    one.add_argument(
        "--for",
        dest="condition",
        required=True,
        metavar="CONDITION",
        help="delete, done, Ready, Ready=False, or field=value, as state=ready",
    )
    _timeout(one)


def _change(commands: Any) -> None:
    one = _command(
        commands, "apply", "create what manifests describe, or change it to that", epilog=_applied()
    )
    _files(one)
    one.add_argument(
        "-y", "--yes", action="store_true", help="do not ask before nodes that are alive are removed"
    )
    _changing(one)
    one = _command(
        commands,
        "diff",
        "show what `apply` would change; exits with 1 if it is anything",
        epilog=_applied(),
    )
    _files(one)
    one = _command(
        commands, "delete", "delete resources", epilog=_kinds(lambda one: one.delete is not None)
    )
    one.add_argument("what", nargs="*", metavar="KIND NAME", help="KIND NAME or KIND/NAME")
    one.add_argument(
        "-f", "--filename", action="append", metavar="FILE", help="delete what manifests name"
    )
    one.add_argument("-y", "--yes", action="store_true", help="do not ask")
    one.add_argument("--end-jobs", action="store_true", help="with a session: end its jobs as well")
    _changing(one)


def _action(commands: Any, name: str, verb: str) -> None:
    allowed = list(with_action(verb))
    one = _command(commands, name, ACTIONS[verb])
    kinds = " or ".join(resource.name for resource in allowed)
    article = "an" if kinds[0] in "aeiou" else "a"
    one.add_argument(
        "what", nargs="+", metavar="NAME", help=f"{article} {kinds}: NAME, KIND NAME or KIND/NAME"
    )
    one.set_defaults(does=verb)
    for field in dict.fromkeys(field for one in allowed for field in one.actions[verb].fields):
        if field in FIELDS:
            kind, text = FIELDS[field]
            if kind is bool:
                one.add_argument(option_of(field), action="store_const", const=True, help=text)
                continue
            one.add_argument(f"--{field}", type=kind, metavar="N" if kind is int else "TEXT", help=text)
    _changing(one, has_dry_run=any(resource.actions[verb].dry for resource in allowed))


def _upgrade_fleet(commands: Any) -> None:
    one = _command(
        commands,
        "upgrade-fleet",
        "upgrade all nodes that run another version, a few at a time; started again, it goes on",
    )
    one.add_argument(
        "--version", type=_named, required=True, metavar="TEXT", help="the version they are to run"
    )
    one.add_argument(
        "--at-once", type=_positive, default=1, metavar="N", help="how many are upgraded at once (1)"
    )
    one.add_argument(
        "--run",
        default="",
        metavar="COMMAND",
        help="run this here for each drained node, to replace its software: 'ssh {node} …'; by default "
        "somebody else does",
    )
    one.add_argument(
        "--observe",
        type=_duration,
        default=OBSERVE_SECONDS,
        metavar="DURATION",
        help="how long to look for alerts after a node, before the next one (30s)",
    )
    for name, which in (("label", "with"), ("stamp", "of")):
        one.add_argument(option_of(name), metavar="VALUE", help=f"only nodes {which} {FILTERS[name]}")
    one.add_argument(
        "--ignore-redundancy",
        action="store_true",
        help="drain nodes where columns that are stored redundantly could be lost",
    )
    one.add_argument("--reason", default="", help="why, for the audit trail")
    one.add_argument("--dry-run", action="store_true", help="print the nodes, and change nothing")
    one.add_argument(
        "--timeout",
        type=_duration,
        default=FLEET_SECONDS,
        metavar="DURATION",
        help="the longest wait for all of them (1d); then it exits with 6",
    )


def _rollout(commands: Any) -> None:
    verbs = sorted(
        {verb for resource in RESOURCES for verb in resource.actions if verb.startswith(ROLLOUT)}
    )
    if not verbs:
        return
    group = add_verb(commands, ROLLOUT, "follow the rollout of a workload, pause it or undo it")
    inner = group.add_subparsers(dest="rollout", metavar="COMMAND", required=True)
    one = _command(inner, "status", "follow a rollout to its end")
    one.add_argument("name", metavar="WORKLOAD")
    one.add_argument("--no-wait", action="store_true", help="only show how far it is")
    _timeout(one)
    one = _command(inner, "history", "list the revisions of a workload")
    one.add_argument("name", metavar="WORKLOAD")
    _output(one, "table, by default")
    for verb in verbs:
        _action(inner, verb.removeprefix(f"{ROLLOUT} "), verb)


def _about(commands: Any) -> None:
    one = _command(commands, "version", "print the versions of this program and of the console")
    one.add_argument("--client", action="store_true", help="only of this program")
    one = _command(commands, "completion", "print the completion script of a shell")
    one.add_argument("shell", choices=SHELLS)


def _output(one: argparse.ArgumentParser, default: str) -> None:
    one.add_argument("-o", "--output", choices=FORMS, help=f"how to print it: {default}")


def _timeout(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--timeout",
        type=_duration,
        default=TIMEOUT_SECONDS,
        metavar="DURATION",
        help="the longest wait, as 90s or 15m (10m); then it exits with 6",
    )


def _files(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "-f",
        "--filename",
        action="append",
        required=True,
        metavar="FILE",
        help="a manifest, a folder of manifests, or `-` for standard input; may be repeated",
    )
    one.add_argument("--reason", default="", help="why, for the audit trail")


def _changing(one: argparse.ArgumentParser, *, has_dry_run: bool = True) -> None:
    if not any(action.dest == "reason" for action in one._actions):  # noqa: SLF001 - there is no other way
        one.add_argument("--reason", default="", help="why, for the audit trail")
    if has_dry_run:
        one.add_argument(
            "--dry-run", action="store_true", help="let the console check it, and change nothing"
        )
    one.add_argument(
        "--no-wait", action="store_true", help="do not wait for the operation that this starts"
    )
    _timeout(one)
    _output(one, "a line, by default")


def filters() -> list[str]:
    """All filters and parents, each once."""
    names = [name for resource in RESOURCES for name in resource.filters]
    return sorted({*names, *(resource.parent for resource in RESOURCES if resource.parent)})


def filtered_by(name: str) -> Iterator[Resource]:
    return (one for one in RESOURCES if name in one.filters or name == one.parent)


def option_of(name: str) -> str:
    return f"--{OPTIONS.get(name, name).replace('_', '-')}"


def _of_filter(name: str) -> str:
    return f"{FILTERS[name]} (of {', '.join(resource.plural for resource in filtered_by(name))})"


def _kinds(holds: Callable[[Resource], bool] = lambda _: True) -> str:
    rows = [
        (one, f"{one.plural}{f' ({one.short})' if one.short else ''}") for one in RESOURCES if holds(one)
    ]
    return "kinds:\n" + "\n".join(f"  {names:<20} {one.text}" for one, names in rows)


def _applied() -> str:
    return "kinds of manifests: " + ", ".join(one.name for one in RESOURCES if one.is_applied)


def _duration(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except Unreadable as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if seconds <= 0:
        raise argparse.ArgumentTypeError("It has to be longer than nothing.")
    if seconds > SECONDS_MAX:
        raise argparse.ArgumentTypeError("It has to be at most 366 days.")
    return seconds


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more.")
    return int(text)


def _named(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("It has to be something.")
    return text
