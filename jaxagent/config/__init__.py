"""The config schema: every field, its type, its range and its meaning. No values: those stand in `configs/*.py`.

A config file's `get_config(preset)` returns an `ml_collections.ConfigDict`. `parse(config)` checks it against
these frozen dataclasses *before any device work* and converts it once, so that the rest of the code reads
`cfg.rl.group_size` and never a default. Errors are `ConfigError`s of one line that name the nearest valid field.
Imports nothing slow: `--help` and config errors answer at once.
"""

from jaxagent.config.env import Columns as Columns
from jaxagent.config.env import DataConfig as DataConfig
from jaxagent.config.env import EnvConfig as EnvConfig
from jaxagent.config.env import RoleConfig as RoleConfig
from jaxagent.config.env import SandboxConfig as SandboxConfig
from jaxagent.config.env import SoftwareConfig as SoftwareConfig
from jaxagent.config.env import SourceConfig as SourceConfig
from jaxagent.config.env import WorkersConfig as WorkersConfig
from jaxagent.config.errors import ConfigError as ConfigError
from jaxagent.config.errors import nearest as nearest
from jaxagent.config.fleet import FleetConfig as FleetConfig
from jaxagent.config.model import MODEL_SHAPE as MODEL_SHAPE
from jaxagent.config.model import BatchConfig as BatchConfig
from jaxagent.config.model import EngineConfig as EngineConfig
from jaxagent.config.model import LoraConfig as LoraConfig
from jaxagent.config.model import MeshConfig as MeshConfig
from jaxagent.config.model import ModelConfig as ModelConfig
from jaxagent.config.model import OptimizerConfig as OptimizerConfig
from jaxagent.config.model import check_folder as check_folder
from jaxagent.config.parse import modern as modern
from jaxagent.config.parse import parse as parse
from jaxagent.config.parse import to_dict as to_dict
from jaxagent.config.run import LEAST_TEMPERATURE as LEAST_TEMPERATURE
from jaxagent.config.run import Config as Config
from jaxagent.config.run import DistillConfig as DistillConfig
from jaxagent.config.run import EchoConfig as EchoConfig
from jaxagent.config.run import EntropyControlConfig as EntropyControlConfig
from jaxagent.config.run import EpisodesConfig as EpisodesConfig
from jaxagent.config.run import KLConfig as KLConfig
from jaxagent.config.run import OPDConfig as OPDConfig
from jaxagent.config.run import OversampleConfig as OversampleConfig
from jaxagent.config.run import PositiveNLLConfig as PositiveNLLConfig
from jaxagent.config.run import RefillConfig as RefillConfig
from jaxagent.config.run import ReplayConfig as ReplayConfig
from jaxagent.config.run import ResumeConfig as ResumeConfig
from jaxagent.config.run import RLConfig as RLConfig
from jaxagent.config.run import RoutingConfig as RoutingConfig
from jaxagent.config.run import SamplingConfig as SamplingConfig
from jaxagent.config.run import Stage as Stage
from jaxagent.config.run import TemperatureConfig as TemperatureConfig
from jaxagent.config.stages import OfflineConfig as OfflineConfig
