"""From intent to processes: desired documents, told to agents and drivers until each has its own."""
