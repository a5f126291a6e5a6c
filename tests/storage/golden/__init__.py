"""Files that an earlier version wrote, and the trees in them: what was saved once must load in every later version.

`version_1/` was written by `python -m tests.storage.golden FOLDER`: the first formats of files and folders.
"""
