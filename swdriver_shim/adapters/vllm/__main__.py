"""`python -m swdriver_shim.adapters.vllm`: writes the file that an engine names, and signs claims."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from kvss_agent.documents import Invalid
from kvss_agent.process.durable_file import write_durably
from swdriver_shim.adapters.claims import SECONDS, mint
from swdriver_shim.adapters.join_config import NameSpec
from swdriver_shim.adapters.vllm.config import AgentSpec, fresh, parse_file, read
from swdriver_shim.policy import Rules, Tier2Rule
from telemetry.script import add_verb
from telemetry.units import Unreadable, parse_seconds, parse_size

EXAMPLES: Final = """\
examples:
  python -m kvss_agent --state-dir .kvss --control 127.0.0.1:8410
  python -m swdriver_shim.adapters.vllm prepare job7.json --model llama --agent .kvss --memory 8GiB
  python -m swdriver_shim.adapters.vllm claim job7.json --org default
"""


def main(arguments: list[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    try:
        given.verb(given)
    except (Invalid, OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m swdriver_shim.adapters.vllm",
        description="Prepare an engine for Tidegate's vLLM connector.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    one = add_verb(verbs, "prepare", "write a new file with new secrets")
    one.set_defaults(verb=_prepare)
    one.add_argument("file", type=Path)
    one.add_argument(
        "--model", required=True, help="name of the weights: engines with equal names share KV"
    )
    one.add_argument("--revision", default="", help="revision of the weights")
    one.add_argument("--driver", help="name of the driver (default: the file's name)")
    one.add_argument("--org", action="append", help="may be repeated (default: default)")
    one.add_argument(
        "--agent",
        type=Path,
        required=True,
        metavar="DIR",
        help="state directory of an agent on this node",
    )
    one.add_argument(
        "--agent-url",
        default="http://127.0.0.1:8410",
        metavar="URL",
        help="URL of the agent's control API (default: %(default)s)",
    )
    one.add_argument("--memory", type=_size, required=True, metavar="SIZE", help="such as 8GiB")
    one.add_argument(
        "--tier2", type=Path, metavar="DIR", help="also store columns on disk, in this directory"
    )
    one.add_argument(
        "--tier2-size", type=_size, default=10 << 30, metavar="SIZE", help="(default: 10GiB)"
    )
    one = add_verb(verbs, "claim", "sign a claim, as a gateway does for each request")
    one.set_defaults(verb=_claim)
    one.add_argument("file", type=Path)
    one.add_argument("--org", required=True)
    one.add_argument(
        "--seconds",
        type=_seconds,
        default=SECONDS,
        help=f"1s to 24h, such as 15m (default: {SECONDS}s)",
    )
    one.add_argument("--no-store", action="store_true", help="store nothing of the request")
    one.add_argument(
        "--ttl", type=_seconds, metavar="DURATION", help="such as 15m: shorter than the org's policy"
    )
    one.add_argument(
        "--store-tokens", type=int, metavar="N", help="store only the first N tokens of the request"
    )
    one.add_argument(
        "--tier2",
        choices=[rule.value for rule in Tier2Rule],
        default=Tier2Rule.ALLOWED.value,
        help="`never` stores in memory only, `encrypted` also in a tier 2 that is encrypted (default: "
        "%(default)s)",
    )
    one.add_argument("--priority", type=int, metavar="N", help="0 to 100")
    one.add_argument("--continue-id", default="", help="of a conversation")
    return parser


def _prepare(given: argparse.Namespace) -> None:
    if given.file.exists():
        raise Invalid(f"{given.file} already exists, and its secrets may be in use.")
    directory = given.agent.absolute()
    try:
        token = (directory / "token").read_text().strip()
    except FileNotFoundError:
        raise Invalid(
            f"There is no agent's token in {directory}: start the agent with --state-dir {given.agent} "
            "first, and wait until it says that it listens."
        ) from None
    agent = AgentSpec(
        url=given.agent_url,
        token=token,
        address=f"unix:{directory}/data.sock",
        memory_bytes=given.memory,
        tier2=_tier2(given),
    )
    driver = given.driver or given.file.stem
    setting = fresh(
        NameSpec(name=given.model, revision=given.revision), driver, given.org or ["default"], agent
    )
    raw = msgspec.json.format(msgspec.json.encode(setting)) + b"\n"
    parse_file(raw, given.file)  # what is not valid is not written
    write_durably(given.file, raw)


def _tier2(given: argparse.Namespace) -> dict[str, object] | None:
    if given.tier2 is None:
        return None
    return {"kind": "posix", "path": str(given.tier2.absolute()), "cap_bytes": given.tier2_size}


def _claim(given: argparse.Namespace) -> None:
    setting = read(given.file)
    if given.org not in {org.name for org in setting.orgs}:
        raise Invalid(f"{given.file} has no org {given.org}.")
    rules = Rules(
        no_store=given.no_store,
        store_tokens_max=given.store_tokens,
        tier2=Tier2Rule(given.tier2),
        ttl_seconds=given.ttl,
        priority=given.priority,
        continue_id=given.continue_id,
    )
    rules = msgspec.convert(msgspec.to_builtins(rules), Rules)  # within their bounds
    print(mint(setting.claims_key, setting.driver, given.org, rules, seconds=given.seconds))


def _size(text: str) -> int:
    return _parsed(parse_size, text)


def _seconds(text: str) -> int:
    return _parsed(parse_seconds, text)


def _parsed(read: Callable[[str], int], text: str) -> int:
    try:
        return read(text)
    except Unreadable as error:
        raise argparse.ArgumentTypeError(str(error)) from None  # which argparse shows


if __name__ == "__main__":
    sys.exit(main())
