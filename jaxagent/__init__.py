"""jaxagent: reinforcement learning of language-model agents in JAX."""

import pathlib as _pathlib

# Presets, launchers and data pipelines are subpackages: jaxagent.configs, jaxagent.launch, jaxagent.data_pipelines.
# A wheel carries them inside this folder; in a checkout they lie beside it.
if not (_pathlib.Path(__file__).parent / "configs").is_dir():
    __path__.append(str(_pathlib.Path(__file__).parents[1]))
