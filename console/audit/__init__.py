"""The one append-only trail of every change of intent: who, when, from where, why, before and after."""
