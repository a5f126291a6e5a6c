"""Data sets of tokens: rows are those of the tokenizer, batches are pure, and a cache is never stale or half there."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import tdfunc as tdf
from tdfunc.core.errors import ConcurrencyError
from tdfunc.llm import History, JinjaTemplate, PairwiseDataset, PromptData, chatml, load_tokens, read_records
from tdfunc.llm.datasets import tokens as module
from tdfunc.llm.datasets.prompts import tokenize_prompts
from tests.helpers import assert_trees_equal
from tests.llm.encoding.test_chat import MASKED
from tests.llm.tokens import CHATML, ZEPHYR, make_tokenizer

TOKENIZER = make_tokenizer()
TEXTS = ["the fox", "", "jumps over the lazy dog", "yes\u2028no", "a"]
CHAT = [{"role": "user", "content": "the fox?"}, {"role": "assistant", "content": "yes"}]


def ids_of(text):
    """The ids of a text, by the tokenizer itself."""
    return TOKENIZER(text)["input_ids"]


def rows_of(batch):
    """The ids of each row, without pads."""
    return [ids[mask].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]


def padded_masks(lengths, side):
    """The masks of rows of these lengths, padded at this side to the longest."""
    width = max(lengths)
    if side == "left":
        return [[False] * (width - length) + [True] * length for length in lengths]
    return [[True] * length + [False] * (width - length) for length in lengths]


def test_progress_is_shown(terminal):
    """`progress=True` counts records."""
    load_tokens(TOKENIZER, ["a", "b", "c"], progress=True)

    assert "3/3" in terminal.readouterr().err


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.text("the fox\n", max_size=20), max_size=6),
    st.integers(1, 4),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from(["left", "right"]),
    st.sampled_from([None, 0, 7]),
)
def test_batches_are_the_rows_in_order_or_shuffled(texts, size, start, drop_last, side, seed):
    """Oracle: lists. Each batch is padded to its longest row; to start later is to skip; a key shuffles all rows."""
    data = load_tokens(TOKENIZER, texts)
    key = None if seed is None else tdf.random.key(seed)
    order = list(range(len(texts))) if key is None else tdf.random.permutation(key, len(texts)).tolist()
    parts = [order[i : i + size] for i in range(0, len(order), size)]
    kept = [part for part in parts if len(part) == size or not drop_last][start:]

    batches = list(data.batches(size, key=key, start=start, drop_last=drop_last, padding_side=side))

    assert len(data) == len(texts)
    assert data.lengths.tolist() == [len(ids_of(text)) for text in texts]
    assert [rows_of(batch) for batch in batches] == [[ids_of(texts[i]) for i in part] for part in kept]
    assert [batch["attention_mask"].tolist() for batch in batches] == [
        padded_masks([len(ids_of(texts[i])) for i in part], side) for part in kept
    ]
    assert {batch["input_ids"].dtype for batch in batches} <= {torch.int64}


def write_lines(folder):
    """A file with a text a line."""
    path = folder / "a.txt"
    path.write_text("".join(text + "\n" for text in TEXTS))
    return path


def write_objects(folder):
    """A file of JSON lines, with empty lines between them."""
    path = folder / "a.jsonl"
    path.write_text("\n\n".join(json.dumps({"text": text, "n": 1}) for text in TEXTS))
    return path


@pytest.mark.parametrize("write", [write_lines, write_objects])
def test_files_are_read_by_their_suffix(write, tmp_path):
    """A line of text is a record, also with separators of lines inside; empty lines are texts, but not in JSON."""
    assert [record["text"] for record in read_records(write(tmp_path))] == TEXTS


SOURCES = {
    "a path": write_lines,
    "a name": lambda folder: str(write_objects(folder)),
    "a list": lambda _: TEXTS,
    "an iterator": lambda _: iter(TEXTS),
    "records": lambda _: [{"text": text} for text in TEXTS],
}


@pytest.mark.parametrize("name", SOURCES)
def test_rows_are_those_of_the_tokenizer(name, tmp_path):
    """From files, lists and iterators."""
    data = load_tokens(TOKENIZER, SOURCES[name](tmp_path))

    assert rows_of(data.batch(range(5))) == [ids_of(text) for text in TEXTS]


def test_parquet_files(tmp_path):
    """Rows of a parquet file are records."""
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": TEXTS, "messages": [CHAT] * 5}), path)

    assert rows_of(load_tokens(TOKENIZER, path).batch(range(5))) == [ids_of(text) for text in TEXTS]
    assert len(load_tokens(TOKENIZER, path, columns="messages")) == 5


def test_conversations_have_their_masks():
    """Rows of conversations, tools included, are those of `apply_chat_template`."""
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    chats = [{"messages": CHAT, "tools": tools}, {"messages": [*CHAT, *CHAT], "tools": None}, {"messages": CHAT[:1]}]
    history = History.from_chats([{k: v for k, v in chat.items() if v} for chat in chats])
    expected = history.apply_chat_template(tokenizer=TOKENIZER, chat_template=chatml, padding=True, **MASKED)

    data = load_tokens(TOKENIZER, chats, columns="messages", chat_template=chatml)

    assert bool((data.batch(range(3)) == expected).all())
    assert bool((data.batch([-1]) == data.batch(torch.tensor([2]))).all())
    assert bool((data[1]["assistant_masks"] == data.batch([1])["assistant_masks"][0]).all())


PAIRS = [
    {"prompt": "the fox ", "chosen": "jumps", "rejected": "is lazy and brown"},
    {"prompt": "dog", "chosen": "", "rejected": "x" * 600},
]


def test_columns_of_a_prompt_and_a_response_are_prompts():
    """As the texts of both make them."""
    data = load_tokens(TOKENIZER, PAIRS, columns=("prompt", "chosen"))

    expected = tokenize_prompts(TOKENIZER, [each["prompt"] for each in PAIRS], [each["chosen"] for each in PAIRS])
    assert_trees_equal(PromptData.from_rows(data.batch([0, 1])), expected)


@pytest.mark.parametrize("name", ["chosen", "rejected"])
def test_pairs_are_prompts_with_each_response(name):
    """Long rows are cut."""
    pairs = PairwiseDataset.from_dataset(TOKENIZER, PAIRS, max_length=6)

    side = getattr(pairs, f"{name}_data")
    assert rows_of({"input_ids": side.input_ids, "attention_mask": side.attention_mask}) == [
        (ids_of(record["prompt"]) + ids_of(record[name]))[:6] for record in PAIRS
    ]
    assert side.rewards is None


def test_pairs_are_cut_to_550_tokens():
    """The default; shorter rows are padded at the left."""
    mask = PairwiseDataset.from_dataset(TOKENIZER, PAIRS).rejected_data.attention_mask

    assert mask.shape[1] == 550
    assert mask[:, -1].tolist() == [True, True]


def test_pairs_may_be_whole_and_without_a_prompt():
    """Each row is its response."""
    pairs = PairwiseDataset.from_dataset(TOKENIZER, PAIRS, prompt=None, max_length=None)

    lengths = pairs.rejected_data.attention_mask.sum(1).tolist()
    assert lengths == [len(ids_of(each["rejected"])) for each in PAIRS]


def test_pairs_are_a_batch():
    """They split into pairs."""
    pairs = PairwiseDataset.from_dataset(TOKENIZER, PAIRS, max_length=6)

    assert pairs.batch_size == (2,)
    assert [type(batch) for batch in pairs.split(1)] == [PairwiseDataset] * 2


def test_columns_by_name_stay_together():
    """A batch of several columns is a tree of them, row by row."""
    records = [{"a": "the", "b": "fox jumps"}, {"a": "", "b": "dog"}]
    data = load_tokens(TOKENIZER, records, columns={"x": "a", "y": "b"})

    batch = data.batch([1, 0])

    assert batch.batch_size == (2,)
    assert [rows_of(batch[name]) for name in "xy"] == [[[], ids_of("the")], [ids_of("dog"), ids_of("fox jumps")]]
    assert data[0]["y"]["input_ids"].tolist() == ids_of("fox jumps")
    assert data.lengths["x"].tolist() == [len(ids_of("the")), 0]


# -- the cache --------------------------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch):
    """The number of times that records were tokenized, as a list of one."""
    count = [0]
    tokenize = module._tokenize

    def counted(*args):
        count[0] += 1
        return tokenize(*args)

    monkeypatch.setattr(module, "_tokenize", counted)
    return count


def caches(folder):
    """The caches in a folder."""
    return sorted(Path(folder).glob("*.safetensors"))


@pytest.fixture
def fox(tmp_path):
    """A file with one line."""
    path = tmp_path / "a.txt"
    path.write_text("the fox\n")
    return path


@pytest.fixture
def read(tmp_path):
    """Reads the first row of a source through a cache in a folder, which is its `folder`."""

    def reader(source, tokenizer=TOKENIZER, **options):
        return rows_of(load_tokens(tokenizer, source, cache_dir=reader.folder, **options).batch([0]))

    reader.folder = tmp_path / "cache"
    return reader


def make_other():
    """A tokenizer with a token more."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["fox"])
    return tokenizer


