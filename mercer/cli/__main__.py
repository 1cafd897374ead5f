"""`python -m mercer.cli`, which is how torchrun starts the command line."""

import sys

from mercer.cli import main

if __name__ == "__main__":
    sys.exit(main())
