"""The name under which other modules import `Descriptor`."""

from tdfunc.storage.disk.commit import Descriptor as Descriptor
