"""The methods of a tree that write it to a folder of mapped files, and open one."""

import os
from typing import Any

from tdfunc._collection import TensorCollection
from tdfunc._mapped import MapMode
from tdfunc._types import Device
from tdfunc.storage import memmap
from tdfunc.storage.decode import Classes


class MemmapMethods(TensorCollection):
    """Trees in folders of mapped files."""

    __slots__ = ()

    def memmap(
        self,
        prefix: "str | os.PathLike[str] | None" = None,
        copy_existing: bool = False,
        *,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
        existsok: bool = True,
        sync: bool = False,
    ) -> Any:
        """Write every leaf to a file of its own in a folder, and return the tree on these files."""
        return memmap.memmap(
            self, prefix, copy_existing, num_threads=num_threads, return_early=return_early,
            share_non_tensor=share_non_tensor, existsok=existsok, sync=sync,
        )  # fmt: skip

    @classmethod
    def load_memmap(
        cls,
        prefix: "str | os.PathLike[str]",
        device: "Device | None" = None,
        non_blocking: bool = False,
        *,
        out: TensorCollection | None = None,
        num_threads: int = 0,
        mode: MapMode = "c",
        classes: Classes = (),
    ) -> Any:
        """Open a memmap folder: no leaf is read before it is used."""
        return memmap.load_memmap(
            prefix, device, non_blocking, out=out, num_threads=num_threads, mode=mode, classes=classes
        )
