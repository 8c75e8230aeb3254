"""How an org's columns are used again, and the effect of other policies on that."""
