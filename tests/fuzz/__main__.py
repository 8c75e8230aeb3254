"""`python -m tests.fuzz [TARGET …] --minutes 5`: inputs that break a decoder, guided by coverage.

Each target runs in a process of its own, one after the other. What it has seen is in
`.tidegate/fuzzed/`, where the next run goes on. `--keep` merges from there into the corpus of the
repository: as few and as small inputs as have the same coverage. What breaks a target is written
beside, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

PROJECT: Final = Path(__file__).resolve().parent.parent.parent
SEEN: Final = PROJECT / ".tidegate" / "fuzzed"
KEPT_BYTES_MAX: Final = 48 << 10  # of a target
KEPT_INPUT_BYTES_MAX: Final = 4096


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", help="default: all, one after the other")
    parser.add_argument("--minutes", type=float, default=1.0, help="of all of them together")
    parser.add_argument("--keep", action="store_true", help="add to the corpus of the repository")
    parser.add_argument("--list", action="store_true", help="what targets there are")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    known, rest = parser.parse_known_args()
    if known.alone:
        return _fuzz(known.alone, [*rest, *known.targets])
    from tests.fuzz.targets import TARGETS

    if known.list:
        print("\n".join(TARGETS))
        return 0
    names = known.targets or list(TARGETS)
    if unknown := sorted(set(names) - TARGETS.keys()):
        print(f"There is no target {unknown[0]}. There are: {', '.join(TARGETS)}.", file=sys.stderr)
        return os.EX_USAGE
    seconds = max(1, round(known.minutes * 60 / len(names)))
    broken = [name for name in names if not _run(name, seconds)]
    if known.keep:
        for name in names:
            _keep(name)
    if broken:
        print(f"Broken: {', '.join(broken)}. The inputs lie in {SEEN}/TARGET/broken.")
    return int(bool(broken))


def _run(name: str, seconds: int) -> bool:
    from tests.fuzz.target import CORPUS, INPUT_BYTES_MAX, SECONDS_MAX
    from tests.fuzz.targets import TARGETS

    seen, broken = SEEN / name / "seen", SEEN / name / "broken"
    for folder in (seen, broken, CORPUS / name):
        folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(TARGETS[name].seeds()):
        (seen / f"seed-{number}").write_bytes(seed)
    options = [
        f"-max_total_time={seconds}",
        f"-max_len={INPUT_BYTES_MAX}",
        f"-timeout={SECONDS_MAX * 10:.0f}",
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
        f"-artifact_prefix={broken}/",
    ]
    command = [sys.executable, "-m", "tests.fuzz", "--alone", name]
    done = subprocess.run(
        [*command, *options, str(seen), str(CORPUS / name)],
        cwd=PROJECT,
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    last = [line for line in done.stdout.splitlines() if "cov:" in line or "stat::" in line]
    facts = {
        line.split(":")[2].strip(): line.split(":")[-1].strip() for line in last if "stat::" in line
    }
    coverage = next((line.split("corp:")[0] for line in reversed(last) if "cov:" in line), "")
    runs = facts.get("number_of_executed_units", "0")
    print(
        f"{name:<22} {'broken' if done.returncode else 'holds':<7} {runs} inputs {coverage}", flush=True
    )
    if done.returncode:
        print("\n".join(done.stdout.splitlines()[-40:]))
    return done.returncode == 0


def _keep(name: str) -> None:
    """As few inputs as have the coverage of all that was seen; the small ones."""
    from tests.fuzz.target import CORPUS
    from tests.fuzz.targets import TARGETS

    fresh = SEEN / name / "merged"
    fresh.mkdir(parents=True, exist_ok=True)
    for path in fresh.iterdir():
        path.unlink()
    command = [sys.executable, "-m", "tests.fuzz", "--alone", name, "-merge=1", str(fresh)]
    sources = [str(CORPUS / name), str(SEEN / name / "seen")]
    subprocess.run([*command, *sources], cwd=PROJECT, capture_output=True, check=False)
    for path in (CORPUS / name).iterdir():
        path.unlink()
    for number, seed in enumerate(TARGETS[name].seeds()):
        (CORPUS / name / f"seed-{number}").write_bytes(seed)
    room = KEPT_BYTES_MAX
    for path in sorted(fresh.iterdir(), key=lambda one: one.stat().st_size):
        size = path.stat().st_size
        if size > min(room, KEPT_INPUT_BYTES_MAX):
            break
        room -= size
        (CORPUS / name / path.name).write_bytes(path.read_bytes())


def _fuzz(name: str, options: list[str]) -> int:
    """In this process, with all that is imported from here on instrumented. Does not return."""
    import atheris

    with atheris.instrument_imports(
        include=["kvss_agent", "swdriver_shim", "telemetry", "console.live"]
    ):
        from tests.fuzz.targets import TARGETS

    target = TARGETS[name]

    def once(raw: bytes) -> None:
        target.run(raw)

    def mutate(raw: bytes, size_max: int, seed: int) -> bytes:
        changed = target.mutate(raw, seed) if target.mutate and seed % 2 else raw
        if changed == raw or len(changed) > size_max:
            return bytes(atheris.Mutate(raw, size_max))
        return changed

    own = {"custom_mutator": mutate} if target.mutate else {}
    atheris.Setup([sys.argv[0], *options], once, **own)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
