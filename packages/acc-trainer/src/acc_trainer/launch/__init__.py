"""How workers are started: a plan of what will run, and the supervisor that runs it. Imports no torch."""
