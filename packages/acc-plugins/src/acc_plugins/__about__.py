"""The version of acc-plugins, and the only place it is written."""

__version__ = "0.1.0"
