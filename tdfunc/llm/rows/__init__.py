"""Rows of token ids: read from trees, packed, and written to trees of tokens, masks and log-probs."""
