"""The earlier name of `python -m jaxagent.envs.check`, with the same flags."""

from __future__ import annotations

import sys

from jaxagent.envs.check import main

if __name__ == "__main__":
    sys.exit(main())
