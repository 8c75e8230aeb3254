"""The command line of `tidegate-host`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tidegate_host import host, options, releases, roles
from tidegate_host.machine import Failed, Machine
from tidegate_host.options import Wanted
from tidegate_host.settings import PREFIXES, Secrets

LOCK: Final = Path(__file__).resolve().parent.parent.parent.parent / "requirements" / "run.txt"
WHEELHOUSE: Final[dict[str, Any]] = {
    "metavar": "DIR",
    "type": Path,
    "help": "wheels of packages, where there is no index",
}
EPILOG: Final = """\
roles:
{roles}
  console       {console}

secrets are read from the environment, where other users of this machine cannot see them:
  DATABASE_URL, REDIS_URL, TIDEGATE_TELEMETRY_URL                external servers
  KVSS_AGENT_JOIN_TOKEN, SWDRIVER_JOIN_TOKEN, BRAIN_JOIN_TOKEN   with which those join the fleet

what is installed:
  /etc/tidegate/*.env        settings, which are yours to change; run `install` again afterwards
  /etc/tidegate/tls/         certificates
  /opt/tidegate/releases/    releases side by side; /opt/tidegate/current is the one in use
  /var/lib/tidegate*/        data

examples:
  tidegate-host install --wheel tidegate-0.1.0-….whl --roles console --local-servers
  KVSS_AGENT_JOIN_TOKEN=tgj_… tidegate-host install --wheel tidegate-0.1.0-….whl --roles agent \\
      --console https://console.example.org --tls-authority authority.pem
  tidegate-host install --wheel tidegate-0.2.0-….whl        # upgrade; all else is remembered
