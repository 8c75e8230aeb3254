"""Who has locked which boxes: a ConfigMap, for whichever server leads."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import msgspec

from cluster_server.kubernetes.api import CONFIG_MAP, Api, Document, Missing, Refused, Taken
from cluster_server.kubernetes.objects import STORED
from telemetry.decoder import Malformed, decode

log = logging.getLogger(__name__)

NAME: Final = "tidegate-boxes"
HOLDERS: Final = "holders.json"


class Locks:
    """`lost`: set where another server has written them, so that this one ends."""

    def __init__(self, api: Api, lost: asyncio.Event) -> None:
        self._api = api
        self._lost = lost
        self._version = ""  # that was read; empty where there is none

    async def read(self) -> dict[str, str]:
        """Raises OSError."""
        try:
            found = await self._api.get(CONFIG_MAP, NAME)
        except Missing:
            return {}
        try:
            holders = decode(_said(found).encode(), dict[str, str], STORED)
        except Malformed as error:
            raise OSError(f"ConfigMap {NAME} is damaged: {error}") from None
        self._version = found["metadata"]["resourceVersion"]
        return holders

    async def store(self, holders: dict[str, str]) -> None:
        """Raises OSError."""
        said = msgspec.json.encode(holders, order="sorted").decode()
        try:
            made = await self._write(said)
        except (Taken, Missing):
            made = await self._read_again(said)
        except Refused as error:
            raise OSError(str(error)) from None
        self._version = made["metadata"]["resourceVersion"]

    async def _write(self, said: str) -> Document:
        if not self._version:
            return await self._api.create(
                CONFIG_MAP, {"metadata": {"name": NAME}, "data": {HOLDERS: said}}
            )
        change = {"metadata": {"resourceVersion": self._version}, "data": {HOLDERS: said}}
        return await self._api.merge(CONFIG_MAP, NAME, change)

    async def _read_again(self, said: str) -> Document:
        """It has changed since it was read: by a request of ours that got no answer, or by others."""
        try:
            found = await self._api.get(CONFIG_MAP, NAME)
        except Missing:
            found = {}
        if found and _said(found) == said:
            return found
        log.error("ConfigMap %s was changed by others: this server ends", NAME)
        self._lost.set()
        raise OSError(f"ConfigMap {NAME} was changed by others.")


def _said(found: Document) -> str:
    return str(found.get("data", {}).get(HOLDERS, "{}"))
