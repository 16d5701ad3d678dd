"""How numbers are represented while a model trains: one precision per file, over the concrete float32 base."""
