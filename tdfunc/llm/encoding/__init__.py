"""Token ids of texts and of rendered conversations, cut and padded; the tokenizer is read, never changed."""
