"""Leaves of codes are multiplied by their scales or refused by name, never taken for numbers."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import tdfunc as tdf
from tdfunc.storage.scales import find_blocks, find_scaled, may_have_codes, specs_of
from tests.storage.layouts import FP8, OTHERS, bits

pytestmark = pytest.mark.sample(3)

GOLDEN = Path(__file__).parent / "golden" / "fp8_blocks.safetensors"
each_fp8 = pytest.mark.parametrize("layout", FP8)
each_seed = pytest.mark.parametrize("seed", [0, 1])
# The codes that a cast would change.
FLOATING = [name for name in OTHERS if name == "bitsandbytes nf4 in bfloat16" or name.startswith("FP8")]
INTEGER = [name for name in OTHERS if name not in FLOATING]


def write(state, folder):
    """Write leaves by safetensors' own writer."""
    path = folder / "model.safetensors"
    safetensors.torch.save_file(state, path)
    return path


def flat(tree):
    """Return the leaves by their dotted names."""
    return dict(tree.flatten_keys(".").items())


@each_fp8
@each_seed
def test_numbers_are_codes_times_scale(layout, seed, tmp_path):
    """Each number is the product, computed in float64 and rounded to float32."""
    state, numbers = FP8[layout](seed)

    tree = flat(tdf.load(write(state, tmp_path), dequantize=True))

    assert all(torch.equal(tree[name], whole.float()) for name, whole in numbers.items())


