"""The core's own options, section by section. Plugins declare theirs in the same way.

Names are the reference trainer's where it has the feature, so that its users' files keep working.
"""

from __future__ import annotations

from smalti.config.core_options.data import DataOptions
from smalti.config.core_options.launch import LaunchOptions
from smalti.config.core_options.model import ModelOptions
from smalti.config.core_options.run import CheckpointOptions, PluginOptions, RunOptions, TrackingOptions
from smalti.config.core_options.training import ObjectiveOptions, OptimizerOptions, TrainingOptions, implied_settings
from smalti.config.options import OptionGroup

GROUPS = (
    OptionGroup(name="run", title="Run", options=RunOptions),
    OptionGroup(name="model", title="Model", options=ModelOptions),
    OptionGroup(name="data", title="Data", options=DataOptions),
    OptionGroup(name="training", title="Training", options=TrainingOptions),
    OptionGroup(name="optimizer", title="Optimizer", options=OptimizerOptions, derived=implied_settings),
    OptionGroup(name="objective", title="Objective", options=ObjectiveOptions),
    OptionGroup(name="checkpoints", title="Checkpoints", options=CheckpointOptions),
    OptionGroup(name="launch", title="Launch", options=LaunchOptions),
    OptionGroup(name="tracking", title="Tracking", options=TrackingOptions),
    OptionGroup(name="plugins", title="Plugins", options=PluginOptions),
)
