"""Who this machine is, over TLS: files that were given, or a local authority with certificates of it.

The local authority is for a machine, or for a few, that nobody else gives certificates to. Its key stays
here, readable by root only; other machines get `authority.pem` and believe it.
"""

from __future__ import annotations

import ipaddress
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from tidegate_host.machine import Failed, Machine, ask

TLS: Final = Path("/etc/tidegate/tls")
AUTHORITY: Final = TLS / "authority.pem"
AUTHORITY_KEY: Final = TLS / "authority.key"
HOST: Final = TLS / "host.pem"
HOST_KEY: Final = TLS / "host.key"
CONSOLE: Final = TLS / "console.pem"  # what the console shows the Cluster Server
CONSOLE_KEY: Final = TLS / "console.key"
BRAIN: Final = TLS / "brain.pem"
CLUSTER: Final = TLS / "cluster.pem"  # whose key engines can read: they run as the same user
SHOWN: Final = {"web": HOST, "brain": BRAIN, "cluster": CLUSTER}  # by role, to who connects to it
AUTHORITY_DAYS: Final = 3650
DAYS: Final = 397
RENEW_SECONDS: Final = 60 * 24 * 3600  # so long before its end, a certificate is made anew
_OWN_AUTHORITY: Final = (
    f"This machine has an authority of its own: remove {AUTHORITY_KEY} to give it up."
)
HOST_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:-]*")
LOOPBACK: Final = "IP:127.0.0.1"
CURVE: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def key_of(certificate: Path) -> Path:
    return certificate.with_suffix(".key")


def given(
    machine: Machine, shown: Iterable[Path], certificate: Path, key: Path, authority: Path | None
) -> None:
    """Take files of somebody else's authority. Raises Failed."""
    if AUTHORITY_KEY.is_file():
        raise Failed(_OWN_AUTHORITY)
    machine.directory(TLS, 0o755)
    public = ask("openssl", "x509", "-in", str(certificate), "-noout", "-pubkey")
    if ask("openssl", "pkey", "-in", str(key), "-pubout") != public:
        raise Failed(f"{key} is not the key of {certificate}.")
    for one in shown:
        machine.file(one, certificate.read_text(), 0o644)
        machine.file(key_of(one), key.read_text(), 0o600)
    if authority:
        believe(machine, authority)


def believe(machine: Machine, authority: Path) -> None:
    """Take the authority of another machine, or of one's own house."""
    machine.directory(TLS, 0o755)
    ask("openssl", "x509", "-in", str(authority), "-noout")
    if AUTHORITY_KEY.is_file() and AUTHORITY.read_text() != authority.read_text():
        raise Failed(_OWN_AUTHORITY)
    machine.file(AUTHORITY, authority.read_text(), 0o644)


def local(
    machine: Machine, host: str, shown: Iterable[Path], *, is_cluster_here: bool, for_console: bool
) -> None:
    """Make the authority if there is none, and certificates where they are missing, of another name, or
    near their end. `is_cluster_here`: only this machine's console connects to its Cluster Server."""
    machine.directory(TLS, 0o755)
    if not AUTHORITY_KEY.is_file():
        machine.tell(f"make a local authority, {AUTHORITY}")
        extensions = (
            "basicConstraints=critical,CA:TRUE,pathlen:0",
            "keyUsage=critical,keyCertSign,cRLSign",
        )
        command = ["openssl", "req", "-x509", *CURVE, "-days", str(AUTHORITY_DAYS)]
        command += ["-subj", f"/CN=Tidegate authority of {host}"[:70], "-keyout", str(AUTHORITY_KEY)]
        command += ["-out", str(AUTHORITY), *(f"-addext={one}" for one in extensions)]
        _private(machine, *command)
        _mode(machine, AUTHORITY, 0o644)
    names = (_name(host), "DNS:localhost", LOOPBACK, "IP:::1")
    for one in shown:
        # No name of anything else: with this key an engine is no console and no Redis.
        is_apart = one == CLUSTER and is_cluster_here
        _issue(machine, one, host, (LOOPBACK,) if is_apart else names, "serverAuth")
    if for_console:
        _issue(machine, CONSOLE, "console", (f"URI:tidegate://console/{host}",), "clientAuth")


