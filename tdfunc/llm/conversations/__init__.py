"""`History` and `ChatHistory`, conversations whose token ids only grow, and files of conversations."""
