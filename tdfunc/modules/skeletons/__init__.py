"""Private copies of modules: what is copied, what a call may write, and how it is undone."""
