"""`python -m console.demo.launch NAME CONSOLE_URL [LISTEN]`: become an agent or the brain of the demo.
`LISTEN`: where the brain serves clients.

They are started with the settings of docs/agent.md and docs/routing.md, in the environment, where other
users cannot read the join token.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from console.demo import places
from console.stack.alone import without_settings


def main() -> None:
    name, console, *listen = sys.argv[1:]
    state = Path(os.environ["TIDEGATE_STATE_DIR"])
    kind = "node" if name in places.NODES else "brain"
    settings = {
        "NAME": name,
        "STATE_DIR": str(places.directory_of(state, name)),
        "CONTROL": "127.0.0.1:0",
        "CONSOLE": console,
        "JOIN_TOKEN": places.join_token(state, kind).read_text(),
        "TELEMETRY": os.environ.get("TIDEGATE_OWN_TELEMETRY_URL", os.environ.get("REDIS_URL", "")),
    }
    if kind == "brain":
        prefix, module = "BRAIN_", ["inference_brain", "serve"]
        settings |= {"LISTEN": listen[0], "ACCESS_LOG": "no"}
    else:
        prefix, module = "KVSS_AGENT_", ["kvss_agent"]
        settings |= {"MEMORY": places.MEMORY, "DRAIN_SECONDS": "1"}
    # The console's own settings, such as its database and secret key, are not passed on.
    theirs = without_settings(os.environ)
    environment = {**theirs, **{f"{prefix}{key}": value for key, value in settings.items()}}
    os.execve(sys.executable, [sys.executable, "-m", *module], environment)  # noqa: S606 - it is ours


if __name__ == "__main__":
    main()
