"""What processes say they are, typed and bounded: what the console may store, compare and show.

They say more than this, and later versions still more; what is not named here is skipped.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from telemetry.decoder import NO_NUL, Count

SHARDS_MAX = 1 << 16
PROBLEMS_MAX = 100
HOLDERS_MAX = 64
# One above any that is told can still be stored.
Generation = Annotated[int, Meta(ge=0, lt=1 << 62)]
Text = Annotated[str, Meta(max_length=2000, pattern=NO_NUL)]
DataAddress = Annotated[str, Meta(max_length=500, pattern=NO_NUL)]


class Redundancy(Struct, frozen=True):
    """Of the columns of a shard that are stored in fragments; `unreachable`: addresses of agents that
    store them, of which nobody knows now what they have. `incomplete_at`: how many columns lack the
    fragment of each place, and `most_lacking`, how many fragments the column lacks that lacks most.
    `holders_since`: when the newest of the agents came that the counts are of; 0 if the agent does not
    know yet."""

    state: Text
    reason: Text = ""
    columns: Count = 0
    incomplete: Count = 0
    incomplete_at: Annotated[list[Count], Meta(max_length=HOLDERS_MAX)] = []
    most_lacking: Count = 0
    repaired: Count = 0
    unreachable: Annotated[list[Text], Meta(max_length=HOLDERS_MAX)] = []
    holders_since: Annotated[float, Meta(ge=0, lt=1 << 35)] = 0.0


class Shard(Struct, frozen=True):
    """An agent says its `name`; a driver its `group` and `index`, and of which agent: `address`.

    `former_addresses`: where it has left homes that may not be empty. Older drivers do not say so."""

    name: Text = ""
    group: Text = ""
    index: Count = 0
    address: Text = ""
    shard: Text = ""
    slots: Count | None = None  # nobody knows while it is lost
    state: Text = ""
    reason: Text | None = ""
    left_to_move: Count = 0
    former_homes: Annotated[list[Text], Meta(max_length=SHARDS_MAX)] = []
    former_addresses: Annotated[list[DataAddress], Meta(max_length=SHARDS_MAX)] = []
    count_from: Count = 0
    redundancy: Redundancy | None = None


Shards = Annotated[list[Shard], Meta(max_length=SHARDS_MAX)]
Problems = Annotated[list[Text], Meta(max_length=PROBLEMS_MAX)]


class Observed(Struct, frozen=True):
    """`generation` is what it was told last, `observed_generation` what it is. `problems`: a brain's,
    with what its document names: a tokenizer that is not there."""

    generation: Generation
    observed_generation: Generation
    shards: Shards = []
    problems: Problems = []

    @property
    def shortfall(self) -> str:
        """What is not as it should be yet."""
        lacking = (one for one in self.shards if one.reason)
        of_shards = (f"{one.shard or one.name}: {one.reason}" for one in lacking)
        return "; ".join((*self.problems, *of_shards))


class Told(Struct, frozen=True):
    """The answer to a document. A driver follows it before it answers, and says all that it is."""

    generation: Generation
    observed_generation: Generation | None = None
    shards: Shards = []
    problems: Problems = []

    @property
    def observed(self) -> Observed | None:
        if self.observed_generation is None:
            return None
        return Observed(self.generation, self.observed_generation, self.shards, self.problems)
