"""`python -m tdfunc` is the command `tdfunc`."""

from tdfunc.cli import main

main()
