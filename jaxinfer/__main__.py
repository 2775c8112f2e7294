"""``python -m jaxinfer``: the same as the command ``jaxinfer``."""

import sys

from jaxinfer.cli import main

if __name__ == "__main__":
    sys.exit(main())
