"""Functions that workers run: at the top of a module, where pickle finds them."""

# Their names say what they do.
# ruff: noqa: D103

import os
import random
import signal
import time

import numpy as np
import torch

from tdfunc import TensorClass, TensorDict


class Point(TensorClass):
    x: torch.Tensor
    note: str = "none"


def double(rows):
    return rows.set("x", rows["x"] * 2)


def same(rows):
    return rows


def nothing(rows):
    pass


def total(rows):
    return rows["x"].double().sum().reshape(1)


def even_only(row):
    return row if int(row["x"]) % 2 == 0 else None


def even_rows(rows):
    return rows[rows["x"] % 2 == 0]


def fail_at_five(rows):
    if (rows["x"] == 5).any():
        raise ValueError("five is not allowed")
    return rows


def stop_at_five(rows):
    if (rows["x"] == 5).any():
        raise StopIteration("an iterator in the function ended")
    return rows


class Unreadable(Exception):
    """Pickles, and cannot be read back: its constructor takes two arguments."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def fail_unreadably(rows):
    raise Unreadable(1, 2)


def leave(rows):
    raise SystemExit(3)


def kill_at_five(rows):
    if (rows["x"] == 5).any():
        os.kill(os.getpid(), signal.SIGKILL)
    return rows


def unpicklable(rows):
    return lambda: rows


def draw(rows):
    return rows.set("noise", torch.rand(rows.batch_size) + np.random.rand() + random.random())


def draw_from(rows, generator):
    return rows.set("noise", torch.rand(rows.batch_size, generator=generator))


def pid(rows):
    return rows.set("pid", torch.full(rows.batch_size, os.getpid()))


def threads(rows):
    return rows.set("threads", torch.full(rows.batch_size, torch.get_num_threads()))


def modes(rows):
    is_double = torch.get_default_dtype() is torch.float64
    return torch.tensor([[torch.is_grad_enabled(), torch.is_inference_mode_enabled(), is_double]])


def write_in_place(rows):
    rows["x"].add_(1)


def requiring(rows):
    return rows.set("y", rows["x"].clone().requires_grad_() * 2)


def parameter(rows):
    return rows.update({"x": torch.nn.Parameter(rows["x"].clone()), "free": torch.zeros(4, requires_grad=True)})


def fail_or_sleep(rows):
    fail_at_five(rows)
    # Beyond the time limit of a test.
    time.sleep(600)


def begin_and_sleep(rows, folder):
    with open(os.path.join(folder, str(os.getpid())), "w"):
        time.sleep(60)


def mapped_bytes(rows):
    """How much of this process's memory is no page of a file."""
    before = anonymous_bytes()
    size = rows["x"].sum()
    return torch.stack([size, torch.tensor(float(anonymous_bytes() - before))]).reshape(1, 2)


def anonymous_bytes():
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def openmp(rows):
    """Runs torch's threads if it has more than one."""
    return TensorDict({"x": torch.ones(400_000).add(1).sum().expand(rows.batch_size)}, rows.batch_size)


def ragged_row(row):
    return TensorDict({"x": torch.zeros(int(row["x"]))})


def other_class(rows):
    if (rows["x"] == 5).any():
        return Point(x=rows["x"], batch_size=rows.batch_size)
    return rows


def no_batch(rows):
    return TensorDict({"x": rows["x"].sum()})


def text(rows):
    return "text"
