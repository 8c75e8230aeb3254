"""The leader: one of any number of orchestrators, which makes workloads what people want them to be.

Read `world.py` (what is wanted, what is seen, what can be done), `decisions.py` (pure: what to do now),
`verdicts.py` (pure: whether a new revision is worse), then `orchestrator.py` with `agenda.py`
(when each workload is looked at), `loaded.py` (what is read of one), `store.py` (what is written),
`compilations.py` and `actions.py`. Why it is so: ADR 96.
"""
