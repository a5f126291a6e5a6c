"""`python -m tdfunc` is the command `tdfunc`."""

from tdfunc.cli import main

if __name__ == "__main__":
    main()
