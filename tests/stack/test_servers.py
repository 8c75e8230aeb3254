"""The embedded servers, for real: wherever they lie, whoever starts them, whatever happened before."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
import redis

from console.environment import PROJECT
from console.stack import binaries, lock, postgres
from console.stack import redis as stack_redis
from console.stack.endpoint import TcpEndpoint, UnixEndpoint
from console.stack.errors import StackError
from console.stack.privileges import Identity, launcher
from tests.embedded import Embedded, embedded_servers, running
from tests.live import wait_until
from tests.stack.sessions import is_running

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("servers")]

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has to lend PostgreSQL away")


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path that only we can enter, as mkdtemp makes them."""
    with tempfile.TemporaryDirectory(prefix="tidegate-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def never_started() -> Iterator[Path]:
    """PostgreSQL's data as a first start makes it."""
    with tempfile.TemporaryDirectory(prefix="tidegate-") as name:
        postgres.prepare(Path(name) / "postgres", durable=False)
        yield Path(name)


@pytest.fixture
def prepared(never_started: Path, directory: Path) -> Path:
    """A directory with such data, for a test of what comes after a first start."""
    subprocess.run(["/bin/cp", "-a", f"{never_started}/.", directory], check=True)  # owners as well
    return directory


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Path, Embedded]]:
    """One that runs, and where its files are: for tests that only ask it."""
    with (
        tempfile.TemporaryDirectory(prefix="tidegate-") as name,
        embedded_servers(Path(name)) as servers,
    ):
        yield Path(name), servers


def works(servers: Embedded) -> None:
    """Both take what is written and give it back."""
    with psycopg.connect(servers.database_url) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS kept (what text)")
        connection.execute("INSERT INTO kept VALUES ('a row')")
    client = redis.Redis.from_url(servers.redis_url)
    client.set("kept", "a value")
    assert client.get("kept") == b"a value"
    client.close()


def kept(servers: Embedded) -> tuple[int, bytes | None]:
    with psycopg.connect(servers.database_url) as connection:
        row = connection.execute("SELECT count(*) FROM kept").fetchone()
    client = redis.Redis.from_url(servers.redis_url)
    value = client.get("kept")
    client.close()
    assert row
    assert value is None or isinstance(value, bytes)
    return int(row[0]), value


def pid_of_postgres(servers: Embedded) -> int:
    return int(servers.postgres.pid_file.read_text().split("\n")[0])


def pid_of_redis(servers: Embedded) -> int:
    return int((servers.redis.home / "redis.pid").read_text())


def test_what_was_stored_is_there_again_the_next_time(prepared: Path) -> None:
    with embedded_servers(prepared, durable=True) as servers:
        works(servers)
    with embedded_servers(prepared, durable=True) as servers:
        assert kept(servers) == (1, b"a value")


def test_nothing_is_left_after_the_end(prepared: Path) -> None:
    with embedded_servers(prepared) as servers:
        pids = [pid_of_postgres(servers), pid_of_redis(servers)]
        assert all(is_running(pid) for pid in pids)
    assert not any(is_running(pid) for pid in pids)
    assert not [path for path in prepared.rglob("*") if path.is_socket()]


def test_the_text_of_other_languages_has_upper_case_and_an_order(pair: tuple[Path, Embedded]) -> None:
    _, servers = pair
    with psycopg.connect(servers.database_url) as connection:
        row = connection.execute(
            "SELECT upper('äé'), 'Z' < 'a', current_setting('server_encoding'), "
            "current_setting('data_checksums')"
        ).fetchone()
    assert row == ("ÄÉ", True, "UTF8", "on")


