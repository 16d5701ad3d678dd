"""Models whose weights are kept in few bits."""
