"""The store: arenas of column slots, the two queues, transports and tier-2 files. No Django."""
