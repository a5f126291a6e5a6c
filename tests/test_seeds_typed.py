"""The promises about typed trees of the documents that tdfunc was written from, one test for each block or claim."""

from typing import Any

import pytest
import torch

import tdfunc as tdf
from tdfunc import NonTensorData, TensorClass, TensorDict, tensorclass


class Scored(TensorClass):
    """Fields of tensors, two of which may be absent, and one of text."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    rewards: torch.Tensor | None = None
    end_scores: torch.Tensor | None = None
    source: str = "none"


def scored(**options):
    """Two rows of scored tokens."""
    ids = torch.arange(6).reshape(2, 3)
    return Scored(ids, torch.ones(2, 3, dtype=torch.bool), batch_size=[2], **options)


class Foo(TensorClass):
    tensor: torch.Tensor
    non_tensor: Any
    nested: Any = None


def test_a_typed_tree_prints_its_fields():
    """An instance shows tensors, data and empty fields with the batch size."""
    foo = Foo(tensor=torch.randn(3), non_tensor="a string!", nested=None, batch_size=[3])
    lines = {line.strip().rstrip(",") for line in repr(foo).splitlines()}

    assert lines == {
        "Foo(",
        "non_tensor=NonTensorData(data=a string!, batch_size=torch.Size([3]), device=None)",
        "tensor=Tensor(shape=torch.Size([3]), device=cpu, dtype=torch.float32, is_shared=False)",
        "nested=None",
        "batch_size=torch.Size([3])",
        "device=None",
        "is_shared=False)",
    }


def _bracket(*options):
    class Made(TensorClass[options if len(options) > 1 else options[0]]):
        integer: int

    return Made


def _keyword(*options):
    class Made(TensorClass, **dict.fromkeys(options, True)):
        integer: int

    return Made


def _decorated(*options):
    @tensorclass(**dict.fromkeys(options, True))
    class Made:
        integer: int

    return Made


@pytest.mark.parametrize("spelling", [_bracket, _keyword, _decorated], ids=lambda f: f.__name__[1:])
def test_options_in_each_spelling(spelling):
    """An option means the same in brackets, as a keyword and of the decorator, and several combine."""
    cast, kept, both = spelling("autocast"), spelling("nocast"), spelling("nocast", "frozen")
    only = spelling("tensor_only")

    assert type(cast(integer=torch.ones(())).integer) is int
    assert type(kept(integer=1).integer) is int
    assert type(both(integer=1).integer) is int
    assert torch.equal(only(integer=1).integer, torch.tensor(1))


def test_without_options_a_number_becomes_a_tensor():
    """An int becomes a tensor without `nocast`."""

    class Made(TensorClass):
        integer: int

    assert torch.equal(Made(integer=1).integer, torch.tensor(1))


def test_shadow_allows_names_of_methods():
    """A field may have the name of a method with `shadow`, and not without it."""

    class Made(TensorClass["shadow"]):
        keys: torch.Tensor

    assert Made(keys=torch.ones(2), batch_size=[2])[0].keys == 1
    with pytest.raises(Exception, match="keys"):
        type("Refused", (TensorClass,), {"__annotations__": {"keys": torch.Tensor}})


def test_a_subclass_of_a_frozen_class():
    """A class derives from a frozen one, and its instances do not change."""

    class Parent(TensorClass, frozen=True):
        x: torch.Tensor

    class Child(Parent):
        y: torch.Tensor

    child = Child(torch.zeros(2), torch.ones(2), batch_size=[2])
    with pytest.raises(tdf.ImmutableError, match=r"replace\(x="):
        child.x = torch.ones(2)


@tensorclass
class MyData:
    image: torch.Tensor
    mask: torch.Tensor
    label: torch.Tensor

    def mask_image(self):
        return self.image[self.mask.expand_as(self.image)].view(*self.batch_size, -1)

    def select_label(self, label):
        return self[self.label == label]


@pytest.fixture
def images():
    """A hundred images; fields are given by position and by name."""
    mask = (torch.rand(1, 8, 8) < 0.5).expand(100, 1, 8, 8)
    return MyData(torch.randn(100, 3, 8, 8), mask, label=torch.randint(10, (100,)), batch_size=[100])


def test_methods_of_a_decorated_class(images):
    """Methods of a decorated class run on its fields and rows."""
    ones = images.select_label(1)

    assert isinstance(ones, MyData)
    assert ones.batch_size == (int((images.label == 1).sum()),)
    assert (ones.label == 1).all()
    assert images.mask_image().shape == (100, 3 * int(images.mask[0].sum()))


def test_a_decorated_class_is_a_tree(images):
    """An instance takes another shape with all its fields."""
    square = images.reshape(10, 10)

    assert isinstance(square, MyData)
    assert square.image.shape == (10, 10, 3, 8, 8)
    assert square.mask.shape == (10, 10, 1, 8, 8)
    assert repr(square).startswith("MyData(\n    image=Tensor(shape=torch.Size([10, 10, 3, 8, 8])")


class Outer(TensorClass):
    """A class inside a class."""

    inner: Scored
    weight: torch.Tensor


@pytest.mark.parametrize(
    "run",
    [
        lambda outer: outer[:1],
        lambda outer: torch.stack([outer, outer]),
        lambda outer: outer.apply(lambda x: x + 1),
        lambda outer: torch.cat([outer, outer]),
        lambda outer: outer.clone(),
    ],
    ids=["index", "stack", "apply", "cat", "clone"],
)
def test_a_class_inside_a_class_keeps_its_type(run):
    """Results are of both classes."""
    result = run(Outer(scored(), torch.zeros(2), batch_size=[2]))

    assert isinstance(result, Outer)
    assert isinstance(result.inner, Scored)


def test_typed_trees_nest_and_do_what_trees_do():
    """A stack and a map reach the leaves of the inner class."""
    outer = Outer(scored(), torch.zeros(2), batch_size=[2])

    assert torch.stack([outer, outer]).inner.input_ids.shape == (2, 2, 3)
    assert outer.apply(lambda x: x + 1).weight.tolist() == [1, 1]


def test_construction_of_a_typed_tree():
    """Fields are given by position, then batch size, device and names; fields left out have their defaults."""
    made = scored(rewards=torch.ones(2), device="cpu", names=["sample"])

    assert made.batch_size == (2,)
    assert made.device == torch.device("cpu")
    assert made.names == ["sample"]
    assert made.end_scores is None
    assert made.source == "none"


def test_fields_of_a_typed_tree():
    """A class and its instances list the fields."""
    assert [field.name for field in Scored.fields()] == [
        "input_ids", "attention_mask", "rewards", "end_scores", "source",
    ]  # fmt: skip
    assert Scored.fields() == scored().fields()


def test_get():
    """`get` takes a path, and a value to return for an absent key."""
    made = scored()

    assert made.get("input_ids") is made.get(("input_ids",)) is made.input_ids
    assert made.get("unknown", 3) == made.get("unknown", default=3) == 3
    assert made.get("unknown") is made.get("rewards") is made.to_tensordict().get("unknown") is None
    assert TensorDict({"n": made}).get(("n", "source")) == "none"


def test_set():
    """`set` returns a new tree, or writes into the old tensor when it is asked to."""
    made = scored()
    ids = made.input_ids
    new, same = made.set("input_ids", ids + 1), made.set("input_ids", ids + 5, inplace=True, non_blocking=True)

    assert new.input_ids.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert same is made
    assert same.input_ids is ids
    assert ids[0, 0] == 5
    with pytest.raises(tdf.MissingKeyError, match="unknown"):
        made.set("unknown", ids)


LEAVES = TensorDict({"input_ids": torch.ones(2, 3), "attention_mask": torch.ones(2, 3)}, [2])


def test_from_tensordict():
    """A tree of tensors and a dict of the rest make an instance; a field without a value is empty."""
    made = Scored.from_tensordict(LEAVES, {"source": "web"}, safe=True)

    assert made.batch_size == (2,)
    assert made.source == "web"
    assert made.rewards is None
    with pytest.raises(tdf.TreeStructureError, match="other"):
        Scored.from_tensordict(LEAVES.set("other", torch.zeros(2)))


def test_to_tensordict():
    """An instance turns into a tree of copies, in which empty fields are None or left out."""
    made = Scored.from_tensordict(LEAVES, {"source": "web"}, safe=True)
    back = made.to_tensordict()

    assert type(back) is TensorDict
    assert back["source"] == "web"
    assert back["rewards"] is None
    assert back["input_ids"].data_ptr() != LEAVES["input_ids"].data_ptr()
    assert "rewards" in made.to_tensordict(retain_none=True)
    assert "rewards" not in made.to_tensordict(retain_none=False)


def test_to_tensordict_leaves_the_files(tmp_path):
    """A tree that is made of mapped files is not on them."""
    mapped = scored().memmap(tmp_path / "scored")

    assert mapped.is_memmap()
    assert not mapped.to_tensordict().is_memmap()


def test_unbind_shares_memory():
    """Rows share memory with the tree."""
    made = scored()
    rows = made.unbind(0)
    rows[1].input_ids.fill_(9)

    assert [type(row) for row in rows] == [Scored, Scored]
    assert made.input_ids[1].tolist() == [9, 9, 9]


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_of_a_typed_tree(flatten, assign):
    """A state dict, flat or nested, with a prefix or into a dict, loads into another instance."""
    made, other = scored(rewards=torch.ones(2)), scored(rewards=torch.zeros(2))
    destination: dict[str, Any] = {}

    loaded = other.load_state_dict(made.state_dict(flatten=flatten), strict=True, assign=assign, from_flatten=flatten)

    assert isinstance(loaded, Scored)
    assert (loaded == made).all()
    assert made.state_dict(destination, "p.", True, True) is destination
    assert destination["p.rewards"] is made.rewards
    with pytest.raises(KeyError, match="rewards"):
        other.load_state_dict(scored().state_dict())
    assert isinstance(other.load_state_dict(scored().state_dict(), strict=False), Scored)


@pytest.fixture
def folders(tmp_path):
    """A typed tree, and the folder where it is saved as its class and as an open tree."""
    made = scored(source="web")
    made.save(tmp_path / "typed")
    made.to_tensordict().save(tmp_path / "open")
    return made, tmp_path


@pytest.mark.parametrize("folder", ["typed", "open"])
@pytest.mark.parametrize("load", ["load", "load_memmap"])
def test_folders_of_typed_trees(load, folder, folders):
    """A class is kept on disk, and a folder of an open tree is read as the class that is asked for."""
    made, path = folders
    back = getattr(Scored, load)(path / folder)

    assert isinstance(back, Scored)
    assert back.source == "web"
    assert back.end_scores is None
    assert (back.input_ids == made.input_ids).all()


@pytest.mark.parametrize("load", ["load", "load_memmap"])
def test_a_folder_of_an_open_tree_is_read_as_one(load, folders):
    """The class is only made where it is asked for."""
    _, path = folders

    assert type(getattr(TensorDict, load)(path / "open")) is TensorDict


def test_a_typed_tree_is_filled_from_a_folder(folders):
    """`load_` writes the values that were saved."""
    made, path = folders
    zeros = made.apply(torch.zeros_like)

    assert (zeros.load_(path / "typed").input_ids == made.input_ids).all()


def test_files_of_typed_trees(tmp_path):
    """`load` of a class returns an instance for a file that was saved from an open tree."""
    tdf.save(scored().to_tensordict(), tmp_path / "open.safetensors")

    assert isinstance(Scored.load(tmp_path / "open.safetensors"), Scored)
    assert (Scored.load(tmp_path / "open.safetensors").input_ids == scored().input_ids).all()


def test_typed_trees_on_the_meta_device(tmp_path):
    """A folder of a class loads on meta."""
    scored().memmap(tmp_path / "scored")

    assert Scored.load_memmap(tmp_path / "scored", device="meta").input_ids.is_meta
    assert Scored.load(tmp_path / "scored", "meta").input_ids.is_meta


def test_mapped_files_of_a_typed_tree_without_a_folder(tmp_path):
    """`memmap()` takes no folder, and `load_memmap` fills an instance."""
    made, out = scored(), scored().apply(torch.zeros_like)
    made.memmap(tmp_path / "scored")

    assert isinstance(made.memmap(), Scored)
    assert made.memmap().is_memmap()
    assert Scored.load_memmap(tmp_path / "scored", out=out) is out
    assert torch.equal(out.input_ids, made.input_ids)


def test_memmap_like_of_a_typed_tree(tmp_path):
    """Buffers for rows of a class are of the class and hold its non-tensor data."""
    row = Scored(torch.zeros(3, dtype=torch.long), torch.ones(3, dtype=torch.bool), source="web")
    buffer = row.expand(1000).memmap_like(tmp_path / "buffer")
    buffer.at[5].set_(row.replace(input_ids=torch.tensor([1, 2, 3])))

    back = Scored.load_memmap(tmp_path / "buffer")
    assert back[5].input_ids.tolist() == [1, 2, 3]
    assert back.source == "web"
    assert back.batch_size == (1000,)


def test_a_list_of_words_is_one_for_each_row():
    """A list of strings is one value for each row."""
    chat = Foo(torch.zeros(2), ["a message", "another message"], batch_size=(2,))

    assert chat[1].non_tensor == "another message"
    assert chat.non_tensor == ["a message", "another message"]
    assert NonTensorData("foo", [1])[0].data == "foo"


class History(TensorClass["nocast"]):
    """The conversation of the first document."""

    role: str
    content: str | Foo
    is_complete: bool = True
    tool_calls: list[dict] | None = None
    tool_responses: list[str] | None = None


def test_a_history_has_a_message_in_each_row():
    """Roles of a conversation are one for each row, also after an index and a join; a list of calls is one value."""
    history = History(role=["system", "user"], content=["a message", "another"], batch_size=(2,))
    calls = [{"name": "search"}]
    answer = History(role="assistant", content="an answer", tool_calls=calls)
    joined = torch.cat([history, answer.replace(tool_calls=None).unsqueeze(0)])

    assert history[1].role == "user"
    assert history[1].content == "another"
    assert history[1].is_complete is True
    assert joined.role == ["system", "user", "assistant"]
    assert answer.tool_calls is calls
    assert answer.role == "assistant"
