"""How the states of models and optimizers lie in files, and how they come back under another strategy."""
