from .__about__ import __version__ as __version__
from .alias import install as install
from .alias import installed as installed
from .alias import uninstall as uninstall
from .errors import NameTakenError as NameTakenError
from .errors import NotBuiltError as NotBuiltError
