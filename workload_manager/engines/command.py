"""Any OpenAI server, by its command line.

If the instance has a cache, the variable TIDEGATE_DRIVER names a file with the configuration of a driver
(`JoinConfig`): readiness waits until the server's driver has reported there.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvss_agent.process.durable_file import write_durably
from workload_manager.engines.base import CannotStart, Given, Launch

DRIVER_FILE: Final = "driver.json"
DRIVER_VARIABLE: Final = "TIDEGATE_DRIVER"


def launch(given: Given) -> Launch:
    values = {
        "{port}": str(given.port),
        "{weights}": str(given.weights or ""),
        "{tokenizer}": str(given.tokenizer or ""),
    }
    command = []
    for argument in (*given.spec.engine.command, *given.spec.engine.arguments):
        for name, value in values.items():
            if name in argument and not value:
                raise CannotStart(f"The command wants {name}, and the specification has none.")
            argument = argument.replace(name, value)
        command.append(argument)
    environment = dict(given.spec.engine.environment)
    if given.join:
        file = given.folder / DRIVER_FILE
        write_durably(file, msgspec.json.encode(given.join))
        environment[DRIVER_VARIABLE] = str(file)
    return Launch(tuple(command), given.origin, probe="/v1/models", environment=environment)
