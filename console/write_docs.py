"""`make docs`: write the parts of the docs that are made from code. Tests hold them to it."""

from __future__ import annotations

from console.environment import PROJECT, settings_table

SETTINGS = """# Settings

All of them are environment variables, read once at the start and parsed strictly: a name that is
misspelt, a value that makes no sense or a contradiction stops the start and says so, with everything
that is wrong at once. `make up` sets what it needs by itself. This page is made by `make docs`.

"""


def main() -> None:
    (PROJECT / "docs" / "settings.md").write_text(SETTINGS + settings_table())


if __name__ == "__main__":
    main()
