"""`make sbom`: a bill of materials as CycloneDX 1.6 JSON, of what a lock names.

Versions, markers and hashes are the lock's, whole: also of what another platform would install. Licenses
and who needs whom are told by the packages that are installed here, so a package that is not has none.
The same lock and environment give the same bytes: the serial number follows from the content, and the
time is that of the sources (SOURCE_DATE_EPOCH, or the lock's last change).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from console.supply.lock import LOCKS, Pin, normal, pins
from telemetry.version import tidegate_version

SPEC: Final = "1.6"
LICENSE_TEXT_MAX: Final = 200  # what is longer is the text of a license, and not its name
_NAME: Final = re.compile(r"^[A-Za-z0-9._-]+")
_EXTRA: Final = re.compile(r"""extra\s*==""")
_NAMESPACE: Final = uuid.UUID("5bd7f3d6-8c6c-5a0c-9f0e-1f4f6a0b7d11")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make sbom", description=__doc__)
    parser.add_argument("--lock", default="run", help="run, dev, models, engines or fuzz (default: run)")
    parser.add_argument("--output", type=Path, help="default: standard output")
    told = parser.parse_args(arguments)
    lock = LOCKS / f"{told.lock}.txt"
    if not lock.is_file():
        print(f"There is no lock {lock.name}.", file=sys.stderr)
        return os.EX_USAGE
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH", lock.stat().st_mtime))
    text = json.dumps(bill(pins(lock), at=datetime.fromtimestamp(epoch, UTC)), indent=1) + "\n"
    if told.output:
        told.output.parent.mkdir(parents=True, exist_ok=True)
        told.output.write_text(text)
        print(f"{told.output}: {text.count('bom-ref') - 1} components of {lock.name}")
    else:
        sys.stdout.write(text)
    return 0


def bill(every: Iterable[Pin], *, at: datetime) -> dict[str, Any]:
    """The whole document, for Tidegate with these packages."""
    pinned = sorted(set(every), key=lambda pin: (pin.name, pin.version))
    version = tidegate_version()
    root = f"pkg:generic/tidegate@{version}"
    told = {
        "components": [_component(pin) for pin in pinned],
        "dependencies": _dependencies(pinned, root),
    }
    serial = uuid.uuid5(_NAMESPACE, json.dumps(told, sort_keys=True))
    return {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPEC}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPEC,
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {
            "timestamp": at.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {
                "type": "application",
                "bom-ref": root,
                "name": "tidegate",
                "version": version,
                "purl": root,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            },
        },
        **told,
    }


def reference(pin: Pin) -> str:
    return f"pkg:pypi/{pin.name}@{pin.version}"


def _component(pin: Pin) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": "library",
        "bom-ref": reference(pin),
        "name": pin.name,
        "version": pin.version,
        "purl": reference(pin),
        "scope": "required",
    }
    # A package has a file for each platform: any of these is what was locked.
    files = [
        {
            "type": "distribution",
            "url": reference(pin),
            "hashes": [{"alg": "SHA-256", "content": digest}],
        }
        for digest in pin.sha256
    ]
    if files:
        found["externalReferences"] = files
    if pin.marker:
        found["properties"] = [{"name": "tidegate:marker", "value": pin.marker}]
    if license_ := _license(pin):
        found["licenses"] = [license_]
    return found


def _installed(pin: Pin) -> metadata.PackageMetadata | None:
    try:
        told = metadata.metadata(pin.name)
    except metadata.PackageNotFoundError:
        return None
    return told if told["Version"] == pin.version else None


def _license(pin: Pin) -> dict[str, Any] | None:
    """By what the package says of itself: an SPDX expression, or whatever it calls its license."""
    told = _installed(pin)
    if told is None:
        return None
    if "License-Expression" in told:
        return {"expression": told["License-Expression"]}
    classified = [
        one.rpartition(" :: ")[2]
        for one in told.get_all("Classifier") or ()
        if one.startswith("License ::")
    ]
    said = told["License"].strip() if "License" in told else ""
    name = said if said and "\n" not in said and len(said) <= LICENSE_TEXT_MAX else ""
    name = name or " and ".join(classified)
    return {"license": {"name": name}} if name else None


def _dependencies(pinned: Sequence[Pin], root: str) -> list[dict[str, Any]]:
    by_name: Mapping[str, list[Pin]] = {
        name: [pin for pin in pinned if pin.name == name] for name in {pin.name for pin in pinned}
    }
    needs = {pin: sorted(_needs(pin) & by_name.keys()) for pin in pinned}
    needed = {name for names in needs.values() for name in names}
    tops = [reference(pin) for pin in pinned if pin.name not in needed]
    return [
        {"ref": root, "dependsOn": tops},
        *(
            {
                "ref": reference(pin),
                "dependsOn": sorted({reference(other) for name in names for other in by_name[name]}),
            }
            for pin, names in needs.items()
        ),
    ]


def _needs(pin: Pin) -> set[str]:
    """Names of what the package asks for, without what only an extra of it wants."""
    told = _installed(pin)
    if told is None:
        return set()
    asked = (one.partition(";") for one in told.get_all("Requires-Dist") or ())
    named = (_NAME.match(what.strip()) for what, _, marker in asked if not _EXTRA.search(marker))
    return {normal(name[0]) for name in named if name}


if __name__ == "__main__":
    sys.exit(main())
