"""How a training step is spread over devices: one strategy per file, over the concrete single-device base."""
