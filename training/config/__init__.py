"""The configuration of a run. Values live in configs/ (YAML), types here and beside their owners in data/ and model/.

Nothing changes a config after it is built.
"""

from training.config.machine import (
    ActivationCheckpointing,
    CheckpointConfig,
    DeviceName,
    EvaluationConfig,
    KernelsConfig,
    LoggingConfig,
    ParallelConfig,
    ProfilerConfig,
    RunSection,
    WandbMode,
)
from training.config.maths import (
    BalanceScope,
    OptimConfig,
    OptimizerStates,
    Precision,
    RampStage,
    Schedule,
    TrainConfig,
)
from training.config.run import CONFIGS, RunConfig, check_choices, register_schemas

__all__ = [
    "CONFIGS",
    "ActivationCheckpointing",
    "BalanceScope",
    "CheckpointConfig",
    "DeviceName",
    "EvaluationConfig",
    "KernelsConfig",
    "LoggingConfig",
    "OptimConfig",
    "OptimizerStates",
    "ParallelConfig",
    "Precision",
    "ProfilerConfig",
    "RampStage",
    "RunConfig",
    "RunSection",
    "Schedule",
    "TrainConfig",
    "WandbMode",
    "check_choices",
    "register_schemas",
]