@pytest.mark.parametrize("layout", ["blocks", "blocks of 32", "one block"])
def test_transformers_computes_the_same(layout, tmp_path):
    """The numbers are those of transformers, which reads blocks that divide a weight."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    state, numbers = FP8[layout](0)
    (name,) = numbers
    given = {"weight": state[name], "weight_scale_inv": state[f"{name}_scale_inv"]}

    expected = fp8.Fp8Dequantize(None).convert(given)["weight"]

    assert torch.equal(flat(tdf.load(write(state, tmp_path), dequantize=True))[name], expected)


@each_fp8
def test_scales_are_not_in_the_result(layout, tmp_path):
    """A dequantized tree has the leaves of the model that was quantized."""
    state, numbers = FP8[layout](0)

    assert set(flat(tdf.load(write(state, tmp_path), dequantize=True))) == {*numbers, "norm.weight"}


@each_fp8
def test_dtype_casts_numbers(layout, tmp_path):
    """All leaves are numbers of the dtype."""
    state, numbers = FP8[layout](0)
    path = write(state, tmp_path)

    tree = flat(tdf.load(path, dequantize=True, dtype=torch.bfloat16))

    expected = {name: whole.float().bfloat16() for name, whole in numbers.items()}
    assert tdf.tree_equal(
        tdf.TensorDict(tree), tdf.TensorDict(expected | {"norm.weight": state["norm.weight"].bfloat16()})
    )


@each_fp8
def test_a_cast_of_codes_is_refused(layout, tmp_path):
    """`dtype=` alone would cast codes; the message names the leaf and its scale."""
    state, numbers = FP8[layout](0)
    (name,) = numbers

    with pytest.raises(
        tdf.UnsupportedError, match=rf"the leaf '{name}' has codes[\s\S]*scale in[\s\S]*dequantize=True"
    ):
        tdf.load(write(state, tmp_path), dtype=torch.bfloat16)


@pytest.mark.parametrize("layout", [*FP8, *OTHERS])
def test_codes_are_loaded_as_they_are(layout, tmp_path):
    """Without options, codes and scales come with their bits."""
    state = FP8[layout](0)[0] if layout in FP8 else OTHERS[layout][1](0)

    tree = flat(tdf.load(write(state, tmp_path)))

    assert bits(tree) == bits(state)


@pytest.mark.parametrize("layout", INTEGER)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_integer_codes_keep_their_scales(layout, dtype, tmp_path):
    """A cast changes neither codes nor scales, and all other floating leaves."""
    state = OTHERS[layout][1](0)

    tree = flat(tdf.load(write(state, tmp_path), dtype=dtype))

    assert bits(tree) == bits(state | {"norm.weight": state["norm.weight"].to(dtype)})


@pytest.mark.parametrize("layout", FLOATING)
def test_codes_without_integers_are_not_cast(layout, tmp_path):
    """Packed codes in a floating dtype, and codes of an unknown layout, are refused by name."""
    name, make = OTHERS[layout]

    with pytest.raises(tdf.UnsupportedError, match=f"the leaf '{name}' has codes"):
        tdf.load(write(make(0), tmp_path), dtype=torch.float32)


@pytest.mark.parametrize("layout", OTHERS)
def test_other_layouts_are_not_dequantized(layout, tmp_path):
    """A layout that is not codes times scale is refused by name."""
    name, make = OTHERS[layout]

    with pytest.raises(tdf.UnsupportedError, match=rf"dequantize: the leaf '{name}' has codes"):
        tdf.load(write(make(0), tmp_path), dequantize=True)


def test_a_part_of_a_file_is_dequantized(tmp_path):
    """A scale that `where` does not choose is read for the codes that it chooses."""
    state, numbers = FP8["blocks at the edge"](0)

    tree = tdf.load(write(state, tmp_path), dequantize=True, where="q.weight")

    assert torch.equal(flat(tree)["q.weight"], numbers["q.weight"].float())


@pytest.mark.parametrize("where", ["*.weight", "q.weight", tdf.Filter("*.weight")], ids=["glob", "path", "filter"])
def test_a_cast_of_a_part_of_a_file_is_refused(where, tmp_path):
    """Codes are found by a scale that `where` does not choose."""
    state, _ = FP8["rows"](0)

    with pytest.raises(tdf.UnsupportedError, match=r"the leaf 'q\.weight' has codes"):
        tdf.load(write(state, tmp_path), dtype=torch.bfloat16, where=where)


def test_scales_alone_keep_their_dtype(tmp_path):
    """The scale of integer codes is not cast, also if `where` does not choose the codes."""
    _, make = OTHERS["bitsandbytes int8"]

    tree = tdf.load(write(make(0), tmp_path), dtype=torch.bfloat16, where="*.SCB")

    assert tree["q", "SCB"].dtype is torch.float32


def test_a_part_without_codes_is_cast(tmp_path):
    """Leaves that are no codes are cast in a file that has some."""
    state, _ = FP8["blocks"](0)

    assert (
        tdf.load(write(state, tmp_path), dtype=torch.float16, where="norm.*")["norm", "weight"].dtype is torch.float16
    )


def test_a_sub_tree_is_dequantized(tmp_path):
    """A handle reads the numbers of a sub-tree."""
    state, numbers = FP8["rows"](0)

    with tdf.open(write(state, tmp_path)) as file:
        assert torch.equal(file["q"].load(dequantize=True)["weight"], numbers["q.weight"].float())


def test_a_memmap_folder_is_dequantized(tmp_path):
    """A folder gives the numbers that a file gives."""
    state, _ = FP8["experts in blocks"](0)
    path = write(state, tmp_path)
    tdf.load(path).memmap(tmp_path / "map")

    assert tdf.tree_equal(tdf.load(tmp_path / "map", dequantize=True), tdf.load(path, dequantize=True))


def test_a_memmap_folder_is_not_cast(tmp_path):
    """Codes in a folder are refused as those in a file."""
    tdf.load(write(FP8["rows"](0)[0], tmp_path)).memmap(tmp_path / "map")

    with pytest.raises(tdf.UnsupportedError, match="has codes"):
        tdf.load(tmp_path / "map", dtype=torch.float32)


def test_like_describes_the_numbers(tmp_path):
    """`like=` is the model that was quantized, and its other leaves."""
    state, _ = FP8["tensor"](0)
    like = {"q": {"weight": torch.empty(5, 6)}, "norm": {"weight": torch.empty(4)}}

    assert tdf.load(write(state, tmp_path), dequantize=True, like=like).paths() == [("norm", "weight"), ("q", "weight")]


def test_tied_codes_stay_tied(tmp_path):
    """A tied leaf of codes becomes one tied leaf of numbers."""
    state, numbers = FP8["rows"](0)
    tree = tdf.TensorDict(state).unflatten_keys(".")
    module = torch.nn.Module()
    module.a = module.b = torch.nn.Parameter(tree["q", "weight"], requires_grad=False)
    tied = tdf.from_module(module).set("a_scale", state["q.weight_scale"])
    tdf.save(tied, tmp_path / "t.safetensors")

    back = tdf.load(tmp_path / "t.safetensors", dequantize=True)

    assert back.ties() == tied.ties()
    assert torch.equal(back["b"], numbers["q.weight"].float())


def test_numbers_are_constants_of_a_transform(tmp_path):
    """A file is dequantized inside of a function that is vmapped."""
    state, numbers = FP8["rows"](0)
    path = write(state, tmp_path)

    found = torch.vmap(lambda x: tdf.load(path, dequantize=True)["q", "weight"] * x)(torch.ones(2))

    assert torch.equal(found[1], numbers["q.weight"].float())


def test_fake_numbers_have_the_dtype(tmp_path):
    """Under FakeTensorMode only shapes and dtypes are read."""
    path = write(FP8["blocks at the edge"](0)[0], tmp_path)

    with FakeTensorMode():
        leaf = tdf.load(path, dequantize=True, dtype=torch.bfloat16)["q", "weight"]

    assert isinstance(leaf, FakeTensor)
    assert leaf.dtype is torch.bfloat16


def test_the_mark_of_comfyui_goes(tmp_path):
    """The leaf that says that weights are scaled is not in a tree of numbers."""
    state, _ = FP8["ComfyUI"](0)
    path = write(state | {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}, tmp_path)

    assert ("scaled_fp8",) not in tdf.load(path, dequantize=True).paths()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_without_a_scale_is_a_number(dtype, tmp_path):
    """A leaf of float8 beside which there is no scale is cast as before."""
    leaf = torch.randn(3, 4).to(dtype)
    path = write({"q.weight": leaf, "q.bias": torch.ones(3)}, tmp_path)

    assert torch.equal(tdf.load(path, dtype=torch.float32)["q", "weight"], leaf.float())


@pytest.mark.parametrize(
    ("shape", "scale", "blocks"),
    [
        ((130, 257), (2, 3), (128, 128)),
        ((256,), (4,), (64,)),
        ((96, 64), (3, 1), (32, 64)),
        ((0, 4), (), (1, 4)),
        ((100,), (3,), None),
        ((4, 6), (6,), None),
        ((4, 6), (2, 2, 2), None),
    ],
)
def test_blocks_follow_from_shapes(shape, scale, blocks):
    """Blocks are 128 long, or a power of two that divides; other shapes say nothing."""
    assert find_blocks(shape, scale) == blocks


def test_ordinary_leaves_are_not_looked_at():
    """A file of usual dtypes has no codes, whatever its names are."""
    state = {"q.weight": torch.ones(2, 2), "q.weight_scale": torch.ones(2, 1)}

    assert not may_have_codes([leaf.dtype for leaf in state.values()], state)


@pytest.mark.parametrize("layout", [*FP8, *OTHERS])
def test_the_leaf_of_codes_is_found(layout):
    """One leaf of codes is found, whose companions are all leaves beside it."""
    state = FP8[layout](0)[0] if layout in FP8 else OTHERS[layout][1](0)
    name = next(iter(FP8[layout](0)[1])) if layout in FP8 else OTHERS[layout][0]

    (one,) = find_scaled(specs_of(tdf.TensorDict(state)))

    assert {one.name, *one.companions} == state.keys() - {"norm.weight"}
    assert one.name == name


def test_the_golden_file_is_read():
    """A file as DeepSeek's is read as its own formula says: a scale for each block of 128 by 128."""
    saved = safetensors.torch.load_file(GOLDEN)
    codes, scale = (saved[f"model.layers.0.self_attn.q_proj.weight{end}"] for end in ("", "_scale_inv"))
    each = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: codes.shape[0], : codes.shape[1]]

    found = tdf.load(GOLDEN, dequantize=True)["model", "layers", "0", "self_attn", "q_proj", "weight"]
    assert torch.equal(found, codes.float() * each)