def test_the_same_call_reads_the_cache(fox, read, made):
    """Rows are tokenized once."""
    assert [read(fox), read(fox)] == [[ids_of("the fox")]] * 2
    assert made == [1]


def test_another_tokenizer_makes_another_cache(fox, read, made):
    """Each tokenizer makes its own rows."""
    other = make_other()
    first = read(fox)

    assert read(fox, other) == [other("the fox")["input_ids"]] != first
    assert made == [2]


def test_a_changed_file_makes_another_cache(fox, read, made):
    """When the file is as it was, so are the rows, and they are read."""
    first = read(fox)
    fox.write_text("the dog\n")
    changed = read(fox)
    fox.write_text("the fox\n")

    assert changed == [ids_of("the dog")]
    assert read(fox) == first
    assert made == [2]


def test_another_option_makes_another_cache(fox, read, made):
    """Each in its own file."""
    read(fox)
    read(fox, add_special_tokens=False)

    assert made == [2]
    assert len(caches(read.folder)) == 2


def test_a_list_and_its_iterator_share_a_cache(fox, read, made):
    """They are the same data; a file of the same text is not."""
    found = [read(fox), read(["the fox"]), read(iter(["the fox"]))]

    assert found == [[ids_of("the fox")]] * 3
    assert made == [2]
    assert len(caches(read.folder)) == 2


