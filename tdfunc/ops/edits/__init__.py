"""New trees by edits of keys, rows, leaves and structure; the writes into existing storage."""
