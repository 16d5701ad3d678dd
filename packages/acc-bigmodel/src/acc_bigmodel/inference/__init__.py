"""Inference through a pipeline: each process runs some of the layers, micro-batches follow one another through them."""
