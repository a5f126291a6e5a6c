"""The files of adapters: PEFT's folders, which are read and written, and Kohya's files, which are read."""