def test_nobody_gets_in_without_the_password(pair: tuple[Path, Embedded]) -> None:
    directory, servers = pair
    wrong = servers.database_url.replace(servers.postgres.password, "guessed")
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(wrong)
    client = redis.Redis.from_url(servers.redis_url.replace(servers.redis.password, "guessed"))
    with pytest.raises(redis.AuthenticationError):
        client.ping()
    client.close()
    for pid in (pid_of_postgres(servers), pid_of_redis(servers)):
        told = " ".join(psutil.Process(pid).cmdline())
        assert servers.postgres.password not in told
        assert servers.redis.password not in told
    for path in directory.rglob("*password*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("status", ["starting", "stopping"])
def test_a_server_that_says_it_refuses_is_not_asked(pair: tuple[Path, Embedded], status: str) -> None:
    """Each question would be a FATAL in its log, and it is asked often after a crash."""
    server = pair[1].postgres
    as_it_is = server.pid_file.read_text()
    assert server.answers()
    try:
        server.pid_file.write_text(as_it_is.replace("ready   ", status))
        assert not server.answers()
    finally:
        server.pid_file.write_text(as_it_is)
    assert server.answers()


def test_a_server_is_ready_whatever_its_directory_is_called(pair: tuple[Path, Embedded]) -> None:
    server = pair[1].postgres
    as_it_is = server.pid_file.read_text()
    try:
        server.pid_file.write_text(as_it_is.replace(str(server.data), "/a directory\u2028of two lines"))
        assert server.answers()
    finally:
        server.pid_file.write_text(as_it_is)


def test_pairs_beside_each_other_do_not_meet(pair: tuple[Path, Embedded], prepared: Path) -> None:
    works(pair[1])
    with embedded_servers(prepared) as other:
        with psycopg.connect(other.database_url) as connection:
            row = connection.execute("SELECT to_regclass('kept')").fetchone()
            assert row == (None,)
        client = redis.Redis.from_url(other.redis_url)
        assert client.get("kept") is None
        client.close()


def test_a_second_pair_over_the_same_files_is_refused(pair: tuple[Path, Embedded]) -> None:
    directory, servers = pair
    with pytest.raises(lock.HeldError), embedded_servers(directory):
        pass
    works(servers)


@pytest.mark.parametrize("name", ["a b, \"c' {d} %20 ü", "n" * 120], ids=["strange", "long"])
def test_any_path_will_do(directory: Path, name: str) -> None:
    with embedded_servers(directory / name) as servers:
        works(servers)
        assert isinstance(servers.postgres.endpoint, TcpEndpoint)
        assert isinstance(servers.redis.endpoint, TcpEndpoint)


@pytest.mark.parametrize("name", ["short", "n" * 120])
def test_what_a_shell_sets_for_other_servers_does_not_lead_astray(
    directory: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in {"PGPORT": "1", "PGHOST": "elsewhere", "PGSSLMODE": "require"}.items():
        monkeypatch.setenv(variable, value)
    with embedded_servers(directory / name) as servers:
        works(servers)


def test_a_path_with_blanks_and_quotes_has_a_socket(directory: Path) -> None:
    with embedded_servers(directory / "a b \"c' %20 ü") as servers:
        works(servers)
        assert isinstance(servers.postgres.endpoint, UnixEndpoint)
        assert isinstance(servers.redis.endpoint, UnixEndpoint)


@pytest.mark.parametrize("orphaned", [False, True], ids=["dead", "still running"])
def test_a_kill_costs_nothing(prepared: Path, *, orphaned: bool) -> None:
    """Whether the servers were killed, or whoever started them and they ran on: the data is there."""
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from console.stack import privileges\n"
        "privileges._has_pdeathsig = lambda: False\n"  # as on a system that has no such thing
        "from tests.embedded import embedded_servers\n"
        "with embedded_servers(Path(sys.argv[1]), durable=True) as servers:\n"
        "    print(servers.database_url, servers.redis_url, flush=True)\n"
        "    time.sleep(600)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(prepared)], stdout=subprocess.PIPE, text=True, cwd=PROJECT
    )
    assert owner.stdout
    database_url, redis_url = owner.stdout.readline().split()
    with psycopg.connect(database_url) as connection:
        connection.execute("CREATE TABLE kept (what text)")
        connection.execute("INSERT INTO kept VALUES ('a row')")
    client = redis.Redis.from_url(redis_url)
    client.set("kept", "a value")
    client.close()
    first = [
        int((prepared / path).read_text().split("\n")[0])
        for path in ("postgres/data/postmaster.pid", "redis/redis.pid")
    ]
    owner.kill()
    owner.wait()
    owner.stdout.close()
    if not orphaned:
        for pid in first:
            os.kill(pid, signal.SIGKILL)
    assert orphaned is all(is_running(pid) for pid in first) or not orphaned
    with embedded_servers(prepared, durable=True) as servers:
        assert not any(is_running(pid) for pid in first)
        assert kept(servers) == (1, b"a value")


def test_a_pid_file_that_names_a_stranger_harms_nobody(prepared: Path) -> None:
    with embedded_servers(prepared) as servers:
        works(servers)
    (servers.redis.home / "redis.pid").write_text(f"{os.getpid()}\n")
    pid_file = servers.postgres.pid_file
    pid_file.write_text(f"{os.getpid()}\n{servers.postgres.data}\n")
    with embedded_servers(prepared) as servers:
        assert kept(servers)[0] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_what_makes_the_data_ends_with_the_start(directory: Path, number: signal.Signals) -> None:
    """It went on in the directory in which the next start makes the data."""
    made: list[psutil.Process] = []

    def is_made() -> bool:
        inside = psutil.Process(starting.pid).children(recursive=True)
        made[:] = [each for each in inside if each.name() == "initdb"]
        return bool(made)

    starting = subprocess.Popen(
        [sys.executable, "-m", "console.stack", "up"],
        cwd=PROJECT,
        env={"PATH": os.environ["PATH"], "TIDEGATE_STATE_DIR": str(directory / "state")},
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_until("initdb runs", is_made, 60)
        made[0].suspend()  # or it may come to its own end first
        starting.send_signal(number)
        assert starting.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
        wait_until("it has ended", lambda: not any(is_running(each.pid) for each in made))
        if number != signal.SIGKILL:
            assert not (directory / "state" / "postgres" / "password").exists()
    finally:
        starting.kill()
        starting.wait()
        for each in made:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def test_half_made_data_is_made_anew(directory: Path) -> None:
    draft = directory / "postgres" / "data.new"
    draft.mkdir(parents=True)
    (draft / "PG_VERSION").write_text("15\n")
    with embedded_servers(directory) as servers:
        works(servers)


def test_data_of_another_version_is_refused_in_a_sentence(prepared: Path) -> None:
    home = prepared / "postgres"
    postgres.prepare(home, durable=False)
    (home / "data" / "PG_VERSION").write_text("9\n")
    with pytest.raises(StackError, match="The data is of PostgreSQL 9, but only"):
        postgres.prepare(home)
    stack_redis.prepare(prepared / "redis")
    (prepared / "redis" / "made-by").write_text("99\n")
    with pytest.raises(StackError, match="The data is of Redis 99, but only"):
        stack_redis.prepare(prepared / "redis")


def test_the_servers_of_the_wheels_will_do(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "system_postgres", lambda: iter(()))
    monkeypatch.setattr(binaries, "system_redis", lambda: iter(()))
    with embedded_servers(directory) as servers:
        works(servers)
        assert "site-packages" in str(servers.postgres.installation.directory)
        assert "site-packages" in str(servers.redis.installation.path)
        with psycopg.connect(servers.database_url) as connection:
            row = connection.execute("SELECT upper('äé'), 'Z' < 'a'").fetchone()
        assert row == ("ÄÉ", True)


def test_a_server_that_cannot_start_says_why(prepared: Path) -> None:
    server = postgres.prepare(prepared / "postgres", durable=False)
    (server.data / "postgresql.conf").write_text("no_such_setting = 1\n")
    with (
        pytest.raises(StackError, match="no_such_setting"),
        running(server, prepared / "postgres.log"),
    ):
        pass


@as_root
def test_root_lends_postgresql_away_and_opens_no_directory(directory: Path) -> None:
    closed = directory / "closed"
    closed.mkdir(mode=0o700)
    before = {path: path.stat().st_mode for path in (*closed.parents, closed)}
    with embedded_servers(closed / "state") as servers:
        works(servers)
        identity = servers.postgres.identity
        assert identity
        assert identity.capability, "this directory cannot be walked through without"
        process = psutil.Process(pid_of_postgres(servers))
        assert process.uids().effective == identity.uid != 0
        status = Path(f"/proc/{process.pid}/status").read_text()
        capabilities = int(status.split("CapEff:")[1].split()[0], 16)
        assert capabilities.bit_count() == 1, "the one that looks paths up, and no other"
    assert {path: path.stat().st_mode for path in before} == before


@as_root
def test_root_needs_no_capability_where_everybody_can_walk(directory: Path) -> None:
    directory.chmod(0o755)
    with embedded_servers(directory / "state") as servers:
        assert servers.postgres.identity
        assert servers.postgres.identity.capability is None
        works(servers)


STARTS_THEM = (
    "import sys\n"
    "from pathlib import Path\n"
    "from tests.embedded import embedded_servers\n"
    "from console.stack.errors import StackError\n"
    "try:\n"
    "    with embedded_servers(Path(sys.argv[1])) as servers:\n"
    "        print(servers.postgres.identity and servers.postgres.identity.capability)\n"
    "except StackError as error:\n"
    "    print(error)\n"
)


@as_root
@pytest.mark.parametrize(
    ("withheld", "said"),
    [
        ("-dac_read_search", "dac_override"),
        ("-dac_read_search,-dac_override", "this container withholds the capability"),
    ],
)
def test_root_in_a_container_makes_do_with_less(directory: Path, withheld: str, said: str) -> None:
    done = subprocess.run(
        ["setpriv", "--bounding-set", withheld, sys.executable, "-c", STARTS_THEM, str(directory)],  # noqa: S607
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said in done.stdout
    assert done.stderr == ""


@as_root
def test_another_user_runs_them_as_itself(directory: Path) -> None:
    """Who may walk to our packages, and nothing else."""
    nobody = pwd.getpwnam("nobody")
    os.chown(directory, nobody.pw_uid, nobody.pw_gid)
    launch = launcher(identity=Identity(nobody.pw_uid, nobody.pw_gid, "dac_read_search"))
    done = subprocess.run(
        [*launch, sys.executable, "-c", STARTS_THEM, str(directory)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("None\n", "")
    assert (directory / "postgres" / "data").stat().st_uid == nobody.pw_uid
