"""`ChatHistory`: conversations as a model reads them, its replies, and both together."""

from tdfunc._tensorclass import TensorClass
from tdfunc.llm.history import History


class ChatHistory(TensorClass["nocast"]):  # pyright: ignore[reportInvalidTypeArguments, reportUntypedBaseClass]
    """Conversations, one for each element of the batch; the histories have a further dimension of messages.

    Args:
        prompt: The conversations that the model reads.
        response: The messages that it wrote.
        full: Both.

    Examples:
        >>> prompt = History.from_chats([[{"role": "user", "content": "hi"}]])
        >>> reply = History.from_chats([[{"role": "assistant", "content": "hello"}]])
        >>> chats = ChatHistory(prompt=prompt, response=reply, full=prompt.extend(reply), batch_size=[1])
        >>> chats[0].full.content
        ['hi', 'hello']
    """

    prompt: History | None = None
    response: History | None = None
    full: History | None = None