def adapters(tree):
    """Return adapters of the numbers of a tree."""
    plain = tree.set(("q", "weight"), torch.ones(5, 6))
    return tdf.lora.Lora("q.weight", rank=1).init(plain, key=0)


@pytest.mark.parametrize(
    "call",
    [
        lambda a: tdf.weights.linear(
            None, torch.stack([a, a.apply(torch.clone).set(("q", "weight_scale"), torch.ones(5, 1))]), [1, 1]
        ),
        lambda a: tdf.weights.distance(a, a),
        lambda a: tdf.weights.cosine(a, a),
        lambda a: tdf.weights.line_losses(lambda tree: tree["norm", "weight"].sum(), a, a),
        lambda a: tdf.weights.weight_matching(a, a),
        lambda a: tdf.lora.Lora("q.weight", rank=1).init(a, key=0),
        lambda a: tdf.lora.Lora("q.weight", rank=1).merge(a, adapters(a)),
    ],
)
def test_functions_of_weights_refuse_codes(call):
    """A function that computes with a tree in memory names the leaf of codes."""
    tree = tdf.TensorDict(FP8["rows"](0)[0]).unflatten_keys(".")

    with pytest.raises(tdf.UnsupportedError, match="the leaf 'q.weight' has codes"):
        call(tree)


def test_equal_codes_are_kept_by_a_merge():
    """Models that differ elsewhere are merged around codes that they share."""
    tree = tdf.TensorDict(FP8["rows"](0)[0]).unflatten_keys(".")
    other = tree.at["norm", "weight"].apply(torch.neg)

    merged = tdf.weights.linear(None, torch.stack([tree, other]), [1.0, 1.0])

    assert tdf.tree_equal(merged["q"], tree["q"])
    assert merged["norm", "weight"].eq(0).all()


@pytest.mark.parametrize("beside", ["q.input_scale", "q.k_scale", "q.logit_scale", "q.layer_scale", "other.scale"])
def test_numbers_in_fp8_have_no_scale(beside, tmp_path):
    """A model that was only cast is cast back; a scale of inputs, or of another module, is not of its weights."""
    codes = torch.tensor([[0.5, -2.0], [448.0, 0.0]])
    state = {"q.weight": codes.to(torch.float8_e4m3fn), beside: torch.tensor([0.5])}

    tree = flat(tdf.load(write(state, tmp_path), dtype=torch.float32))

    assert torch.equal(tree["q.weight"], codes)
