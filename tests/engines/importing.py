"""Engines that are imported without what they ask for and nothing here runs."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any


class _Anything(ModuleType):
    """A module in which every name is a class of nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _StandIn(MetaPathFinder, Loader):
    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002
        meant = fullname.split(".", maxsplit=1)[0] == self._package
        return ModuleSpec(fullname, self, is_package=True) if meant else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """It is empty."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What engines warn of while they are imported is theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def sglang() -> Iterator[None]:
    """SGLang imports its models with its caches, and with them torchvision; and more with itself."""
    with quiet():
        _bare_sglang()
        yield


def _bare_sglang() -> None:
    import transformers  # noqa: F401 # looks for the real one

    if find_spec("torchvision") is None:
        sys.meta_path.append(_StandIn("torchvision"))
    _bare("sglang")


@contextlib.contextmanager
def ucm() -> Iterator[None]:
    """UCM patches vLLM when it is imported, and logs by compiled code, for a Python that is not this."""
    sys.path.append(str(Path(sys.prefix) / "other"))  # where `bootstrap engines` puts it
    _bare("ucm")
    logger = sys.modules["ucm.logger"] = ModuleType("ucm.logger")
    logger.init_logger = logging.getLogger  # type: ignore[attr-defined]
    yield


def _bare(name: str) -> None:
    """Let modules of a package be imported without what the package itself imports."""
    spec = find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"there is no {name}")
    package = ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations or ())
    package.__spec__ = spec
    sys.modules[name] = package
