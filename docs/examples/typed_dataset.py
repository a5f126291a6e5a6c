"""A typed data set: one process writes it, another process loads it as its class.

A TensorClass is a dataclass whose instances are trees of tensors: its fields have names
and types, and it is indexed, stacked and saved like one tensor. Here a worker process
writes handwritten digits to a folder. The main process, which never had them in memory,
reads single rows, filters them and feeds a data loader.

Run it with: python typed_dataset.py
"""

import multiprocessing
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader

import tdfunc as tdf


class Box(tdf.TensorClass):
    """The rows and columns of an image that are not empty."""

    low: Tensor  # [..., 2], the first row and column
    high: Tensor  # [..., 2], one past the last


class Digit(tdf.TensorClass):
    """Images of digits, with a label, a nested box, and where the images came from."""

    image: Tensor  # [..., 8, 8], between 0 and 1
    label: Tensor
    box: Box
    source: str = "unknown"

    def crop(self) -> Tensor:
        """Return the part of one image inside its box."""
        (top, left), (bottom, right) = self.box.low.tolist(), self.box.high.tolist()
        return self.image[top:bottom, left:right]


def find_box(image: Tensor) -> Box:
    """Return the box of one image."""
    inked = (image > 0).nonzero()
    return Box(inked.amin(0), inked.amax(0) + 1)


def write(folder: str) -> None:
    """Write the data set; this runs in a process of its own."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 8, 8) / 16
    boxes = tdf.stack([find_box(image) for image in images])

    # Every field is checked against the batch size.
    size = [len(images)]
    digits = Digit(images, torch.tensor(labels), boxes, "optdigits", batch_size=size)

    # One file for each field. The folder appears whole or not at all.
    digits.memmap(folder)


def main(folder: Path) -> None:
    """Write in one process, then read in this one."""
    # "spawn" starts a new Python, which imports this file under another module name.
    spawn, path = multiprocessing.get_context("spawn"), str(folder / "digits")
    writer = spawn.Process(target=write, args=(path,))
    writer.start()
    writer.join()
    assert writer.exitcode == 0

    # The files are mapped, and nothing is read yet.
    digits = Digit.load(path)
    assert isinstance(digits, Digit)
    assert isinstance(digits.box, Box)
    print(f"loaded {len(digits)} digits from {digits.source!r}")

    # An index applies to every field, nested ones too, and reads these rows only.
    one = digits[17]
    print(f"digit 17 is a {one.label.item()}, cropped to {tuple(one.crop().shape)}")
    assert one.image.sum() == one.crop().sum()

    # A mask is an index, and the result is a Digit again.
    narrow = digits[digits.box.high[:, 1] - digits.box.low[:, 1] <= 4]
    ones = (narrow.label == 1).float().mean().item()
    print(f"{len(narrow)} are at most 4 pixels wide; {ones:.0%} of these are ones")
    assert ones > 0.5

    # A DataLoader indexes the tree once for each batch, so a batch is a Digit as well.
    loader = DataLoader(digits, batch_size=256, shuffle=True, collate_fn=tdf.collate)
    total = sum(batch.image.sum(dtype=torch.float64) for batch in loader)
    torch.testing.assert_close(total, digits.image.sum(dtype=torch.float64))

    # A subset to hand on: one file with a checksum for each leaf.
    file = folder / "narrow.safetensors"
    tdf.save(narrow, file)
    assert (tdf.load(file, classes=[Digit, Box]) == narrow).all()

    # Someone without the classes takes plain trees.
    plain = tdf.load(file, classes=tdf.TensorDict)
    print(f"without the class: a {type(plain).__name__}, keys {list(plain.keys())}")

    # Instances are immutable: a change is a new one, which shares all other fields.
    renamed = narrow.replace(source="narrow optdigits")
    assert renamed.image is narrow.image
    assert narrow.source == "optdigits"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
