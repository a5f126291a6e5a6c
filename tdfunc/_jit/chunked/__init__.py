"""Calls of a jitted function that are made of calls for some members at a time."""

from tdfunc._jit.chunked.chunks import Chunked as Chunked
from tdfunc._jit.chunked.chunks import ChunkSize as ChunkSize
from tdfunc._jit.chunked.chunks import choose_chunk_size as choose_chunk_size
from tdfunc._jit.chunked.split import InDims as InDims
