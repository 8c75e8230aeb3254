"""`python -m console.demo.launch NAME CONSOLE_URL [LISTEN]`: become an agent, a driver or the brain of
the demo. `LISTEN`: where the brain serves clients.

They are started with the settings of docs/agent.md, docs/driver.md and docs/routing.md, in the
environment, where other users cannot read the join token.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from console.demo import places

OF_THE_CONSOLE = ("TIDEGATE_", "DATABASE_URL", "REDIS_URL")


def main() -> None:
    name, console, *listen = sys.argv[1:]
    state = Path(os.environ["TIDEGATE_STATE_DIR"])
    kind = "node" if name in places.NODES else "brain" if name == places.BRAIN else "driver"
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
    elif kind == "node":
        prefix, module = "KVSS_AGENT_", ["kvss_agent"]
        settings |= {"MEMORY": places.MEMORY, "DRAIN_SECONDS": "1"}
    else:
        prefix, module = "SWDRIVER_", ["swdriver_shim", "serve"]
        settings |= {"MODEL": str(places.model(state, name))}
    # The console's own settings, such as its database and secret key, are not passed on.
    theirs = {
        name: value
        for name, value in os.environ.items()
        if name == "TIDEGATE_STATE_DIR" or not name.startswith(OF_THE_CONSOLE)
    }
    environment = {**theirs, **{f"{prefix}{key}": value for key, value in settings.items()}}
    os.execve(sys.executable, [sys.executable, "-m", *module], environment)  # noqa: S606 - it is ours


if __name__ == "__main__":
    main()
