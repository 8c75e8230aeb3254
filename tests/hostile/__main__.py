"""`python -m tests.hostile --minutes 10`: all evil peers against a whole stack, for that long.

Calm, attackers who are busy elsewhere, and attack take turns of equal length, so that others' latency
with and without the attack is measured on the same machine in the same minutes. What the attack costs
others is compared with attackers who are busy elsewhere, since theirs are other machines. Each figure is
printed with its limit; the exit code is 1 if a promise broke. `--json FILE` writes rows like benchmarks.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.hostile.attacks import ATTACKS
from tests.hostile.battle import ATTACKED, CALM, ELSEWHERE, Result, fight
from tests.hostile.driver import EvilDriver
from tests.hostile.figures import Figure, combined, table
from tests.hostile.machines import divided, on
from tests.hostile.moves import LIFE_SECONDS, MOVER
from tests.hostile.scene import scene

TURN_SECONDS: Final = 20.0  # of attack, after as long a calm
SLOWER_MAX: Final = 1.2  # others' p99 with the attack, to that without
SHARES: Final = ("p50", "p99")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make hostile", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31))
    parser.add_argument("--attack", action="append", choices=list(ATTACKS), help="default: all of them")
    parser.add_argument("--json", type=Path)
    told = parser.parse_args(arguments)
    chosen = {name: ATTACKS[name] for name in told.attack or ATTACKS}
    print(
        f"Seed {told.seed}: calm, elsewhere and attack, {TURN_SECONDS:.0f} s each, in turns.", flush=True
    )
    results: list[Result] = []
    machines = divided()
    print(machines, flush=True)
    with on(machines.others), scene(machines) as stage:
        with EvilDriver(stage.console, MOVER, stage.directory) as evil:
            stage.give_a_job(evil)  # while there is room: evil agents say what they like of theirs
        ends = time.monotonic() + told.minutes * 60
        signed_at = time.monotonic()
        while not results or time.monotonic() < ends:
            if time.monotonic() - signed_at > LIFE_SECONDS / 2:
                stage.prepare({})
                signed_at = time.monotonic()
            seed = told.seed + len(results)
            results.append(
                fight(
                    stage,
                    chosen,
                    calm_seconds=TURN_SECONDS,
                    elsewhere_seconds=TURN_SECONDS,
                    seconds=TURN_SECONDS,
                    seed=seed,
                    yields=True,
                )
            )
            _say(len(results), results[-1])
    figures = _figures(results)
    broken = list(dict.fromkeys(sentence for result in results for sentence in result.broken))
    broken += [f"{one.name} does not hold." for one in figures if not one.holds]
    if told.json:
        told.json.write_text(json.dumps([one.row() for one in figures], indent=1) + "\n")
    print("\n".join(["", table(figures), "", *(f"BROKEN: {one}" for one in broken)]))
    print(f"{len(broken)} promises broke." if broken else "No promise broke.")
    return int(bool(broken))


def _say(number: int, result: Result) -> None:
    at = {one.name: one.value for one in result.figures}
    print(
        f"round {number}: p99 {at['others.attacked.p99']:.1f} ms "
        f"(elsewhere {at['others.elsewhere.p99']:.1f} ms, calm {at['others.calm.p99']:.1f} ms), "
        f"{len(result.broken)} promises broken",
        flush=True,
    )
    for sentence in result.broken:
        print(f"  {sentence}", flush=True)


def _figures(results: Sequence[Result]) -> list[Figure]:
    """The ratios first, then all others of all rounds. Of latencies the median round counts: what else
    ran on this machine for a while does not."""
    others = combined([result.figures for result in results])
    at = {one.name: one.value for one in others}
    ratios = [
        Figure(
            f"others.{share}.attacked to {base}",
            at[f"others.{ATTACKED}.{share}"] / at[f"others.{base}.{share}"],
            "",
            SLOWER_MAX if (share, base) == ("p99", ELSEWHERE) else None,
        )
        for base in (ELSEWHERE, CALM)
        for share in SHARES
    ]
    return [*ratios, *others]


if __name__ == "__main__":
    sys.exit(main())
