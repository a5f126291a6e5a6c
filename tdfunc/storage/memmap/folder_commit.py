"""The names under which other modules import the replacement of a memmap folder."""

from tdfunc.storage.disk.commit import recover as recover
from tdfunc.storage.memmap.folder_owned import check_target as check_target
from tdfunc.storage.memmap.folder_owned import replace_owned as replace_folder

__all__ = ["check_target", "recover", "replace_folder"]
