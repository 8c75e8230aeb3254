"""The settings of a Cluster Server: flags, or environment variables with the same names."""

from __future__ import annotations

import argparse
import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import jwt

from cluster_server.access import AUDIENCE, JwtSettings
from cluster_server.checks import Wrong, check_name, is_object_name
from cluster_server.kubernetes.options import KubernetesOptions, LeaseTimes
from cluster_server.processes.backend import COMMAND
from cluster_server.server import Place, ServerSettings, TlsFiles
from kvss_agent.process.options import Options, name, path, place
from kvss_agent.process.settings import is_loopback
from telemetry.decoder import Limits, Malformed, decode
from telemetry.script import program
from telemetry.units import DURATION_FORMS, parse_duration

PREFIX: Final = "CLUSTER_SERVER_"
STATE: Final = ".cluster"
SOCKET: Final = "cluster.sock"
SOCKET_PATH_BYTES_MAX: Final = 107
SPARES_MAX: Final = 64
BOXES_MAX: Final = 100_000
WATCHERS: Final = 64
ALGORITHMS: Final = ("EdDSA", "ES256", "HS256", "PS256", "RS256")
SECRET_BYTES_MIN: Final = 32
PROCESSES, KUBERNETES = "processes", "kubernetes"
BACKENDS: Final = {PROCESSES: PROCESSES, KUBERNETES: KUBERNETES}
TEMPLATE_BYTES_MAX: Final = 1 << 20
IMAGE: Final = "tidegate"
OF_KUBERNETES: Final = (
    "namespace",
    "kubeconfig",
    "image",
    "runner",
    "pod_template",
    "own_folder",
    "lease_time",
)
OWN_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    name: str
    state: Path
    server: ServerSettings
    boxes: tuple[str, ...] = ()
    command: tuple[str, ...] = COMMAND
    cgroups: Path | None = None  # the group to make groups in
    has_cgroups: bool = True
    jobs_at_once: int = 4
    jobs_kept: int = 200
    spares: int = 1
    silent_seconds: float = 60.0
    ends_instances: bool = False
    end_seconds: float = 30.0
    kubernetes: KubernetesOptions | None = None  # else the backend `processes`
    log_format: str = field(default="text")


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Flags and environment. Raises WrongSettings with all that is wrong at once."""
    given = Options(_parser(), PREFIX, arguments, environment)
    take = given.take

    backend = take("backend", PROCESSES, BACKENDS.__getitem__, " or ".join(BACKENDS))
    state = take("state", Path(STATE), path, "a path").absolute()
    by_default: tuple[Place, ...] = (Place(unix=state / SOCKET),)
    places = take("listen", by_default, _places, "unix:PATH or HOST:PORT, or several")
    no_boxes: tuple[str, ...] = ()
    boxes = take("boxes", no_boxes, _boxes, "names with commas, or @FILE with a name in each line")
    told_command = take("command", None, _command, "a command line")
    command = told_command or COMMAND
    cgroups = take("cgroups", "auto", _cgroups, "auto, none or the path of a control group")
    settings = Settings(
        name=take("name", socket.gethostname(), name, "1 to 200 letters, digits and . _ -"),
        state=state,
        server=ServerSettings(
            places,
            _tls(given),
            _tokens(given),
            given.count("watchers", WATCHERS, 10_000),
            given.count("log_readers", WATCHERS, 10_000),
        ),
        boxes=boxes,
        command=command,
        cgroups=Path(cgroups) if cgroups not in ("auto", "none") else None,
        has_cgroups=cgroups != "none",
        jobs_at_once=given.count("jobs_at_once", 4, 1000),
        jobs_kept=given.count("jobs_kept", 200, 100_000),
        # Another command may prepare something for its folder before it is a manager.
        spares=given.count("spares", int(command == COMMAND), SPARES_MAX, low=0),
        silent_seconds=take("silent_time", 60.0, _seconds, f"from 45s, such as {DURATION_FORMS}"),
        ends_instances=given.is_yes("end_instances"),
        end_seconds=take("end_time", 30.0, parse_duration, f"a time such as {DURATION_FORMS}"),
        log_format=given.log_format(),
    )
    if backend == PROCESSES:
        _refuse_kubernetes(given)
    else:
        settings = replace(settings, kubernetes=_kubernetes(given, settings, told_command))
    is_plain_allowed = given.is_yes("plain_listen")
    given.problems += _contradictions(settings, is_plain_allowed=is_plain_allowed)
    given.check()
    return settings


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=program("cluster_server"),
        description="Run the instances and jobs that an orchestrator asks for, as processes of this "
        "machine. They outlive this server, and the next one adopts them.",
        epilog=f"Every option may be set in the environment instead: {PREFIX}STATE for --state. A flag "
        "wins over the environment. Guide: docs/cluster-server.md.",
    )
    add = made.add_argument
    add("--name", help="name of this machine in answers (default: the host name)")
    add("--backend", metavar="|".join(BACKENDS), help="where instances run (default: processes)")
    add("--state", metavar="DIR", help=f"directory of all state (default: {STATE})")
    add(
        "--listen",
        metavar="PLACE,…",
        help=f"unix:PATH, for this user only, or HOST:PORT (default: unix:{SOCKET} in --state)",
    )
    add("--tls-certificate", metavar="FILE", help="PEM: with it HOST:PORT is TLS; read again if renewed")
    add("--tls-key", metavar="FILE", help="PEM: the key of --tls-certificate")
    add(
        "--tls-authorities",
        metavar="FILE",
        help="PEM: the console's authorities; a client then shows a certificate of theirs",
    )
    add(
        "--tls-console",
        metavar="NAME",
        help="the host name in the console's certificate, where --tls-authorities are not a console's",
    )
    add("--jwt-key", metavar="FILE", help="a public key (PEM) or a secret: bearer JWTs are let in")
    add("--jwt-algorithm", help=f"{', '.join(ALGORITHMS)} (default: EdDSA)")
    add("--jwt-issuer", help="the issuer that a JWT has to name")
    add("--jwt-audience", help=f"the audience that a JWT has to name (default: {AUDIENCE})")
    add("--plain-listen", help="yes: HOST:PORT without TLS beyond loopback (default: no)")
    add("--boxes", metavar="NAME,…|@FILE", help="the boxes that can be locked (default: none)")
    add(
        "--command",
        help="command line of a manager, to which `run --folder F` is added, or the kind of a job "
        "(default: python -m workload_manager)",
    )
    add(
        "--cgroups",
        metavar="auto|none|DIR",
        help="control groups of instances: where this server is, none, or in DIR (default: auto)",
    )
    add("--jobs-at-once", metavar="N", help="jobs that run; others wait (default: 4)")
    add("--jobs-kept", metavar="N", help="jobs that are remembered after their end (default: 200)")
    add(
        "--spares",
        metavar="N",
        help="managers that are started before they are needed, with some 40 MB each (default: 1, with "
        "--command 0, since that has to know `spare`)",
    )
    add("--watchers", metavar="N", help=f"clients that watch, at once (default: {WATCHERS})")
    add("--log-readers", metavar="N", help=f"clients that read logs, at once (default: {WATCHERS})")
    add(
        "--silent-time",
        metavar="TIME",
        help="a manager that does not answer for so long is killed and started again (default: 60s)",
    )
    add(
        "--end-instances",
        nargs="?",
        const="yes",
        metavar="yes|no",
        help="SIGTERM also ends instances and jobs; the next server starts them again (default: no)",
    )
    add("--end-time", metavar="TIME", help="how long they have then (default: 30s)")
    add(
        "--kubeconfig",
        metavar="FILE",
        help="of Kubernetes (default: the service account of its own pod)",
    )
    add("--namespace", help="of Kubernetes, for all workloads (default: that of its own pod)")
    add("--image", help="the image of managers and jobs in Kubernetes")
    add("--runner", help="command line that begins there (default: python -m cluster_server.pod)")
    add("--pod-template", metavar="FILE", help="JSON: what else the specification of a pod there has")
    add(
        "--own-folder",
        metavar="yes|no",
        help="an init container, as root, chowns /var/lib/tidegate of the node to the pod's user "
        "(default: yes)",
    )
    add(
        "--lease-time",
        metavar="TIME",
        help="after so long without a word of the server that leads, another one does (default: 15s)",
    )
    add("--log-format", help="text or json (default: text)")
    return made


def _refuse_kubernetes(given: Options) -> None:
    named = [name for name in OF_KUBERNETES if given.take(name, "", str, "")]
    given.problems += [
        f"--{name.replace('_', '-')} is of the backend kubernetes, which is not chosen."
        for name in named
    ]


def _kubernetes(given: Options, settings: Settings, command: Sequence[str] | None) -> KubernetesOptions:
    take = given.take
    return KubernetesOptions(
        lease=LeaseTimes.of(take("lease_time", 15.0, _lease_seconds, f"from 1s, as {DURATION_FORMS}")),
        namespace=take("namespace", _own_namespace(), _namespace, "the name of a namespace"),
        kubeconfig=given.readable("kubeconfig"),
        image=take("image", IMAGE, str, "the name of an image"),
        command=command or KubernetesOptions.command,
        runner=take("runner", KubernetesOptions.runner, _command, "a command line"),
        template=take("pod_template", {}, _template, "a file with the specification of a pod, in JSON"),
        owns_folder=given.is_yes("own_folder", default=True),
        jobs_at_once=settings.jobs_at_once,
        jobs_kept=settings.jobs_kept,
        silent_seconds=settings.silent_seconds,
    )


def _lease_seconds(text: str) -> float:
    return parse_duration(text, low=1)


def _own_namespace() -> str:
    """That of the pod that this process runs in."""
    try:
        return OWN_NAMESPACE.read_text().strip()
    except OSError:
        return "default"


def _namespace(text: str) -> str:
    try:
        check_name("namespace", text)
    except Wrong as error:
        raise ValueError(text) from error
    return text


def _template(text: str) -> dict[str, object]:
    """Raises ValueError, also for a file that cannot be read."""
    try:
        return decode(Path(text).read_bytes(), dict[str, object], Limits(TEMPLATE_BYTES_MAX))
    except (OSError, Malformed) as error:
        raise ValueError(text) from error


def _places(text: str) -> tuple[Place, ...]:
    return tuple(_place(one.strip()) for one in text.split(","))


def _place(text: str) -> Place:
    scheme, colon, rest = text.partition(":")
    if colon and scheme == "unix":
        if not rest:
            raise ValueError(text)
        return Place(unix=Path(rest.removeprefix("//")).absolute())
    host, port = place(text)
    return Place(host=host, port=port)


def _boxes(text: str) -> tuple[str, ...]:
    """Raises ValueError, also for a file that cannot be read."""
    if text.startswith("@"):
        try:
            lines = Path(text[1:]).read_text().splitlines()
        except OSError as error:
            raise ValueError(text) from error
        names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    else:
        names = [one.strip() for one in text.split(",")]
    if len(names) > BOXES_MAX or len(set(names)) != len(names) or not all(map(is_object_name, names)):
        raise ValueError(text)
    return tuple(names)


def _cgroups(text: str) -> str:
    if text not in ("auto", "none") and not Path(text).is_dir():
        raise ValueError(text)
    return text


def _command(text: str) -> tuple[str, ...]:
    words = tuple(shlex.split(text))
    if not words:
        raise ValueError(text)
    return words


def _seconds(text: str) -> float:
    # A manager without news answers after thirty seconds.
    return parse_duration(text, low=45)


def _tls(given: Options) -> TlsFiles | None:
    certificate, key = given.pair("tls_certificate", "tls_key")
    authorities = given.readable("tls_authorities")
    if authorities and not certificate:
        given.problems.append("--tls-authorities needs --tls-certificate.")
    console_name = given.take("tls_console", "", name, "a host name")
    if console_name and not authorities:
        given.problems.append("--tls-console needs --tls-authorities.")
    return TlsFiles(certificate, key, authorities, console_name) if certificate and key else None


def _tokens(given: Options) -> JwtSettings | None:
    key = given.readable("jwt_key")
    algorithm = given.take("jwt_algorithm", "EdDSA", str, "an algorithm")
    issuer = given.take("jwt_issuer", "", str, "a name")
    audience = given.take("jwt_audience", AUDIENCE, str, "a name")
    if key is None:
        return None
    if algorithm not in ALGORITHMS:
        given.problems.append(f"--jwt-algorithm is {algorithm!r}: one of {', '.join(ALGORITHMS)}.")
        return None
    if not issuer:
        given.problems.append("--jwt-key needs --jwt-issuer: who signs the tokens.")
    try:
        text = key.read_text().strip()
        jwt.get_algorithm_by_name(algorithm).prepare_key(text)
    except (ValueError, TypeError, jwt.InvalidKeyError) as error:
        given.problems.append(f"--jwt-key holds no key for {algorithm}: {error}.")
        return None
    if algorithm == "HS256" and len(text.encode()) < SECRET_BYTES_MIN:
        given.problems.append(f"The secret in --jwt-key should have {SECRET_BYTES_MIN} bytes or more.")
    return JwtSettings(text, algorithm, issuer, audience)


def _contradictions(settings: Settings, *, is_plain_allowed: bool) -> list[str]:
    problems = []
    server = settings.server
    for one in server.places:
        if one.unix:
            if len(os.fsencode(one.unix)) > SOCKET_PATH_BYTES_MAX:
                problems.append(
                    f"--listen has unix:{one.unix}: the path of a socket has at most "
                    f"{SOCKET_PATH_BYTES_MAX} bytes."
                )
            continue
        if not (server.tokens or (server.tls and server.tls.authorities)):
            problems.append(
                f"--listen has {one}, where nobody would be let in: give it --tls-authorities or "
                "--jwt-key."
            )
        if server.tls is None and not is_plain_allowed and not is_loopback(one.host):
            problems.append(
                f"--listen has {one}, which others can reach: tokens and secrets could be read on the "
                "way. Give it a certificate, or take --plain-listen yes where nobody else listens."
            )
    return problems