def test_a_file_is_cached_with_its_suffix(tmp_path, read):
    """The same bytes are a text in one file, and JSON in the other."""
    lines = tmp_path / "b.txt"
    objects = tmp_path / "b.jsonl"
    lines.write_text('{"text": "the fox"}\n')
    objects.write_text('{"text": "the fox"}\n')

    assert read(lines) == [ids_of('{"text": "the fox"}')]
    assert read(objects) == [ids_of("the fox")]


def test_conversations_are_cached_with_their_template(read):
    """Of one tokenizer, which gets another template."""
    other = make_other()
    texts = []
    for source in (CHATML, ZEPHYR):
        other.chat_template = source
        (row,) = read([{"messages": CHAT}], columns="messages", chat_template=JinjaTemplate(other))
        texts.append(TOKENIZER.decode(row))

    assert ["<|im_start|>" in text for text in texts] == [True, False]


def test_conversations_are_cached_with_the_order_of_their_tools(read):
    """Templates write keys in their order."""
    options = {"columns": "messages", "chat_template": chatml}
    functions = [{"name": "f", "parameters": each} for each in ({"a": 1, "b": 2}, {"b": 2, "a": 1})]
    sources = [[{"messages": CHAT, "tools": [{"type": "function", "function": each}]}] for each in functions]

    assert [read(each, **options) for each in sources] == [
        rows_of(load_tokens(TOKENIZER, each, **options).batch([0])) for each in sources
    ]


@pytest.mark.parametrize("damage", ["cut", "flip", "other", "empty"])
def test_a_damaged_cache_is_made_again(tmp_path, made, damage):
    """A cut or altered file, or one of other data under its name, is not used."""
    texts = ["the quick brown fox " * 20] * 50
    load_tokens(TOKENIZER, texts, cache_dir=tmp_path)
    (path,) = caches(tmp_path)
    whole = path.read_bytes()
    tdf.save(tdf.TensorDict({"columns": torch.zeros(2)}), tmp_path / "other.safetensors")
    contents = {
        "cut": whole[:-50],
        "flip": whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:],
        "other": (tmp_path / "other.safetensors").read_bytes(),
        "empty": b"",
    }
    path.write_bytes(contents[damage])

    data = load_tokens(TOKENIZER, texts, cache_dir=tmp_path)

    assert made == [2]
    assert rows_of(data.batch([0, 49])) == [ids_of(texts[0])] * 2
    assert path.read_bytes() == whole


def test_data_that_change_while_they_are_read_are_refused(tmp_path, monkeypatch):
    """A file that gets another line between its digest and its tokens makes no cache."""
    path = tmp_path / "a.txt"
    path.write_text("the fox\n")
    tokenize = module._tokenize

    def late(*args):
        path.write_text("the dog\n")
        return tokenize(*args)

    monkeypatch.setattr(module, "_tokenize", late)
    with pytest.raises(ConcurrencyError, match="changed while it was read"):
        load_tokens(TOKENIZER, path, cache_dir=tmp_path / "cache")

    assert not caches(tmp_path / "cache")


