"""Sessions: boxes that jobs share, where their streams are placed, how they grow, shrink and move."""
