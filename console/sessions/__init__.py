"""Sessions: the boxes that jobs share, where their streams are placed, and how they grow, shrink and move."""
