"""import accelerate resolves to acc: a table of names, no behaviour."""

from acc_ops.lazy import lazy_exports

from .__about__ import __version__ as __version__
from .finder import register

_NAMES = {
    "NameTakenError": "errors",
    "NotBuiltError": "errors",
    "install": "alias",
    "installed": "alias",
    "uninstall": "alias",
}

__getattr__, __dir__, __all__ = lazy_exports(__name__, _NAMES)

register()  # from here on `import acc_compat.api` works
