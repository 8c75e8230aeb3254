"""Completion for shells. Their scripts ask `tidegatectl __complete` with the words before the cursor."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

from console.ctl import contexts
from console.ctl.arguments import ROLLOUT, parser
from console.ctl.catalogue import listed
from console.ctl.client import Client
from console.ctl.failures import Failed
from console.ctl.resources import BY_NAME, RESOURCES, Resource, named

COMPLETE: Final = "__complete"
NAMES_MAX: Final = 200
SECONDS_MAX: Final = 3.0
_WITH_NAMES: Final = ("get", "describe", "delete", "wait")

SCRIPTS: Final = {
    "bash": """\
# tidegatectl completion for bash. Add to ~/.bashrc: source <(tidegatectl completion bash)
_tidegatectl() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        COMPREPLY+=("$line")
    done < <(tidegatectl __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == __files__ ]]; then
        COMPREPLY=()
        compopt -o default
    fi
}
complete -F _tidegatectl tidegatectl
""",
    "zsh": """\
#compdef tidegatectl
# tidegatectl completion for zsh. Add to ~/.zshrc: source <(tidegatectl completion zsh)
_tidegatectl() {
    local -a found
    found=("${(@f)$(tidegatectl __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ "${found[*]}" == __files__ ]]; then
        _files
    else
        compadd -a found
    fi
}
compdef _tidegatectl tidegatectl
""",
    "fish": """\
# tidegatectl completion for fish. Add to config.fish: tidegatectl completion fish | source
function __tidegatectl
    set -l words (commandline -opc) (commandline -ct)
    set -l found (tidegatectl __complete $words[2..-1] 2>/dev/null)
    if test "$found" = __files__
        __fish_complete_path (commandline -ct)
    else
        printf '%s\\n' $found
    end
end
complete -c tidegatectl -f -a '(__tidegatectl)'
""",
}
FILES: Final = "__files__"  # so a shell completes the names of files
_OF_FILES: Final = {"filename", "ca", "token_file"}


def complete(words: Sequence[str]) -> list[str]:
    """What the last of these words may become. Nothing where the console does not answer: a completion
    has nowhere to say so."""
    *before, begun = words or [""]
    return sorted(
        {one for one in _candidates(list(before)) if one.startswith(begun)} or _in_files(before)
    )


def _in_files(before: Sequence[str]) -> set[str]:
    action = _awaited(_of_words(before)[0], before)
    return {FILES} if action is not None and action.dest in _OF_FILES else set()


def _of_words(before: Sequence[str]) -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser of the command that the words are of, and its positional words."""
    found: argparse.ArgumentParser = parser()
    positional: list[str] = []
    skipped = False
    for place, word in enumerate(before):
        if skipped:
            skipped = False
            continue
        inner = subparsers_of(found)
        if inner and word in inner:
            found, positional = inner[word], []
        elif word.startswith("-"):
            skipped = _awaited(found, before[: place + 1]) is not None
        else:
            positional.append(word)
    return found, positional


def subparsers_of(one: argparse.ArgumentParser) -> dict[str, Any]:
    groups = (action for action in actions_of(one) if isinstance(action, argparse._SubParsersAction))  # noqa: SLF001
    return next((dict(group.choices) for group in groups), {})


def actions_of(one: argparse.ArgumentParser) -> list[argparse.Action]:
    return list(one._actions)  # noqa: SLF001 - argparse has no other way to ask


def _awaited(one: argparse.ArgumentParser, before: Sequence[str]) -> argparse.Action | None:
    """The option that the word before the cursor is, if a value of it comes next."""
    last = before[-1] if before else ""
    found = (action for action in actions_of(one) if last in action.option_strings and action.nargs != 0)
    return next(found, None)


def _candidates(before: list[str]) -> Iterator[str]:
    one, positional = _of_words(before)
    action = _awaited(one, before)
    if action is not None:
        if action.choices:
            yield from map(str, action.choices)
        elif action.dest == "context":
            yield from contexts.read().contexts
        elif action.dest in BY_NAME:
            yield from _names(named(action.dest), before)
        return
    if inner := subparsers_of(one):
        yield from inner
        return
    yield from (
        name for option in actions_of(one) for name in option.option_strings if name.startswith("--")
    )
    yield from _positional(one, positional, before)


def _positional(one: argparse.ArgumentParser, positional: list[str], before: list[str]) -> Iterator[str]:
    command = one.prog.split()[-1]
    verb = one.get_default("does")
    if verb:
        allowed = [resource for resource in RESOURCES if verb in resource.actions]
        chosen = [
            resource for resource in allowed if positional and BY_NAME.get(positional[0]) is resource
        ]
        if not chosen:
            yield from (resource.name for resource in allowed[1:])
        for resource in chosen or allowed[:1]:
            yield from _names(resource, before)
    elif ROLLOUT in one.prog.split() or command == "logs":
        yield from _names(named("workload"), before)
    elif command in _WITH_NAMES:
        if not positional:
            yield from (resource.plural if command == "get" else resource.name for resource in RESOURCES)
        elif positional[0] in BY_NAME:
            yield from _names(named(positional[0]), before)
    else:
        places = [action for action in actions_of(one) if not action.option_strings]
        if len(positional) < len(places):
            yield from map(str, places[len(positional)].choices or ())
        if command == "context" and len(positional) == 1:
            yield from contexts.read().contexts


def _names(resource: Resource, before: list[str]) -> Iterator[str]:
    """Those that the console has, at most a page of them."""
    given = dict(pairwise(before))
    try:
        with Client(contexts.chosen(given.get("--context")), SECONDS_MAX) as client:
            for item in listed(client, resource, most=NAMES_MAX):
                yield resource.name_of(item, str(item.get(resource.parent, "")))
    except Failed:
        return
