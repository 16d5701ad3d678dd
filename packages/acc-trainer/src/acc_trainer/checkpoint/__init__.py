"""A checkpoint folder appears whole or not at all."""

from __future__ import annotations

from .layout import CheckpointError as CheckpointError
from .manifest import Manifest as Manifest
from .manifest import check_whole as check_whole
from .manifest import is_whole as is_whole
from .manifest import newest_whole as newest_whole
from .read import load_custom_state as load_custom_state
from .read import load_state as load_state
from .write import save_custom_state as save_custom_state
from .write import save_state as save_state
