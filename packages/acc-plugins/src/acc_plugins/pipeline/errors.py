"""What can go wrong with a pipeline."""


class PipelineError(ValueError):
    """A model that cannot be cut into stages, or a batch that does not fit them; the message names the way out."""
