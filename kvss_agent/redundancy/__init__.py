"""Columns of tier 2 as fragments on several agents: the loss of some of them loses nothing.

The agent that has a shard divides the file of a column into `data` fragments and computes `parity` more
(`erasure_code`). Each goes to another agent, a *holder* (`holder`), which stores it in its own tier 2 as
a column of a fragment shard of the same driver. So caps, expiry, purges and seals of fragments are those
of any column, and no protocol is new. To the agent of the shard all its holders together are one more
backend of tier 2 (`fragments`).
"""
