"""Folders of PEFT and files in Kohya's names, with the outputs that PEFT and plain torch compute from them."""
