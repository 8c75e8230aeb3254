"""Whether a folder is a tokenizer: loaded in a process of its own, with bounds, as a brain will load it.

    check(folder)                                        # what it found, or BadArchive
    python -m workload_manager.tokenizers.check FOLDER   # the process: JSON on its standard output

Templates are compiled in the brain's sandbox, and rendered there once. Nothing else of an upload is run.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from inference_brain import uploads
from telemetry.decoder import MESSAGE, Malformed, decode
from workload_manager.tokenizers.archive import BadArchive

_PROBE: Final = "Why is the sky blue? 1234 — ä\n"


class Checked(Struct):
    """`vocabulary`: tokens; `has_chat`: there is a chat template. Or `error`, a sentence."""

    vocabulary: Annotated[int, Meta(ge=0)] = 0
    has_chat: bool = False
    error: str = ""


_DECODER: Final = msgspec.json.Decoder(Checked)


def check(folder: Path) -> Checked:
    """Raises BadArchive, and OSError if no process can be started."""
    command = [sys.executable, "-m", __name__, str(folder)]
    try:
        done = subprocess.run(
            command,
            cwd=uploads.ROOT,
            env=uploads.environment(),
            capture_output=True,
            timeout=uploads.LOAD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BadArchive("The tokenizer takes too long to load.") from None
    try:
        found = decode(done.stdout, _DECODER, MESSAGE)
    except Malformed:
        raise BadArchive("The tokenizer takes too much memory or time to load.") from None
    if found.error:
        raise BadArchive(found.error)
    return found


def main(folder: Path) -> Checked:
    """In the process: all that a library may do to it ends with it."""
    uploads.bound_this_process()
    from inference_brain.tokens import Chat, PromptTokenizer
    from inference_brain.tokens import folder as folders
    from inference_brain.tokens.errors import TemplateRefused, TokensError
    from inference_brain.tokens.sandbox import Template

    try:
        told = folders.read(folder)
        for source in told.templates.values():
            Template(source)  # the tokenizer itself would put up with a broken one
        tokenizer = PromptTokenizer(told)
        if not tokenizer.vocabulary:
            return Checked(error="The tokenizer has no tokens.")
        tokenizer.decode(tokenizer.encode(_PROBE, add_special_tokens=True))
        if tokenizer.has_chat:
            with contextlib.suppress(TemplateRefused):  # it wants other messages, a system's first say
                tokenizer.chat(Chat([{"role": "user", "content": _PROBE}]))
    except TokensError as error:
        said = str(error).replace(f"{folder}/", "").replace(str(folder), "the archive").strip()
        return Checked(error=said if said.endswith(".") else f"{said}.")
    return Checked(tokenizer.vocabulary, tokenizer.has_chat)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(msgspec.to_builtins(main(Path(sys.argv[1])))))
