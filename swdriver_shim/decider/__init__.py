"""The driver without bytes: the ledger, what keeps it in step with agents, and the verbs of engines."""
