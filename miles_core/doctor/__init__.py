"""Checks before a long run: what would stop it or make it worthless, found in a minute instead of in hours."""
