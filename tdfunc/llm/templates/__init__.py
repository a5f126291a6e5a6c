"""Chat templates as values: rendering, parsing, and the spans of contents and replies."""
