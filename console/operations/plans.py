"""Plans that somebody looks at before applying them by their token."""

from __future__ import annotations


class StalePlan(Exception):
    """The plan of a token is no longer what would happen. `version` is that of what it would change."""

    def __init__(
        self,
        sentence: str = "The state that this plan was made from has changed. Make a new plan.",
        *,
        version: int | None = None,
    ) -> None:
        super().__init__(sentence)
        self.version = version
