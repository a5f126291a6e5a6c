"""Models with adapters, `base+adapter` as in mergekit: merged in memory and by the command they are the same."""

import pytest
import torch
import yaml

import tdfunc as tdf
from tests.cli.helpers import run
from tests.lora.layers import llama, trained


@pytest.fixture(name="models")
def _models(tmp_path):
    """A folder of transformers, two adapters of it, and its trees."""
    torch.manual_seed(0)
    model = llama()
    model.save_pretrained(tmp_path / "base")
    apply, params, _ = tdf.functional(model)
    lora = tdf.lora.Lora("*_proj.weight", rank=2, alpha=3)
    merged = []
    for seed, name in enumerate(("math", "code")):
        adapters = trained(lora, params, apply, seed)
        tdf.lora.save(tmp_path / name, lora, adapters, apply)
        merged.append(lora.merge(params, adapters))
    return params, merged


SPELLINGS = {
    "a text": lambda base, adapter: f"{base}+{adapter}",
    "a mapping": lambda base, adapter: {"model": {"path": str(base)}, "lora": {"path": str(adapter)}},
}


def merge(folder, doc):
    """The result of the command, with a configuration."""
    (folder / "x.yml").write_text(yaml.safe_dump(doc, width=1000))
    return run("merge", "--config", folder / "x.yml", "-o", folder / "out")


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_adapters_are_merged_into_their_base(spelling, tmp_path, models):
    """Oracle: the mean of the merged trees."""
    _, (math, code) = models
    names = [SPELLINGS[spelling](tmp_path / "base", tmp_path / name) for name in ("math", "code")]
    doc = {"merge_method": "linear", "models": [{"model": name, "parameters": {"weight": 1.0}} for name in names]}

    result = merge(tmp_path, doc)

    assert result.code == 0, result.err
    tdf.assert_close(tdf.load(tmp_path / "out"), (math + code) * 0.5, atol=1e-6, rtol=1e-5)


def test_a_base_is_a_model_beside_its_adapters(tmp_path, models):
    """Task arithmetic of adapters: their weighted changes are added to the base."""
    params, (math, code) = models
    base = str(tmp_path / "base")
    found = [(f"{base}+{tmp_path / 'math'}", 0.7), (f"{base}+{tmp_path / 'code'}", -0.3)]
    doc = {
        "merge_method": "task_arithmetic",
        "base_model": base,
        "models": [{"model": name, "parameters": {"weight": weight}} for name, weight in found],
    }

    result = merge(tmp_path, doc)

    assert result.code == 0, result.err
    expected = params + (math - params) * 0.7 + (code - params) * -0.3
    tdf.assert_close(tdf.load(tmp_path / "out"), expected, atol=1e-6, rtol=1e-5)


def test_options_take_adapters(tmp_path, models):
    """The result is a folder of transformers with the files of the base."""
    result = run("merge", f"{tmp_path / 'base'}+{tmp_path / 'math'}", "--method", "passthrough", "-o", tmp_path / "out")

    assert result.code == 0, result.err
    _, found, _ = tdf.functional(tdf.llm.load_pretrained(tmp_path / "out"))
    _, (math, _) = models
    tdf.assert_close(found, math, atol=1e-6, rtol=1e-5)


def test_a_missing_adapter_is_named(tmp_path, models):
    """Before anything is written."""
    result = run("merge", f"{tmp_path / 'base'}+{tmp_path / 'none'}", "--method", "passthrough", "-o", tmp_path / "out")

    assert result.code == 2
    assert "none is not a folder with an adapter" in result.err
    assert not (tmp_path / "out").exists()


def test_a_path_with_a_plus_is_a_path(tmp_path, models):
    """A folder of that name is opened itself."""
    (tmp_path / "base").rename(tmp_path / "a+b")

    result = run("merge", tmp_path / "a+b", "--method", "passthrough", "-o", tmp_path / "out")

    assert result.code == 0, result.err
