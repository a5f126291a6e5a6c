"""A reader of our files and folders, written from `docs/formats.md` without tdfunc.

It gives nested dicts of numpy arrays and of what is no tensor; a lazy stack is a dict with the keys "0", "1", ...
"""

import hashlib
import json
import math
import struct
from pathlib import Path

import numpy as np

# numpy has no bfloat16 and no 8-bit floats: their bits, as integers.
CODES = {"F64": "<f8", "I64": "<i8", "U64": "<u8", "C64": "<c8", "F32": "<f4", "I32": "<i4", "U32": "<u4", "F16": "<f2",
         "BF16": "<u2", "I16": "<i2", "U16": "<u2", "I8": "i1", "U8": "u1", "BOOL": "?"}  # fmt: skip
RESERVED = set(r'/<>:"|?*\% ') | {chr(i) for i in range(32)} | {"\x7f"}


def read_arrays(path):
    """The metadata and the named arrays of one safetensors file."""
    raw = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    metadata, data = header.pop("__metadata__", {}), raw[8 + length :]
    arrays = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        arrays[name] = np.frombuffer(data[begin:end], CODES.get(entry["dtype"], "u1")).reshape(entry["shape"])
    return metadata, arrays


def nest(values, shape):
    """Nested lists of the values of a batch."""
    if not shape:
        return values[0]
    step = len(values) // max(shape[0], 1)
    return [nest(values[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]


def read_tree(text, arrays):
    """The tree that `tdfunc.tree` describes."""
    tree = json.loads(text)
    nodes = [{} for _ in tree["nodes"]]
    sizes = [[]] * len(nodes)
    places, tied = [((), [])] * len(nodes), []
    # A node comes after the one that it is in, so its path and outer batch size are known when it is reached.
    for number, node in enumerate(tree["nodes"]):
        prefix, outer = places[number]
        size = sizes[number] = node.get("size", outer)
        for key, item in zip(node["keys"], node["items"], strict=True):
            path, value = (*prefix, key), None
            if not isinstance(item, dict):
                given = item[2] if isinstance(item, list) and len(item) > 2 else None
                value = arrays[given or ".".join(path)]
            elif "tree" in item:
                places[item["tree"]] = path, [] if "own" in node else size
                value = nodes[item["tree"]]
            elif "tie" in item:
                tied.append((number, key, tree["ties"][item["tie"]][0]))
            else:
                value = item["value"] if "value" in item else nest(item["values"], item.get("shape", size))
            nodes[number][key] = value
    for number, key, (where, first) in tied:
        nodes[number][key] = nodes[where][first]
    for node, own in zip(tree["nodes"], nodes, strict=True):
        for item, key in zip(node["items"], node["keys"], strict=True):
            if isinstance(item, dict) and tree["nodes"][item.get("tree", 0)].get("class") == "object":
                own[key] = read_objects(tree["nodes"][item["tree"]]["own"], own[key], sizes[item["tree"]])
    return nodes[0]


def read_objects(own, parts, size):
    """The plain object that the own data of a node describe, or one for each element of its batch."""
    if isinstance(own, dict) and "each" in own:
        return nest(read_object(own["each"], parts), size)
    return read_object(own, parts)


def read_object(own, parts):
    """The plain object that the own data of a node describe around its tensors and trees."""
    if isinstance(own, list):
        return [read_object(item, parts) for item in own]
    if not isinstance(own, dict):
        return own
    ((kind, content),) = own.items()
    if kind == "at":
        return parts[content]
    if kind == "array":
        key, *how = content
        return np.frombuffer(parts[key].tobytes(), how[0]).reshape(how[1]) if how else parts[key]
    if kind == "scalar":
        return np.frombuffer(bytes.fromhex(content[1]), content[0])[0]
    if kind == "float":
        return float(content)
    if kind == "tuple":
        return tuple(read_object(item, parts) for item in content)
    return {read_object(key, parts): read_object(item, parts) for key, item in content}


def read_shards(folder):
    """The tree in a folder with an index."""
    index = json.loads((Path(folder) / "model.safetensors.index.json").read_text())
    arrays = {}
    for name in index["metadata"]["tdfunc.shards"]:
        arrays |= read_arrays(Path(folder) / name)[1]
    assert {name: arrays[name] for name in index["weight_map"]}.keys() == arrays.keys()
    return read_tree(index["metadata"]["tdfunc.tree"], arrays)


def read_step(folder):
    """The tree of one step of a run, and its metadata."""
    about = json.loads((folder / "checkpoint.json").read_text())
    if about["file"].endswith(".index.json"):
        return about, read_shards(folder)
    metadata, arrays = read_arrays(folder / about["file"])
    return about, read_tree(metadata["tdfunc.tree"], arrays)


def file_name(key):
    """The name that an ordinary key has in a memmap folder."""
    if key in (".", ".."):
        return key.replace(".", "%2E")
    return "".join(f"%{ord(c):02X}" if c in RESERVED else c for c in key)


def read_folder(folder):
    """The tree in a memmap folder."""
    own = json.loads((folder / "meta.json").read_text())[""]
    node = own["node"]
    read = {
        key: _entry(folder, key, item, own["specs"], node.get("size", []))
        for key, item in zip(node["keys"], node["items"], strict=True)
    }
    return read_objects(node["own"], read, node.get("size", [])) if node.get("class") == "object" else read


def _entry(folder, key, item, specs, size):
    """The value of one key of a folder."""
    is_leaf = not isinstance(item, dict)
    name, name_taken = file_name(key), False
    if not is_leaf:
        name_taken = name.endswith(".memmap") or name in ("meta.json", "other.pickle", "pickle.pkl")
    if key in ("shape", "device", "_type") or len(name.encode()) > 248 or name_taken:
        name = "%~" + hashlib.blake2b(key.encode(), digest_size=20).hexdigest()
    if is_leaf:
        code, shape = specs[item if isinstance(item, int) else item[0]]
        raw = (folder / f"{name}.memmap").read_bytes() if math.prod(shape) else b""
        return np.frombuffer(raw, CODES.get(code, "u1")).reshape(shape)
    if "tree" in item:
        return read_folder(folder / name)
    if "data" in item:
        return json.loads((folder / name / "meta.json").read_text())["data"]
    return item["value"] if "value" in item else nest(item["values"], item.get("shape", size))
