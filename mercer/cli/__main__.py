"""`python -m mercer.cli`, which is how torchrun starts the command line."""

import sys

from mercer.cli import main

sys.exit(main())
