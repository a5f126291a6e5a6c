"""`find_template`: the template of a call, by name, by text or from the tokenizer."""

from collections.abc import Mapping
from typing import Any

from tdfunc.core.errors import brief, error
from tdfunc.core.keys import did_you_mean
from tdfunc.llm.templates.base import AbstractTemplate
from tdfunc.llm.templates.jinja import JinjaTemplate, renders_itself
from tdfunc.llm.templates.named import TEMPLATES


# Any: a tokenizer or processor of transformers.
def find_template(
    template: "AbstractTemplate | str | None", tokenizer: Any = None, options: Mapping[str, Any] | None = None
) -> AbstractTemplate:
    """Return a template: the given one, a template by name or in Jinja, or the tokenizer's own.

    Raises:
        ValueError: No template has the name, the tokenizer has no template, or the template does not accept `options`.
        TypeError: There is neither a template nor a tokenizer.
    """
    if isinstance(template, str) and template in TEMPLATES:
        template = TEMPLATES[template]
    if isinstance(template, AbstractTemplate):
        if options:
            raise error(
                ValueError,
                f"apply_chat_template: {next(iter(options))!r} is not an option of {type(template).__name__}.",
                hint="options of a template in Python are arguments of its class, as in ChatML(drop_thinking=True).",
            )
        return template
    if tokenizer is None:
        hint = did_you_mean(template, list(TEMPLATES)) if isinstance(template, str) else None
        raise error(
            TypeError,
            "neither a template nor a tokenizer is given.",
            expected=f"one of {list(TEMPLATES)}, a template, or tokenizer=",
            got=brief(template),
            hint=hint,
        )
    own = getattr(tokenizer, "chat_template", None)
    if template is None:
        if own is None and not renders_itself(tokenizer):
            raise error(
                ValueError,
                f"{type(tokenizer).__name__} has no chat template.",
                expected=f"chat_template_name= one of {list(TEMPLATES)}, or chat_template=",
                hint='chat_template_name="chatml", which is common where a model was not trained on conversations.',
            )
    else:
        is_jinja = "{" in template
        is_named = isinstance(own, dict) and template in own
        if not is_jinja and not is_named:
            raise error(
                ValueError,
                f"the template {brief(template)} does not exist.",
                expected=f"one of {list(TEMPLATES)}, or a text in Jinja",
                hint=did_you_mean(template, list(TEMPLATES)),
            )
    return JinjaTemplate(tokenizer, template, dict(options or {}))
