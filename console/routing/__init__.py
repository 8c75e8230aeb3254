"""What brains are told: models that are served, their replicas, and what orgs may ask for."""
