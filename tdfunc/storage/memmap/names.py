"""The name of a key's file or folder in a memmap folder: tensordict's encoding, and one of ours for other keys."""

from hashlib import blake2b

# What tensordict writes as `%XX`.
_ENCODED = {ord(char): f"%{ord(char):02X}" for char in '/<>:"|?*\\ \x7f%' + "".join(map(chr, range(32)))}
LEAF_SUFFIX = ".memmap"
META = "meta.json"
PICKLES = ("other.pickle", "pickle.pkl")
# What tensordict keeps in meta.json beside the entries, and the key under which everything of ours is.
RESERVED = ("shape", "device", "_type", "")
# A file name has 255 bytes, of which the suffix takes 7.
_MAX_BYTES = 248


def encoded(key: str) -> str:
    """Return the name under which tensordict stores a key, without the suffix of leaves."""
    if key in (".", ".."):
        return "%2E" * len(key)
    return key.translate(_ENCODED) if key else "%"


def is_special(key: str, *, leaf: bool) -> bool:
    """Whether tensordict cannot hold a key: it reserves the name, or the file name would be too long or taken."""
    if key in RESERVED:
        return True
    name = encoded(key)
    if len(name.encode()) > _MAX_BYTES:
        return True
    # A folder of this name could stand where another key's leaf, or a node's own files, must be.
    return not leaf and (name.endswith(LEAF_SUFFIX) or name == META or name in PICKLES)


def special_name(key: str) -> str:
    """Return the name of a special key: one that the encoding never gives, and that nobody can choose."""
    return f"%~{blake2b(key.encode(), digest_size=20).hexdigest()}"


def is_raw_name(key: str) -> bool:
    """Whether a key can be the name of a file as it is, as old folders have it."""
    if key in ("", ".", "..") or "/" in key or "\\" in key or "\0" in key:
        return False
    return not (len(key) >= 2 and key[0].isalpha() and key[1] == ":")
