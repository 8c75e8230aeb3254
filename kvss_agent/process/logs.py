"""One line a record, for people or for machines, and nothing that could forge a second line."""

from __future__ import annotations

import logging
import time

import msgspec


def set_up(style: str, name: str) -> None:
    """Log to standard error: as `text`, or as `json` with the name of the agent in every record."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json(name) if style == "json" else _Text())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each heartbeat helps nobody


class _Text(logging.Formatter):
    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__("{asctime} {levelname:<7} {name}: {message}", style="{")
        self.default_time_format = "%Y-%m-%dT%H:%M:%S"
        self.default_msec_format = "%s.%03dZ"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = record.message.replace("\r", "\\r").replace("\n", "\\n")
        return super().formatMessage(record)


class _Json(logging.Formatter):
    def __init__(self, agent: str) -> None:
        super().__init__()
        self._agent = agent

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "at": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "agent": self._agent,
            "thread": record.threadName,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields).decode()
