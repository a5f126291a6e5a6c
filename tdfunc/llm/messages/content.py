"""`ContentBase`: one part of a multimodal message, as a typed value.

A message keeps its parts as the dicts that templates and servers take; this class makes and reads them.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from tdfunc._tensorclass import TensorClass
from tdfunc.core.errors import brief, error

# The types of parts that have their values in a nested dict, and the names of the values there.
_NESTED: dict[str, dict[str, str]] = {
    "image_url": {"url": "url"},
    "video_url": {"url": "url"},
    "audio_url": {"url": "url"},
    "input_audio": {"data": "data", "mime_type": "format"},
    "file": {"data": "file_data", "name": "filename"},
}


class ContentBase(TensorClass, nocast=True, shadow=True):
    """One part of a message: text, an image, audio, a file, or a call.

    `History(content=...)` accepts one part (or several, along a batch dimension) and stores it as OpenAI's dicts.

    Args:
        type: The kind of the part: "text", "image", "image_url", "input_audio", ...
        text: The text of a part of type "text".
        url: The address of the data.
        data: The data themselves, such as base64 text.
        mime_type: The format of the data; "wav" or "mp3" for "input_audio".
        name: The name of a file.
        size: The size of a file in bytes.
        function_name: The function of a call.
        function_args: The arguments of a call.

    Examples:
        >>> image = ContentBase(type="image_url", url="https://example.com/cat.png")
        >>> image.to_parts()
        [{'type': 'image_url', 'image_url': {'url': 'https://example.com/cat.png'}}]
        >>> ContentBase.from_parts(image.to_parts())[0].url
        'https://example.com/cat.png'
    """

    # With the option "shadow", methods of these names are called through the class.
    type: str  # pyright: ignore[reportIncompatibleMethodOverride]
    text: str | None = None
    url: str | None = None
    data: Any = None
    mime_type: str | None = None
    name: str | None = None
    size: int | None = None  # pyright: ignore[reportIncompatibleMethodOverride]
    function_name: str | None = None
    function_args: dict[str, Any] | None = None

    def to_parts(self) -> list[dict[str, Any]]:
        """Return the part, or the parts along the batch, as OpenAI's dicts."""
        if self._batch_size:
            return [part for row in self.unbind(0) for part in row.to_parts()]
        values = {name: self._get(name).value for name in self._fields if name in self._keys()}
        kind = values.pop("type")
        theirs = _NESTED.get(kind, {})
        nested: dict[str, Any] = {}
        flat: dict[str, Any] = {}
        for name, value in values.items():
            if value is None:
                continue
            if name in theirs:
                nested[theirs[name]] = value
            else:
                flat[name] = value
        if nested:
            return [{"type": kind, kind: nested, **flat}]
        return [{"type": kind, **flat}]

    @classmethod
    def from_parts(cls, parts: Iterable[Mapping[str, Any]]) -> "list[ContentBase]":
        """Return a value for each of OpenAI's dicts.

        Raises:
            TypeError: A part is not a dict with a type, or has an entry that is not a field.
        """
        return [cls(**_read_part(part)) for part in parts]


def _read_part(part: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise error(TypeError, "a part of a content is not a dict with a type.", got=brief(part))
    kind: str = part["type"]
    entries: dict[str, Any] = dict(part)
    if kind in _NESTED and isinstance(entries.get(kind), Mapping):
        nested: Mapping[str, Any] = entries.pop(kind)
        ours_of = {theirs: ours for ours, theirs in _NESTED[kind].items()}
        for name, value in nested.items():
            entries[ours_of.get(name, name)] = value
    unknown = sorted(entries.keys() - set(ContentBase._fields))
    if unknown:
        raise error(
            TypeError,
            f"ContentBase has no field {unknown[0]!r}.",
            expected=str(list(ContentBase._fields)),
            got=brief(part),
        )
    return entries


# Any: a str, parts, or an instance (or list of them) of the class above.
def as_content(value: Any) -> Any:
    """Return the content of a message as text, a list of dicts, or None."""
    if isinstance(value, ContentBase):
        return value.to_parts()
    if isinstance(value, Mapping):
        return [dict(value)]
    if isinstance(value, (list, tuple)):
        parts: list[Any] = []
        for item in value:
            parts += item.to_parts() if isinstance(item, ContentBase) else [item]
        return parts
    return value


def texts_of(content: Any) -> list[Any]:
    """Return the text of each part of a content; None for a part that is something else."""
    if content is None or isinstance(content, str):
        return [content or ""]
    return [part if isinstance(part, str) else part.get("text") for part in content]


def text_of(content: Any) -> str | None:
    """Return the text of a content; None if a part is something else than text."""
    texts = texts_of(content)
    if all([isinstance(text, str) for text in texts]):
        return "".join(texts)
    return None
