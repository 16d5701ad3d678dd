"""Where the configuration file lies when none is named."""

from __future__ import annotations

import os
from collections.abc import Mapping


def default_config_path(environ: Mapping[str, str]) -> str:
    """Where the configuration lies when none is named: $HF_HOME/accelerate/default_config.yaml."""
    home = environ.get("HF_HOME")
    if not home:
        cache = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        home = os.path.join(cache, "huggingface")
    return os.path.join(home, "accelerate", "default_config.yaml")
