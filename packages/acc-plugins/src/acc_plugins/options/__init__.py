"""The option classes: each option is declared once, and flag, file key, environment variable, help and docs derive from it."""
