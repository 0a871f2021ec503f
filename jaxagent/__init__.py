"""jaxagent: reinforcement learning of language-model agents in JAX."""

import os as _os
import pathlib as _pathlib
import sys as _sys

__version__ = "0.1.0"

# Presets, launchers and data pipelines are subpackages: jaxagent.configs, jaxagent.launch, jaxagent.data_pipelines.
# A wheel carries them inside this folder; in a checkout they lie beside it.
if not (_pathlib.Path(__file__).parent / "configs").is_dir():
    __path__.append(str(_pathlib.Path(__file__).parents[1]))


def _interrupted(kind, error, trace):
    if issubclass(kind, KeyboardInterrupt):
        _os.write(2, b"interrupted\n")
        _os._exit(130)
    _sys.__excepthook__(kind, error, trace)


if _sys.argv[0] == "-m":  # a command of this package is being loaded, which takes seconds: Ctrl-C before it listens
    _sys.excepthook = _interrupted
