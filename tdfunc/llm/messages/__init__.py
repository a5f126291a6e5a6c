"""Messages: their fields, their contents, and a `History` as the messages of its conversations."""
