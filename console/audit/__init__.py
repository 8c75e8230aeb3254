"""The append-only trail of every change of intent: who, when, why, before and after."""
