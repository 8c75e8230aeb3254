"""Which router sends requests where their first token comes soonest: `make bench NAME=routing`."""
