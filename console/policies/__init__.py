"""What orgs want of their caches: versions, limits, previews, who has it, and the proof that it held."""
