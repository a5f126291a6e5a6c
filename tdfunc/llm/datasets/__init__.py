"""Data sets of tokens: records of files, tokenized once, as rows of texts, prompts and pairs."""