def for_another(machine: Machine, host: str, folder: Path) -> Path:
    """Issue a certificate for another machine, into `host.pem` and `host.key` by its name. Returns it.
    Raises Failed where there is no authority."""
    if not AUTHORITY_KEY.is_file():
        raise Failed(f"There is no {AUTHORITY_KEY} here: run this on the first machine, which has it.")
    if not HOST_NAME.fullmatch(host):
        raise Failed(f"“{host}” is no name of a machine.")
    if not folder.is_dir():
        raise Failed(f"There is no directory {folder}.")
    certificate = folder.absolute() / f"{host}.pem"
    _issue(machine, certificate, host, (_name(host),), "serverAuth")
    return certificate


def _issue(machine: Machine, certificate: Path, common: str, names: Sequence[str], usage: str) -> None:
    key = key_of(certificate)
    if _is_good(certificate, key, names):
        return
    machine.tell(f"issue {certificate} for {', '.join(names)}")
    if machine.dry_run:
        return
    with tempfile.TemporaryDirectory(dir=certificate.parent, prefix=".new-") as folder:
        request, made, made_key = (Path(folder) / name for name in ("request", "pem", "key"))
        extensions = Path(folder) / "extensions"
        extensions.write_text(
            f"subjectAltName={','.join(names)}\nbasicConstraints=critical,CA:FALSE\n"
            f"keyUsage=critical,digitalSignature\nextendedKeyUsage={usage}\n"
        )
        subject = ("-subj", f"/CN={common}"[:68])
        _private(
            machine, "openssl", "req", *CURVE, *subject, "-keyout", str(made_key), "-out", str(request)
        )
        machine.run(
            *("openssl", "x509", "-req", "-in", str(request), "-days", str(DAYS), "-out", str(made)),
            *("-CA", str(AUTHORITY), "-CAkey", str(AUTHORITY_KEY), "-extfile", str(extensions)),
        )
        made_key.chmod(0o600)
        made.chmod(0o644)
        made_key.replace(key)
        made.replace(certificate)


def _is_good(certificate: Path, key: Path, names: Sequence[str]) -> bool:
    if not certificate.is_file() or not key.is_file():
        return False
    said = ask("openssl", "x509", "-in", str(certificate), "-noout", "-ext", "subjectAltName")
    found = {_normal(one) for one in said.partition("\n")[2].split(",")}
    try:
        ask("openssl", "x509", "-in", str(certificate), "-noout", "-checkend", str(RENEW_SECONDS))
        ask("openssl", "verify", "-CAfile", str(AUTHORITY), str(certificate))
        matches = ask("openssl", "pkey", "-in", str(key), "-pubout") == ask(
            "openssl", "x509", "-in", str(certificate), "-noout", "-pubkey"
        )
    except Failed:
        return False
    return matches and found == {_normal(one) for one in names}


def _normal(name: str) -> str:
    """`IP Address:FD00:0:0:0:0:0:0:1` and `IP:fd00::1` are one name."""
    kind, _, value = name.strip().partition(":")
    if kind in ("IP", "IP Address"):
        return f"IP:{ipaddress.ip_address(value)}"
    return f"{kind}:{value}"


def _name(host: str) -> str:
    return f"{'IP' if _is_address(host) else 'DNS'}:{host}"


def _is_address(host: str) -> bool:
    return ":" in host or host.replace(".", "").isdigit()


def _private(machine: Machine, *command: str) -> None:
    """openssl writes keys for their owner only."""
    machine.run(*command)


def _mode(machine: Machine, path: Path, mode: int) -> None:
    if not machine.dry_run:
        path.chmod(mode)
