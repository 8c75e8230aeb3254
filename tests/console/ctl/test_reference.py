"""docs/tidegatectl.md has the reference that the command line makes of itself."""

from __future__ import annotations

import re
import shlex

from console.ctl.arguments import ACTIONS, FILTERS, filters, parser
from console.ctl.examples import EXAMPLES
from console.ctl.failures import MEANINGS, Exit
from console.ctl.reference import BEGINS, reference
from console.ctl.resources import RESOURCES
from console.environment import OF_CLIENTS, PROJECT

PAGE = (PROJECT / "docs" / "tidegatectl.md").read_text()


def test_the_reference_is_that_of_the_code() -> None:
    assert PAGE[PAGE.index(BEGINS) :] == reference(), "make docs"


def test_every_code_action_and_filter_is_explained() -> None:
    assert set(MEANINGS) == set(Exit)
    assert set(FILTERS) == set(filters())
    assert {verb for one in RESOURCES for verb in one.actions} <= set(ACTIONS)


def test_commands_of_the_page_are_commands() -> None:
    known = set(re.findall(r"^### `tidegatectl ([a-z-]+)", reference(), re.MULTILINE))
    used = set(re.findall(r"tidegatectl ([a-z]+)", PAGE[: PAGE.index(BEGINS)]))
    assert used - {"completion"} <= known
    assert parser().format_help().startswith("usage: ")


def test_every_command_has_an_example_that_it_takes() -> None:
    named = re.findall(r"^### `tidegatectl ([a-z -]+)`$", reference(), re.MULTILINE)
    assert set(named) == set(EXAMPLES)
    for name, example in EXAMPLES.items():
        parser().parse_args([*name.split(), *shlex.split(example)])


def test_variables_of_the_page_are_those_of_clients() -> None:
    """The console's own environment may have them: people export them."""
    assert set(re.findall(r"^\| `(TIDEGATE_\w+)`", PAGE, re.MULTILINE)) == set(OF_CLIENTS)
