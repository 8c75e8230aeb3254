"""As much of the program `helm` as documents use, with Helm's own library: `install`, `upgrade` and
`uninstall`. `HELM_MORE`: a file of values that win over those of the command."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

SECONDS = 300


def merged(one: Any, other: Any) -> Any:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return other
    return {**one, **{key: merged(one.get(key), value) for key, value in other.items()}}


def read(path: str) -> Any:
    return yaml.safe_load(Path(path).read_text()) if path else {}


def main() -> None:
    parser = argparse.ArgumentParser(prog="helm")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("install", "upgrade", "uninstall"):
        one = verbs.add_parser(verb)
        one.add_argument("release")
        if verb != "uninstall":
            one.add_argument("chart")
            one.add_argument("-f", dest="values", default="")
        one.add_argument("-n", dest="namespace", required=True)
    asked = parser.parse_args()
    with helm.Config(kubeconfig_path=os.environ["KUBECONFIG"], namespace=asked.namespace) as cluster:
        if asked.verb == "uninstall":
            cluster.uninstall(asked.release, timeout=SECONDS)
            return
        values = merged(read(asked.values), read(os.environ.get("HELM_MORE", "")))
        getattr(cluster, asked.verb)(Path(asked.chart), asked.release, values, timeout=SECONDS)


if __name__ == "__main__":
    main()
