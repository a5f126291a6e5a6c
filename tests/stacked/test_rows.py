"""What docs/models.md says of a model holds: it is run again, and compared with a loop over the modules.

A fixed third of the rows of torch.nn is fast, chosen by the checksums of their names; the others are slow.
"""

from importlib.metadata import version

import pytest
from torch import nn

pytest.importorskip("transformers")

from benchmarks.models import results
from benchmarks.models.checks import RIGHT, WRONG, check
from benchmarks.models.results import CHECKS, TABLES, claims, third_of

KEPT = results.load()
# A row of another table takes about a second, and its library as long to import.
FAST_TABLE = "torch.nn"


def is_fast(table, name):
    """Whether a row is in the fast third."""
    return table == FAST_TABLE and third_of(name) == 0


def params(chosen):
    """The rows that a function of table and row chooses, as parameters; those of two thirds are slow."""
    found = []
    for table, rows in TABLES.items():
        for row in rows:
            if chosen(table, row):
                marks = [] if is_fast(table, row.name) else [pytest.mark.slow]
                found.append(pytest.param(table, row, id=f"{table}: {row.name}", marks=marks))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("table", "row"), params(lambda table, row: True))
def test_the_claims_of_the_page_hold(table, row):
    """All that the page calls right, stacked and free of warnings is so in a run on new numbers."""
    claimed = {name for name, holds in claims(KEPT[table][row.name].found).items() if holds}

    found = check(row)

    missing = {name: getattr(found, name, found) for name in claimed if not claims(found)[name]}
    assert missing == {}


def has_gap(table, row):
    """Whether the page says that a check of this row fails."""
    found = KEPT[table][row.name].found
    return any(getattr(found, name) != RIGHT for name in CHECKS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(
    version("torch").split("+")[0] != results.versions()["torch"].split("+")[0], reason="the page is of another torch"
)
@pytest.mark.parametrize(("table", "row"), params(has_gap))
def test_the_page_is_not_behind(table, row):
    """What the page says is refused is still refused; `python -m benchmarks.models` writes the page anew."""
    kept = KEPT[table][row.name].found

    found = check(row)

    assert [getattr(found, name) == RIGHT for name in CHECKS] == [getattr(kept, name) == RIGHT for name in CHECKS]


@pytest.mark.parametrize("table", TABLES)
def test_nothing_is_wrong(table):
    """A result that differs from the module's is a fault and no row of the page."""
    wrong = [name for name, (found, _) in KEPT[table].items() if WRONG in found]

    assert wrong == []


def without_its_gelu(row):
    """BLOOM with torch's GELU, which is the same function."""

    def make():
        model = row.make()
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if type(child).__name__ == "BloomGelu":
                    setattr(module, name, nn.GELU(approximate="tanh"))
        return model

    return row._replace(make=make)


def without_its_cache(row):
    """Mamba, called with `use_cache=False`."""

    def example():
        found = row.example()
        return found._replace(kwargs={**found.kwargs, "use_cache": False})

    return row._replace(example=example)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "change"), [("BLOOM", without_its_gelu), ("Mamba", without_its_cache)])
def test_the_advice_of_the_page_works(name, change):
    """The model passes all checks after the change that the page names."""
    (row,) = [row for row in TABLES["transformers"] if row.name == name]

    assert all(claims(check(change(row))).values())