"""


def main(arguments: Sequence[str]) -> int:
    """Run one verb. Returns an exit code."""
    chosen = _parser().parse_args(arguments)
    machine = Machine(dry_run=getattr(chosen, "dry_run", False))
    try:
        if chosen.verb == "status":
            return host.status()
        with host.alone():
            match chosen.verb:
                case "install":
                    _install(machine, chosen)
                case "rollback":
                    host.rollback(machine, chosen.wheelhouse)
                case "certificate":
                    host.certificate(machine, chosen.host, chosen.out)
                case _:
                    host.uninstall(machine, purge=chosen.purge)
    except Failed as failed:
        print(failed, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return os.EX_OK


def _install(machine: Machine, chosen: argparse.Namespace) -> None:
    wanted = _wanted(options.remembered(), chosen)
    wanted.check()
    if (chosen.tls_certificate is None) != (chosen.tls_key is None):
        raise Failed("--tls-certificate and --tls-key are given both or not at all.")
    host.install(
        machine,
        wanted,
        Secrets(
            os.environ.get("DATABASE_URL", ""),
            os.environ.get("REDIS_URL", ""),
            os.environ.get("TIDEGATE_TELEMETRY_URL", ""),
            {role: os.environ.get(f"{prefix}JOIN_TOKEN", "") for role, prefix in PREFIXES.items()},
        ),
        _source(wanted, chosen),
        (chosen.tls_certificate, chosen.tls_key) if chosen.tls_key else None,
        chosen.tls_authority,
        start=not chosen.no_start,
        wait_for_migrations=chosen.wait_for_migrations,
    )


def _wanted(before: Wanted, chosen: argparse.Namespace) -> Wanted:
    """What was asked for now, and what was asked for earlier where nothing is said."""
    names = ("host", "https_port", "workers", "console_url", "name", "boxes", "local_servers")
    said: dict[str, Any] = {
        name: value for name in names if (value := getattr(chosen, name)) is not None
    }
    for name in ("drivers", "tier2"):
        if value := getattr(chosen, name):
            said[name] = tuple(value)
    if chosen.roles:
        try:
            said["roles"] = tuple(role.name for role in roles.chosen(chosen.roles))
        except ValueError as error:
            raise Failed(str(error)) from None
        if "driver" not in said["roles"]:
            said.setdefault("drivers", ())
    return replace(before, **said)


def _source(wanted: Wanted, chosen: argparse.Namespace) -> releases.Source:
    if chosen.wheel is None:
        in_use = releases.current()
        if in_use is None:
            raise Failed("Say with --wheel what to install; `make wheel` builds it.")
        return releases.kept(in_use, wanted.extras, chosen.wheelhouse)
    for path in (chosen.wheel, chosen.lock):
        if not path.is_file():
            raise Failed(f"There is no {path}.")
    return releases.Source(chosen.wheel, chosen.lock, wanted.extras, chosen.wheelhouse)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="tidegate-host",
        description="Run Tidegate on this Debian machine, without Kubernetes: users, directories, TLS, "
        "settings and units of systemd. Each verb can be run again; it then does what is missing.",
    )
    verbs = made.add_subparsers(dest="verb", required=True, metavar="VERB")
    _install_parser(verbs)
    rollback = verbs.add_parser("rollback", help="use the release before, and start everything with it")
    rollback.add_argument("--wheelhouse", **WHEELHOUSE)
    certificate = verbs.add_parser(
        "certificate",
        help="issue a certificate for another machine, on the one with the authority's key",
    )
    certificate.add_argument(
        "--host", metavar="NAME", required=True, help="how others call that machine"
    )
    certificate.add_argument(
        *("--out",),
        metavar="DIR",
        type=Path,
        default=Path(),
        help="where to write NAME.pem and NAME.key (default: here)",
    )
    uninstall = verbs.add_parser("uninstall", help="remove what was installed; data and settings stay")
    uninstall.add_argument(
        "--purge", action="store_true", help="remove data, settings, users and the own database as well"
    )
    verbs.add_parser("status", help="show the release and the units; exit code 3 if one does not run")
    for one in (rollback, certificate, uninstall):
        one.add_argument("--dry-run", action="store_true", help="print what would be done")
    return made


def _install_parser(verbs: Any) -> None:
    rows = "\n".join(f"  {role.name:14}{role.purpose}" for role in roles.ROLES.values())
    made = verbs.add_parser(
        "install",
        help="install, upgrade, or change the roles of this machine",
        description="Make this machine what the options say. What is left out stays as it was.",
        epilog=EPILOG.format(roles=rows, console=", ".join(roles.SETS["console"])),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--roles", metavar="ROLE,…", help="what this machine is; see below")
    add("--wheel", metavar="FILE", type=Path, help="the release (default: the one in use)")
    add(
        "--lock",
        metavar="FILE",
        type=Path,
        default=LOCK,
        help="packages, with their hashes (default: %(default)s)",
    )
    add("--wheelhouse", **WHEELHOUSE)
    add("--host", metavar="NAME", help="how other machines call this one (default: its full name)")
    add("--https-port", metavar="PORT", type=int, help="port of the console (default: 443)")
    add("--workers", metavar="N", type=int, help="workers on this machine (default: 1)")
    add(
        *("--local-servers",),
        action=argparse.BooleanOptionalAction,
        default=None,
        help="PostgreSQL and Redis of Debian on this machine, for one console machine",
    )
    add("--console", metavar="URL", dest="console_url", help="the console that this machine joins")
    add("--name", help="name of the agent and the brain in the fleet (default: the host name)")
    add("--driver", metavar="NAME", dest="drivers", action="append", help="a driver; may be repeated")
    add("--boxes", metavar="NAME,…|@FILE", help="boxes of the Cluster Server")
    add(
        "--tier2",
        metavar="DIR",
        action="append",
        help="a directory that the agent may write; may be repeated",
    )
    add("--tls-certificate", metavar="FILE", type=Path, help="PEM, instead of a local authority")
    add("--tls-key", metavar="FILE", type=Path, help="PEM, of the certificate")
    add("--tls-authority", metavar="FILE", type=Path, help="PEM: whom to believe")
    add("--wait-for-migrations", action="store_true", help="let another machine migrate the database")
    add("--no-start", action="store_true", help="start nothing")
    add("--dry-run", action="store_true", help="print what would be done, and change nothing")
