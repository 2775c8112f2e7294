"""`python -m jaxinfer.cli`, the same as the `jaxinfer` command."""

import sys

from jaxinfer.cli import main

sys.exit(main())
