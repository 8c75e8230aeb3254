"""Events of changes are sentences, not names of actions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import console
from console.audit.sentences import SENTENCES, pattern_of, words_of

ACTION: Final = re.compile(r"[a-z_]+\.[a-z_-]+")
# They have no topics, and so are no events.
NO_EVENTS: Final = {
    *("token.create", "token.revoke", "view.delete", "view.save"),
    *("user.change_password", "user.create", "user.reset_password", "user.revoke_credentials"),
    "user.update",
    "fleet.import",  # its event is noted beside it
}


def recorders(tree: ast.Module) -> set[str]:
    """`record`, and the functions of a module that pass actions on to it without a sentence."""
    found = {"record", "record_token"}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and any(
            isinstance(argument, ast.arg) and argument.arg == "action"
            for argument in ast.walk(function.args)
        ):
            calls = [one for one in ast.walk(function) if is_call_of(one, {"record"})]
            if any(not has_sentence(one) for one in calls):
                found.add(function.name)
    return found


def is_call_of(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def has_sentence(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and any(one.arg == "sentence" for one in node.keywords)


def actions_without_a_sentence() -> Iterator[str]:
    for path in sorted(Path(console.__file__).parent.rglob("*.py")):
        tree = ast.parse(path.read_text())
        names = recorders(tree)
        for node in ast.walk(tree):
            if is_call_of(node, names) and not has_sentence(node):
                assert isinstance(node, ast.Call)
                for argument in node.args:
                    if isinstance(argument, ast.Constant) and ACTION.fullmatch(str(argument.value)):
                        yield str(argument.value)


def test_every_action_that_is_an_event_has_a_sentence_and_no_other_has() -> None:
    found = set(actions_without_a_sentence())
    assert found >= {"replica.add", "alert.acknowledge", "policy.caller_add"}, "all ways to record"
    assert found - NO_EVENTS == set(SENTENCES)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("org.update", "Org: update"),
        ("user.change_password", "User: change password"),
        ("driver.claims-key.rotate", "Driver: claims key rotate"),
        ("policy.caller_add", "API key: create"),
        ("handover.note", "Hand-over: note"),
    ],
)
def test_pages_call_an_action_by_words(action: str, words: str) -> None:
    assert words_of(action) == words
    assert re.search(pattern_of(words.upper()), action)
    assert not re.search(pattern_of(words), f"{action}s")


def test_a_sentence_names_its_object() -> None:
    for action, sentence in SENTENCES.items():
        assert sentence.count("{}") == 1, action
        assert sentence[0].isupper() or sentence.startswith("{}"), action
        assert sentence.endswith(".") or action == "handover.note", "a note ends as its author ended it"
