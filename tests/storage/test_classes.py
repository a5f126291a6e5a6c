"""The classes of typed trees: found by their names, given, or of other fields than when they were saved."""

import sys
import types
from unittest import mock

import pytest
import torch

import tdfunc as tdf
from tdfunc import TensorClass, TensorDict, TreeStructureError, UnsupportedError
from tests.storage.scripts import ended, run
from tests.storage.trees import assert_same

WRITE = """
    import sys, torch, tdfunc as tdf
    from tdfunc import TensorClass, TensorDict

    class Batch(TensorClass):
        x: torch.Tensor
        y: torch.Tensor

    batch = Batch(torch.ones(2), torch.zeros(2), batch_size=[2])
    for name, tree in (("alone", batch), ("inside", TensorDict({"in": {"b": batch}}))):
        tdf.save(tree, f"{sys.argv[1]}/{name}.safetensors")
        tree.memmap(f"{sys.argv[1]}/{name}")
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Files and folders of trees whose class a script defined that has ended."""
    folder = tmp_path_factory.mktemp("classes")
    ended(run(WRITE, folder))
    return folder


def define(name, **fields):
    """Return a class of these fields, defined in a function."""
    namespace = {"__annotations__": fields, "__module__": "written.elsewhere", "__qualname__": name}
    return type(TensorClass)(name, (TensorClass,), namespace)


X, XY, XYZ = ({name: torch.Tensor for name in names} for names in ("x", "xy", "xyz"))
Batch, Renamed, Wider, Narrow = define("Batch", **XY), define("Renamed", **XY), define("Wider", **XYZ), define("N", **X)
GIVEN = {
    "of the same name": ([Batch], Batch),
    "of the same name, of two": ((Renamed, Batch), Batch),
    "renamed": ([Renamed], Renamed),
    "of these fields, of two": ([Wider, Renamed], Renamed),
    "of more fields": ([Wider], Wider),
    "one class": (Renamed, Renamed),
    "by the recorded name": ({"__main__:Batch": Wider, "other:Batch": Batch}, Wider),
    "plain": (TensorDict, TensorDict),
}


@pytest.mark.parametrize("form", ["", ".safetensors"])
@pytest.mark.parametrize("case", GIVEN)
def test_given_classes(case, form, written):
    """A class that is not here is found among those given: by its qualified name, then by the fields."""
    given, expected = GIVEN[case]

    alone, inside = (tdf.load(written / f"{name}{form}", classes=given) for name in ("alone", "inside"))

    assert type(alone) is type(inside["in", "b"]) is expected
    assert alone.batch_size == (2,)
    assert alone["x"].tolist() == [1, 1]


EACH_FORM = pytest.mark.parametrize("form", ["", ".safetensors"], ids=["folder", "file"])


@EACH_FORM
def test_a_class_loads_as_itself(form, written):
    """`Class.load` needs no name: it loads as the class that it is called of, whatever else is given."""
    path = written / f"alone{form}"

    assert type(Renamed.load(path)) is Renamed
    assert type(TensorDict.load(path, classes=[Renamed])) is Renamed
    assert type(Renamed.load(path, classes=TensorDict)) is Renamed
    assert type(Renamed.load(path, classes={"__main__:Batch": Renamed})) is Renamed


@EACH_FORM
def test_a_class_of_more_fields_loads_without_them(form, written):
    """They are None."""
    assert Wider.load(written / f"alone{form}").z is None


@EACH_FORM
def test_a_typed_tree_loads_in_place(form, written):
    """Alone, and inside of a plain tree."""
    tree = Renamed(torch.zeros(2), torch.ones(2), batch_size=[2])

    assert tree.load_(written / f"alone{form}").x.tolist() == [1, 1]
    assert TensorDict({"in": {"b": tree * 0}}).load_(written / f"inside{form}")["in", "b"].x.tolist() == [1, 1]


def test_a_class_opens_a_folder_as_itself(written):
    """Of a typed tree or of a plain one, also into a tree that is there."""
    tree = Renamed(torch.ones(2), torch.ones(2), batch_size=[2])
    tree.to_tensordict().memmap(written / "plain")

    assert type(Renamed.load_memmap(written / "alone")) is Renamed
    assert type(Renamed.load_memmap(written / "plain")) is Renamed
    assert type(TensorDict.load_memmap(written / "alone", out=tree * 0)) is Renamed
    assert (tree * 0).load_memmap_(written / "alone").x.tolist() == [1, 1]


