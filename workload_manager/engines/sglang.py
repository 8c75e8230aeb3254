"""SGLang. Its command line is as its documentation has it; it was not run here."""

from __future__ import annotations

from workload_manager.engines.base import CannotStart, Given, Launch


def launch(given: Given) -> Launch:
    spec = given.spec
    if given.weights is None:
        raise CannotStart("SGLang needs weights.")
    if given.join is not None:
        raise CannotStart(
            "SGLang has no driver in its process: leave `cache` out, and let its storage "
            "backend ask the daemon of a driver."
        )
    tokenizer = ("--tokenizer-path", str(given.tokenizer)) if given.tokenizer else ()
    command = (
        *(given.programs.sglang_python, "-m", "sglang.launch_server"),
        *("--model-path", str(given.weights), "--served-model-name", spec.model),
        *("--context-length", str(spec.tokens_max)),
        *("--host", "127.0.0.1", "--port", str(given.port)),
        *tokenizer,
        *spec.engine.arguments,
    )
    return Launch(command, given.origin, environment=spec.engine.environment)
