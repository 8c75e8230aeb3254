"""The compiled mover, built for tests."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvss_agent import native
from kvss_agent.native import Unavailable
from tests.prepared import directory_of_run

# Most tests want something that is built, and have nothing to do with how the compiler works, which
# takes more than a second of a processor. Paths of sources are no part of what is made, and an output
# is the last argument.
REMEMBERING = """\
#!/bin/sh
# {compiler}, but the same sources with the same options are compiled once a run.
options= sources=
for argument; do
    case "$argument" in
        --version) exec {compiler} "$@" ;;
        *.c) sources="$sources$(cat "$argument" "${{argument%/*}}/native.h")" ;;
        *) options="$options $output"; output=$argument ;;
    esac
done
made={directory}/$(printf '%s' "$options$sources" | sha256sum | cut -c 1-64)
[ -f "$made" ] && exec cp "$made" "$output"
{compiler} "$@" || exit $?
cp "$output" "$made.$$" && mv "$made.$$" "$made"
"""


def _remembering(compiler: str) -> str:
    """A command that does what this compiler does, and does it once."""
    if shutil.which(compiler.split(maxsplit=1)[0]) is None:
        return compiler
    directory = directory_of_run("compiled")
    script = directory / "cc"
    if not script.exists():
        fresh = script.with_suffix(f".{os.getpid()}")
        fresh.write_text(REMEMBERING.format(compiler=compiler, directory=directory))
        fresh.chmod(0o755)
        fresh.replace(script)
    return str(script)


COMPILER = _remembering(os.environ.get("CC") or "cc")
STRICT = f"{COMPILER} -Wall -Wextra -Werror"


def built(directory: Path, compiler: str) -> Any:
    """A mover that this compiler has just made."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TIDEGATE_STATE_DIR", str(directory))
        patched.setenv("CC", compiler)
        patched.delenv("KVSS_NATIVE", raising=False)
        try:
            return native.require(build=True)
        except Unavailable as reason:
            if "there is no compiler" in str(reason) or "the headers of Python" in str(reason):
                pytest.skip(f"the native mover cannot be built here: {reason}")
            raise
