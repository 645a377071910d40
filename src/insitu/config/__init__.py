"""The YAML file as typed models. Nothing here imports torch, an HTTP library or a component."""

from insitu.config.config import Config
from insitu.config.curriculum import CurriculumConfig
from insitu.config.differences import comparable, differences, fingerprint
from insitu.config.dump import dump_config, to_yaml
from insitu.config.eval import EvalConfig, EvalGeneral, EvalOutput
from insitu.config.finetuning import EarlyStopping, FinetuningConfig, RewardFunction, RunConfiguration
from insitu.config.llms import LLMConfig
from insitu.config.load import LoadedConfig, load_config, parse_config

__all__ = [
    "Config",
    "CurriculumConfig",
    "EarlyStopping",
    "EvalConfig",
    "EvalGeneral",
    "EvalOutput",
    "FinetuningConfig",
    "LLMConfig",
    "LoadedConfig",
    "RewardFunction",
    "RunConfiguration",
    "comparable",
    "differences",
    "dump_config",
    "fingerprint",
    "load_config",
    "parse_config",
    "to_yaml",
]
