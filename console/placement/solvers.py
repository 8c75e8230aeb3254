"""SciPy's solvers, for who plans.

They are imported when they are first asked, or by `load`: that takes a fifth of the start of every
process, and most never plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:  # so that who loads the solvers later can import this without NumPy
    from numpy.typing import NDArray

    from console.placement.loads import Floats, Ints

    Numbers: TypeAlias = Sequence[float] | NDArray[Any]
    Places: TypeAlias = Sequence[int] | Ints


class Sums(NamedTuple):
    """lower ≤ sum of coefficients ≤ upper, for each row of a sparse matrix."""

    values: Numbers
    rows: Places
    columns: Places
    shape: tuple[int, int]
    lower: Numbers | float
    upper: Numbers | float


def load() -> None:
    """Import them: on a busy machine that takes seconds."""
    import scipy.optimize
    import scipy.sparse.csgraph  # noqa: F401 - for whoever asks next


def least(
    weights: Floats,
    upper: Numbers,
    sums: Iterable[Sums],
    *,
    integrality: Sequence[int] | None = None,
    options: Mapping[str, object] | None = None,
) -> Any:
    """Numbers between zero and `upper` with the least sum of weights, as HiGHS tells of them."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    return milp(
        weights,
        integrality=integrality,
        bounds=Bounds(0, upper),
        constraints=[
            LinearConstraint(
                csr_array((one.values, (one.rows, one.columns)), shape=one.shape), one.lower, one.upper
            )
            for one in sums
        ],
        options=options,
    )


def matched(weights: Floats, rows: Ints, columns: Ints, shape: tuple[int, int]) -> Ints:
    """For each row a column, no two the same, with the least sum of weights."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import min_weight_full_bipartite_matching

    graph = csr_array((weights, (rows, columns)), shape=shape)
    _, chosen = min_weight_full_bipartite_matching(graph)
    found: Ints = chosen
    return found