def test_an_error_leaves_nothing_behind(tmp_path):
    """A bad record makes no cache, and no temporary file."""
    with pytest.raises(TypeError, match=r"Record 1: 'text' is not a text"):
        load_tokens(TOKENIZER, [{"text": "a"}, {"text": 1}], cache_dir=tmp_path)

    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_threads_make_one_cache(tmp_path, made):
    """Threads that need the same cache wait for the first."""
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(load_tokens, TOKENIZER, TEXTS, cache_dir=tmp_path) for _ in range(4)]
        found = [rows_of(job.result(timeout=60).batch(range(5))) for job in jobs]

    assert found == [[ids_of(text) for text in TEXTS]] * 4
    assert made == [1]


def test_lines_that_are_not_objects_are_named(tmp_path):
    """The number of the line is in the message."""
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n[1]\n')
    with pytest.raises(ValueError, match="line 2 is not a JSON obj"):
        load_tokens(TOKENIZER, tmp_path / "a.jsonl")


@settings(max_examples=30, deadline=None)
@pytest.mark.filterwarnings("ignore:.* rows are left out")
@given(
    st.lists(st.tuples(st.text("the fox ", max_size=8), st.text("the fox ", min_size=6, max_size=12)), min_size=1),
    st.sampled_from([None, 2, 4]),
    st.sampled_from(["left", "right"]),
    st.sampled_from(["left", "right"]),
)
def test_the_first_token_of_a_row_is_never_trained(pairs, length, padding, truncation):
    """Nothing predicts it: it has no log-prob, behind an empty prompt as behind a truncation at the left."""
    records = [{"prompt": prompt, "response": response} for prompt, response in pairs]
    data = load_tokens(TOKENIZER, records, columns=("prompt", "response"), add_special_tokens=False)
    options = {"truncation": length is not None, "max_length": length, "truncation_side": truncation}

    try:
        batch = data.batch(range(len(data)), padding_side=padding, untrained="drop", **options)
    except ValueError:
        # No row is left.
        assume(False)

    real = batch["attention_mask"]
    is_first = real & (real.cumsum(-1) == 1)
    lost = [not bool(data[i]["assistant_masks"][:1].any()) for i in range(len(data))]
    assert not (batch["assistant_masks"] & is_first).any()
    assert all(lost)


@pytest.mark.parametrize(
    ("suffix", "lines"), [(".jsonl", '{"text": "fox"}\n{"text": "dog"}\n'), (".txt", "fox\ndog\n")]
)
def test_a_mark_at_the_start_of_a_file_is_no_text(suffix, lines, tmp_path):
    """Programs of Windows write it in front of UTF-8."""
    (path := tmp_path / f"a{suffix}").write_text(lines, encoding="utf-8-sig")

    assert [record["text"] for record in read_records(path)] == ["fox", "dog"]


@pytest.mark.parametrize("mask", [torch.tensor([False, True, True]), [False, True, True]], ids=["tensor", "list"])
def test_a_mask_does_not_number_rows(mask):
    """Its bools would be rows 0 and 1."""
    data = load_tokens(TOKENIZER, ["a", "b", "c"])

    with pytest.raises(TypeError, match="is a bool"):
        data.batch(mask)


@pytest.mark.parametrize(("start", "kind"), [(-1, ValueError), (0.5, TypeError)])
def test_the_first_batch_is_a_count(start, kind):
    """-1 would be the last rows alone."""
    data = load_tokens(TOKENIZER, ["a", "b", "c"])

    with pytest.raises(kind, match="batches: start"):
        data.batches(1, start=start)


SYSTEM = {"role": "system", "content": "be red"}
TURNS = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]


@pytest.mark.parametrize("name", ["conversations", "messages"])
def test_the_entry_system_is_the_first_message(name):
    """Records of ShareGPT have it beside the conversation; without it, a model learns to do without instructions."""
    records = [{"system": "be red", name: TURNS}, {name: [SYSTEM, *TURNS]}]
    found, wanted = load_tokens(TOKENIZER, records, columns=name, chat_template=chatml)

    assert torch.equal(found["input_ids"], wanted["input_ids"])


def test_a_history_begins_with_the_entry_system():
    """Every reader of conversations reads it."""
    found = History.from_chats({"system": "be red", "conversations": TURNS})
    assert found.to_chats() == History.from_chats([SYSTEM, *TURNS]).to_chats()


@pytest.mark.parametrize(
    ("chat", "cls", "pattern"),
    [
        ({"system": 3, "messages": TURNS}, TypeError, "the entry 'system' is not a text"),
        ({"system": "be red", "messages": [SYSTEM, *TURNS]}, ValueError, "has an entry 'system', and begins with"),
    ],
)
def test_an_entry_system_that_cannot_be_read(chat, cls, pattern):
    """One of two instructions would be a guess."""
    with pytest.raises(cls, match=pattern):
        History.from_chats(chat)
