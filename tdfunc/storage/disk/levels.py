"""The names under which other modules import what leaves transforms."""

from tdfunc.storage.disk.raw import is_wrapped as is_wrapped
from tdfunc.storage.disk.raw import outside_transforms as outside_transforms