@pytest.mark.parametrize("form", ["", ".safetensors"])
def test_a_class_knows_those_of_its_fields(tmp_path, form):
    """Classes in annotations count as given, whatever module they were in when they were saved."""
    Box = define("Box", **X)
    Page = define("Page", boxes=Box | None, **X)
    tree = Page(x=torch.ones(2), boxes=Box(torch.zeros(2), batch_size=[2]), batch_size=[2])
    tree.save(tmp_path / "pages") if not form else tdf.save(tree, tmp_path / f"pages{form}")
    for cls in (Box, Page):
        cls.__module__ = "written.later"

    loaded = Page.load(tmp_path / f"pages{form}")
    assert type(loaded) is Page
    assert type(loaded.boxes) is Box


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((), ["no classes"]),
        ([Narrow], ["none that fits", "written.elsewhere:N"]),
        ([Renamed, define("Twin", **XY)], ["several that fit", "Renamed", "Twin"]),
    ],
)
@pytest.mark.parametrize("form", ["", ".safetensors"])
def test_classes_that_are_not_here(form, given, words, written):
    """A class that is not found is named with the keys of its node, and the mapping that gives it."""
    with pytest.raises(UnsupportedError) as err:
        tdf.load(written / f"inside{form}", classes=given)

    expected = [f"inside{form}: ", "classes={'__main__:Batch': its class}", "['x', 'y']", "classes=TensorDict", *words]
    assert all(word in str(err.value) for word in expected), str(err.value)


def test_nothing_is_imported_by_name(tmp_path):
    """A class of a module that is imported is found; no module is imported for it, and no code of one runs."""
    tree = TensorDict({"t": Batch(torch.ones(2), torch.zeros(2))})
    tdf.save(tree, tmp_path / "t.safetensors")
    module = types.ModuleType("written.elsewhere")

    with mock.patch.dict(sys.modules, {"written.elsewhere": module}):
        module.__getattr__ = lambda name: 1 / 0
        with pytest.raises(UnsupportedError, match="'written.elsewhere:Batch'"):
            tdf.load(tmp_path / "t.safetensors")
        module.Batch = Batch
        assert_same(tdf.load(tmp_path / "t.safetensors"), tree)


@pytest.mark.parametrize("form", ["", ".safetensors"])
@pytest.mark.parametrize(("inside", "place"), [(False, "'the root'"), (True, "'deep.t'")])
def test_another_versions_fields_are_refused(tmp_path, inside, place, form):
    """A saved field that the class does not have is refused with both lists of fields; plain trees load."""
    tree, other = Batch(torch.ones(2), torch.zeros(2), batch_size=[2]), define("Batch", x=torch.Tensor, z=torch.Tensor)
    saved = TensorDict({"deep": {"t": tree}}) if inside else tree
    tdf.save(saved, tmp_path / "t.safetensors")
    saved.memmap(tmp_path / "t")

    with pytest.raises(TreeStructureError) as err:
        tdf.load(tmp_path / f"t{form}", classes=[other])
    words = ["Batch", place, "['x', 'z']", "['x', 'y']", "unknown ['y']", "missing ['z']", "classes=TensorDict"]
    assert all(word in str(err.value) for word in words), str(err.value)
    plain = tdf.load(tmp_path / f"t{form}", classes=TensorDict)
    plain = plain["deep", "t"] if inside else plain
    assert sorted(plain.keys()) == ["x", "y"]


def test_fields_that_are_none(tmp_path):
    """A field that was emptied before the save is None, also of a tree that is part of a value."""
    tree = Batch(torch.ones(2), torch.zeros(2), batch_size=[2]).replace(y=None)
    tdf.save(tree, tmp_path / "emptied.safetensors")

    assert_same(tdf.load(tmp_path / "emptied.safetensors", classes=[Batch]), tree)
    assert_same(TensorDict({"o": tdf.NonTensorData([tree])}).memmap()["o"][0], tree)
