"""Nothing that anybody chooses leads out of the store, and every name leads back to its address."""

from __future__ import annotations

import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvss_agent.redundancy.layout import fragment_part
from kvss_agent.tier2.address import SHARD, Address, Scope, parse
from tests.kvss_agent.tier2.columns import ACME, BOLT, NAMESPACE, address_of

sixteen = st.binary(min_size=16, max_size=16)
addresses = st.builds(Address, sixteen, sixteen, sixteen, st.from_regex(SHARD, fullmatch=True))


@given(addresses)
def test_a_name_leads_back_to_its_address(address: Address) -> None:
    assert parse(address.name) == address


@given(addresses)
def test_a_name_stays_in_the_directory_of_its_tag(address: Address) -> None:
    assert posixpath.normpath(address.name) == address.name
    assert address.name.startswith(f"{address.namespace.hex()}/{address.tag.hex()}/")


@pytest.mark.parametrize(
    "shard", ["", ".", "..", ".hidden", "a/b", "../../etc", "A", "a\n", "a b", "ä", "a" * 65, "a\0"]
)
def test_a_shard_that_could_lead_elsewhere_is_refused(shard: str) -> None:
    with pytest.raises(ValueError, match="shard"):
        address_of(1, shard=shard)
    name = address_of(1, shard="x").name.removesuffix("x") + shard
    assert parse(name) is None


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_field_of_another_length_is_refused(position: int) -> None:
    fields = [NAMESPACE, ACME, bytes(16)]
    fields[position] = b"short"
    with pytest.raises(ValueError, match="16 bytes"):
        Address(fields[0], fields[1], fields[2], "x")


def test_a_key_in_the_folder_of_another_is_nobodys_name() -> None:
    namespace, tag, folder, file = address_of(1).name.split("/")
    assert parse(f"{namespace}/{tag}/{int(folder, 16) ^ 1:02x}/{file}") is None


def test_the_header_of_a_file_tells_shards_and_namespaces_apart() -> None:
    addresses = [
        address_of(1),
        address_of(1, shard="full-1"),
        address_of(1, namespace=b"another-model..."),
    ]
    assert len({address.column(0) for address in addresses}) == 3


def test_fragments_are_told_from_columns_by_their_part() -> None:
    for part in ("0", "full.0", "window-4096.12", "a.1-2-3.0"):
        assert not address_of(1, shard=part).is_fragment
        assert address_of(1, shard=fragment_part(part, 10, 8, 3)).is_fragment


def test_a_scope_covers_what_it_says_and_is_never_everything() -> None:
    acme, bolt = address_of(1), address_of(1, BOLT)
    elsewhere = address_of(1, namespace=bytes(16))
    everything = [acme, bolt, elsewhere]
    assert [Scope(tag=ACME).covers(a) for a in everything] == [True, False, True]
    assert [Scope(namespace=NAMESPACE).covers(a) for a in everything] == [True, True, False]
    assert [Scope(ACME, NAMESPACE).covers(a) for a in everything] == [True, False, False]
    with pytest.raises(ValueError, match="a purge is of"):
        Scope()
    with pytest.raises(ValueError, match="16 bytes"):
        Scope(tag=b"")
