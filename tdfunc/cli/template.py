"""`tdfunc template check`: the report on the chat template of a tokenizer in a folder."""

import os
from typing import Any

from tdfunc.cli.output import Table, print_json, print_table, safe
from tdfunc.core.errors import error
from tdfunc.llm.conversations.report import template_report

_MARKS = {True: "ok", False: "!!", None: "--"}


# Any: without stubs.
def load_tokenizer(folder: str, call: str) -> Any:
    """Return the tokenizer in a folder, or raise if there is none. No server is asked, and no code of it runs."""
    try:
        from transformers import AutoTokenizer
    except ImportError as err:
        raise error(ImportError, f"{call} requires transformers.", hint='pip install "tdfunc[llm]".') from err
    os.listdir(folder)
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def check(folder: str, *, as_json: bool) -> int:
    """Print the report; return 1 if a property may go wrong.

    Raises:
        ValueError: The tokenizer has no chat template.
    """
    tokenizer = load_tokenizer(folder, "template check")
    if tokenizer.chat_template is None:
        raise error(ValueError, f"{folder}: the tokenizer has no chat template.")
    checks = template_report(tokenizer).checks
    if as_json:
        print_json({each.name: {"good": each.good, "detail": each.detail} for each in checks})
    else:
        rows = [(_MARKS[each.good], each.name, safe(each.detail)) for each in checks]
        print_table(Table(("", "property", "finding"), rows))
    return int(any(each.good is False for each in checks))
