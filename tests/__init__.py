"""The suite. Its layout mirrors the packages."""
