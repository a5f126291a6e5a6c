"""The formats of other programs, by their first bytes: an error names the format of any other file."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from tdfunc.core.errors import CorruptCheckpointError, UnsupportedError, damaged

# Bytes from which every format of the table is known.
HEAD_BYTES = 512
# The end of a zip archive lists its entries.
TAIL_BYTES = 1 << 16
# The number that begins the first pickle of torch.save before torch 1.6, as pickle writes it.
_TORCH_NUMBER = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
# An entry of a zip archive: the lengths and names in the headers before the contents, and in the list at the end.
_ZIP_ENTRY = re.compile(rb"PK\x03\x04.{22}(..)..|PK\x01\x02.{24}(..).{16}", re.DOTALL)
# onnx.ModelProto: its version (1 to 31), and then a text or message as field 2 to 8.
_ONNX = re.compile(rb"\x08[\x01-\x1f][\x12\x1a\x22\x32\x3a\x42]")
# A map of few entries or of many, whose first key is a text: no header of safetensors is as long as these bytes.
_MSGPACK = re.compile(rb"(?:[\x81-\x8f]|\xde..|\xdf....)(?:[\xa2-\xbf]|\xd9.)[\x21-\x7e]{2}", re.DOTALL)
_TEXT = re.compile(rb"[\t\n\r\x20-\x7e]{8,}")


class Format(NamedTuple):
    """A format of other files."""

    name: str
    # How to get at the weights.
    hint: str
    # True for files in the place of the weights, such as the page of a failed download.
    is_damage: bool = False


TORCH = Format(
    "a file of torch.save, which load never reads",
    "tdfunc convert FILE x.safetensors, in a shell; or torch.load(path, weights_only=True).",
)
_ARCHIVE = Format("a zip archive", "unzip it; tdfunc show FILE names a file that is in it.")
_SCRIPT = Format("a program of TorchScript", "in Python: torch.jit.load(path).state_dict().")
_EXPORT = Format("a program of torch.export", "in Python: torch.export.load(path).state_dict.")
_NPZ = Format(
    "an archive of numpy arrays (.npz)",
    "in Python: tdfunc.save(dict(numpy.load(path)), 'x.safetensors').",
)
_KERAS = Format("a model of Keras", "in Python: keras.models.load_model(path).get_weights().")
_PICKLE = Format(
    "a pickle of Python",
    "a pickle can run any code when it is read. In a program that trusts it: tdfunc.save(pickle.load(file), path).",
)
_PAGE = Format(
    "an HTML or XML page", "a download got a page (a login, an error) in place of it; get it again.", is_damage=True
)
_JSON = Format("JSON", "an index of shards is read by its name, x.safetensors.index.json.", is_damage=True)
_PLAIN = Format(
    "text",
    "give the path of a .safetensors file. If it was one, a download got a message: head -c 300 FILE.",
    is_damage=True,
)
_HDF5 = Format("an HDF5 file, such as Keras writes", "in Python: h5py.File(path) has arrays.")
_TFLITE = Format("a model of TensorFlow Lite", "ai_edge_litert reads it.")
_TAR = Format("a tar archive", "tar -xf FILE.")
_ONNX_MODEL = Format(
    "a model of ONNX", "in Python: {x.name: onnx.numpy_helper.to_array(x) for x in model.graph.initializer}."
)
_FLAX = Format(
    "a msgpack file, such as flax writes",
    "in Python: tdfunc.save(flax.serialization.msgpack_restore(open(path, 'rb').read()), 'x.safetensors').",
)

# By the bytes at the beginning; the first that fits counts.
_BEGINNINGS: tuple[tuple[bytes, Format], ...] = (
    (b"\x93NUMPY", Format("a numpy array (.npy)", "in Python: tdfunc.save({'x': numpy.load(path)}, 'x.safetensors').")),
    (
        b"GGUF",
        Format("a GGUF file of llama.cpp", "transformers reads it: from_pretrained(folder, gguf_file=name)."),
    ),
    (
        b"version https://git-lfs.github.com/spec/",
        Format(
            "a pointer of git-lfs; the file itself was not fetched", "git lfs pull, in the repository.", is_damage=True
        ),
    ),
    (b"\x89HDF\r\n\x1a\n", _HDF5),
    (b"\x1f\x8b", Format("a gzip file", "gunzip -k FILE.")),
    (b"BZh", Format("a bzip2 file", "bunzip2 -k FILE.")),
    (b"\xfd7zXZ\x00", Format("an xz file", "xz -dk FILE.")),
    (b"\x28\xb5\x2f\xfd", Format("a Zstandard file", "zstd -d FILE.")),
    (b"7z\xbc\xaf\x27\x1c", Format("a 7-Zip archive", "7z x FILE.")),
    (b"PAR1", Format("a Parquet file", "in Python: datasets.load_dataset('parquet', data_files=path).")),
    (b"ARROW1", Format("an Arrow file", "in Python: datasets.Dataset.from_file(path).")),
)


def find_format(head: bytes, tail: bytes = b"") -> Format | None:
    """Return the format of a file by its beginning, and of an archive also by its end; None for any other file."""
    if head.startswith(b"PK"):
        return archive_format(_zip_names(head) + _zip_names(tail))
    if head.startswith(b"\x80"):
        return TORCH if _TORCH_NUMBER in head[:40] else _PICKLE
    for beginning, found in _BEGINNINGS:
        if head.startswith(beginning):
            return found
    if head[4:8] == b"TFL3":
        return _TFLITE
    if head[257:262] == b"ustar":
        return _TAR
    if _ONNX.match(head):
        return _ONNX_MODEL
    if _MSGPACK.match(head):
        return _FLAX
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml", b"<error")):
        return _PAGE
    if text.startswith((b'{"', b"{\n", b"{\r", b"{ ", b"[")):
        return _JSON
    if _TEXT.fullmatch(head[:HEAD_BYTES]):
        return _PLAIN
    return None


def archive_format(names: Iterable[str]) -> Format:
    """Return the format of a zip archive by the names in it."""
    names = list(names)
    # torch puts everything into one folder.
    inner = {name.partition("/")[2] for name in names}
    if "archive_format" in inner or "serialized_exported_program.json" in {*inner, *names}:
        return _EXPORT
    if "constants.pkl" in inner or any([name.startswith("code/") for name in inner]):
        return _SCRIPT
    # Without a name the archive is cut, and what is left cannot say more.
    if "data.pkl" in inner or not names:
        return TORCH
    if all([name.endswith(".npy") for name in names]):
        return _NPZ
    return _KERAS if "model.weights.h5" in names else _ARCHIVE


def refusal(path: str, found: Format, head: bytes) -> UnsupportedError | CorruptCheckpointError:
    """Return the error for a file of another format."""
    what = f"load {path}: this is {found.name}."
    got = f"the bytes {head[:8]!r}"
    if found.is_damage:
        return damaged(what, "a safetensors file", got, hint=found.hint)
    return UnsupportedError(what, expected="a safetensors file", got=got, hint=found.hint)


def _zip_names(raw: bytes) -> list[str]:
    names: list[str] = []
    for entry in _ZIP_ENTRY.finditer(raw):
        length = int.from_bytes(entry[1] or entry[2], "little")
        names.append(raw[entry.end() : entry.end() + length].decode("utf-8", "replace"))
    return [name for name in names if name]
