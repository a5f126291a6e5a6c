"""Tokenizers of the kinds that treat the start of a text, or tokens around it, each in its own way; trained here."""

import functools
import json

from tests.llm.tokens import make_tokenizer, tokenizers, transformers

TRAINED = ["The fox Sure yes hello", "user assistant jumps over the lazy dog", "Q: A: [INST] [/INST]"] * 20
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
ALPHABET = [chr(i) for i in range(32, 127)] + ["\n"]
# BOS comes from the template, as in most templates of the hub.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    "{% else %}[INST] {{ m.content }} [/INST]\n{% endif %}{% endfor %}"
)


def around(made, single):
    """Put special tokens around each text."""
    ids = [(token, made.token_to_id(token)) for token in ("<s>", "</s>")]
    made.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=ids)


def as_transformers(made, **options):
    """A tokenizer of transformers with a template."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | options
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def metaspace(scheme=None, single=None):
    """A SentencePiece-like tokenizer; without a scheme, the older form with a normalizer (Llama 2)."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme or "first")
    made.decoder = tokenizers.decoders.Metaspace(prepend_scheme=scheme or "first")
    options = {"vocab_size": 240, "initial_alphabet": ALPHABET, "special_tokens": SPECIAL, "show_progress": False}
    made.train_from_iterator(TRAINED, tokenizers.trainers.BpeTrainer(**options))
    if scheme is None:
        replace = tokenizers.normalizers.Replace(" ", "▁")
        made.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend("▁"), replace])
        made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([])
        parts = [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
        made.decoder = tokenizers.decoders.Sequence(parts)
    if single:
        around(made, single)
    return as_transformers(made)


def fallback():
    """Characters without a token are written by their bytes, which the trainer got as special tokens."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True))
    replace = tokenizers.normalizers.Replace(" ", "▁")
    made.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend("▁"), replace])
    options = {"vocab_size": 400, "special_tokens": [*SPECIAL, *byte_tokens], "show_progress": False}
    made.train_from_iterator(TRAINED, tokenizers.trainers.BpeTrainer(**options))
    return as_transformers(made)


def word_pieces():
    """Words in pieces, which `##` continues, with a token at each side."""
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.decoder = tokenizers.decoders.WordPiece(cleanup=False)
    options = {"vocab_size": 240, "initial_alphabet": ALPHABET, "special_tokens": SPECIAL, "show_progress": False}
    made.train_from_iterator(TRAINED, tokenizers.trainers.WordPieceTrainer(**options))
    around(made, "<s> $A </s>")
    return as_transformers(made)


def byte_level(single=None, *, is_stripped=False):
    """Bytes in pieces; with `is_stripped`, control tokens that remove the spaces behind them (Phi-3)."""
    made = make_tokenizer(special=SPECIAL[1:], plain=[], pad_token=None).backend_tokenizer
    if is_stripped:
        made.add_special_tokens([tokenizers.AddedToken("</s>", rstrip=True), tokenizers.AddedToken("]", rstrip=True)])
    if single:
        around(made, single)
    return as_transformers(made, unk_token=None)


def letters(single="<s> $A </s>"):
    """Four letters and no token for others, which are dropped: DNA."""
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={token: i for i, token in enumerate([*SPECIAL, *"ACGT"])}, merges=[])
    )
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens(SPECIAL)
    around(made, single)
    return as_transformers(made)


def normalized(normalizer):
    """Control tokens that are found in the normalized text."""
    data = json.loads(byte_level("<s> $A").backend_tokenizer.to_str())
    for token in data["added_tokens"]:
        token["normalized"] = True
    made = tokenizers.Tokenizer.from_str(json.dumps(data))
    made.normalizer = normalizer
    return as_transformers(made, unk_token=None)


def unigram():
    """Pieces with scores, of which control tokens are some, behind NFKC (T5, llm-jp)."""
    pieces = [(token, 0.0) for token in SPECIAL] + [(each, -8.0) for each in [*ALPHABET, "▁"]]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 0))
    made.normalizer = tokenizers.normalizers.NFKC()
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = tokenizers.decoders.Metaspace(prepend_scheme="always")
    made.add_special_tokens(SPECIAL)
    around(made, "$A </s>")
    return as_transformers(made)


KINDS = {
    "bytes": byte_level,
    "bytes with BOS": lambda: byte_level("<s> $A"),
    "bytes with BOS and EOS": lambda: byte_level("<s> $A </s>"),
    "bytes, stripping": lambda: byte_level(is_stripped=True),
    "metaspace first": lambda: metaspace("first"),
    "metaspace first with BOS": lambda: metaspace("first", "<s> $A"),
    "metaspace always with BOS": lambda: metaspace("always", "<s> $A"),
    "metaspace always with BOS and EOS": lambda: metaspace("always", "<s> $A </s>"),
    "Llama 2": lambda: metaspace(None, "<s> $A"),
    "word pieces": word_pieces,
}


@functools.cache
def tokenizer_of(kind):
    """The tokenizer of a kind, made once."""
    return KINDS[kind]()
