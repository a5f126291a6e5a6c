"""Calls that write into given tensors compute what the operation computes."""

import warnings

import pytest
import torch
from torch.utils import _pytree as pytree

import tdfunc as tdf
from tdfunc._jit.replay.out import find_out
from tests.jit.blocks import pool_all_sizes

aten = torch.ops.aten
PARTS = 24
# Their results have any values.
EMPTY = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}


@pytest.mark.parametrize(
    "operation",
    [
        aten.mm.default, aten.bmm.default, aten.addmm.default, aten.add.Tensor, aten.mul.Scalar, aten.where.self,
        aten.sum.dim_IntList, aten._softmax.default, aten.gelu_backward.default, aten.threshold_backward.default,
        aten.cat.default, aten.stack.default, aten.clone.default, aten._to_copy.default, aten.native_batch_norm.default,
        aten.max_pool2d_with_indices.default,
    ],
)  # fmt: skip
def test_operations_with_a_kernel_for_out_have_a_call(operation):
    """These make the large results of training steps."""
    assert find_out(operation) is not None


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(aten.convolution.default, id="computes and copies"),
        pytest.param(aten.native_layer_norm.default, id="computes and copies, three results"),
        pytest.param(aten.view.default, id="a view"),
        pytest.param(aten.add_.Tensor, id="in place"),
        pytest.param(aten._assert_async.default, id="without a result"),
        pytest.param(len, id="a function"),
    ],
)
def test_other_operations_have_none(operation):
    """They would gain nothing, or have no new memory."""
    assert find_out(operation) is None


def outcome(operation, sample):
    """Return what a replay of an operation returns, or the class of its error."""
    call = tdf.jit(lambda x, args, kwargs: operation(x, *args, **kwargs))
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for _ in range(2):
                torch.manual_seed(0)
                result = call(sample.input, sample.args, sample.kwargs)
        # Whatever an operation raises for a sample, it must raise both times.
        except Exception as err:
            return type(err)
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return [(leaf.shape, leaf.stride(), leaf.dtype, repr(leaf.tolist())) for leaf in leaves]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 2), (torch.bfloat16, 1)], ids=str)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_operation_of_torch_has_the_same_bits(part, dtype, count):
    """The samples that torch has of its 700 operations, computed into blocks of the pool and into new memory."""
    from torch.testing._internal.common_methods_invocations import op_db

    differ = []
    pooled = 0
    for operation in op_db[part::PARTS]:
        if operation.name in EMPTY or not operation.supports_dtype(dtype, "cpu"):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            samples = list(operation.sample_inputs("cpu", dtype))[:count]
        for sample in samples:
            with pool_all_sizes() as taken:
                got = outcome(operation, sample)
            # Without a block of the pool it is computed in the same way.
            if taken:
                pooled += 1
                if got != outcome(operation, sample):
                    differ.append((operation.name, sample))

    assert pooled > 0
    assert differ == []
