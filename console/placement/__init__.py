"""Which shard lives on which node, and why. Pure functions: no Django, no clock, no I/O.

Read `topology.py` (what there is), `rules.py` (what is allowed), `grants.py` (what is asked for),
then `planner.py`. How it decides: ADR 20.
"""
