"""Models, blocks and threads that meet the faults of others."""

import os
import threading

from torch import nn


def weight_of(model):
    """The first element of a layer's weight."""
    return model.weight.detach().flatten()[0].item()


def fail_inside(tree, model, error):
    """Raise inside a block."""
    with tree.to_module(model):
        raise error("inside")


def holding(tree, model, seen):
    """A generator that holds a block open over two values, and notes the weight that it finds."""
    with tree.to_module(model):
        for _ in range(2):
            seen.append(weight_of(model))
            yield


class Meeting(nn.Module):
    """A layer whose callers wait for each other before they use the weight."""

    def __init__(self, meet):
        super().__init__()
        self.linear, self.meet = nn.Linear(3, 1, bias=False), meet

    def forward(self, x):
        self.meet()
        y = self.linear(x)
        self.meet()
        return y


def run_in_two_threads(call):
    """Results of one call in each of two threads."""
    results = [None, None]

    def work(i):
        results[i] = call(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class Cached(nn.Module):
    """Keeps a reference to its own weight."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.cache = [self.linear.weight]

    def forward(self, x):
        return x @ self.cache[0]


class Payload:
    """An object whose pickle makes a folder when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)
