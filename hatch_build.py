"""Builds the compiled mover into the wheel, where there is a C compiler."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledMover(BuildHookInterface):  # type: ignore[type-arg]
    """With a compiler the wheel is for this platform and this Python, without one for all."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # a checkout builds it at the first start
            return
        native = Path(self.root) / "kvss_agent" / "native"
        # By its path: the package around it imports what is not there while a wheel is built.
        spec = importlib.util.spec_from_file_location("builder", native / "builder.py")
        assert spec  # noqa: S101 - for mypy
        assert spec.loader  # noqa: S101
        builder = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(builder)
        # Removed when this process ends, which is after the wheel was written.
        self._directory = tempfile.TemporaryDirectory(prefix="tidegate-mover-")
        try:
            path = builder.build_for_wheel(Path(self._directory.name))
        except builder.Unavailable as reason:
            self.app.display_warning(f"The wheel has no compiled mover: {reason}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"][str(path)] = f"kvss_agent/native/{path.name}"
