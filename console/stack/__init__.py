"""One command brings up the real thing: PostgreSQL, Redis and every process of Tidegate.

Nothing in here imports Django or the console's settings: this package starts them. The modules, from
the bottom up:

- `errors`, `lock`, `keys`, `endpoint`, `privileges`, `leftovers`: one small subject each;
- `binaries`, `postgres`, `redis`: real servers under one directory, also for the tests;
- `core`: what a supervisor decides, as a pure state machine;
- `services`: the table of what runs;
- `processes`, `remembered`, `logs`, `printer`, `display`, `supervisor`: what carries it all out;
- `folders`, `listening`, `elsewhere`, `snapshot`, `up`, `commands`: the verbs of the command line;
- `bootstrap`: makes the environment that all of the above runs in, with nothing but Python.

Why it is built this way: docs/adr/0002-embedded-servers.md and docs/adr/0003-supervisor.md.
"""
