"""Where the bytes of a weight are: one lazy, read-only mapping per kind of place."""
