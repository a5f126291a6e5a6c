"""Rows of token ids out of trees, and trees of the results: conversations, texts and tokens in any layout."""
