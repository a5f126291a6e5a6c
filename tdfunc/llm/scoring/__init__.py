"""Log-probs and logits of given tokens under a Hugging Face model."""
