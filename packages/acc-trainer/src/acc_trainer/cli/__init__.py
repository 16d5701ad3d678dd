"""The `acc` command: `main` looks at the first word and imports one command's module. Imports no torch."""
