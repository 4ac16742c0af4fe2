from .commands import CommandCollector as CommandCollector, Deferred as Deferred
from .distribution import (
    Block as Block,
    DistributedPlan as DistributedPlan,
    LaunchEntry as LaunchEntry,
    World as World,
)
from .faults import (
    FaultAction as FaultAction,
    GpuFault as GpuFault,
)
from .findings import (
    Finding as Finding,
    FindingLevel as FindingLevel,
)
from .progress import (
    Outcome as Outcome,
    RankInfo as RankInfo,
    RunInfo as RunInfo,
    RunState as RunState,
    StepBoundary as StepBoundary,
    StepResult as StepResult,
    StopReason as StopReason,
)
from .registered import (
    CacheEntry as CacheEntry,
    CheckpointFormat as CheckpointFormat,
    Cleared as Cleared,
    FamilyEntry as FamilyEntry,
    MetadataEntry as MetadataEntry,
    OptimizerEntry as OptimizerEntry,
    Origin as Origin,
    Registered as Registered,
    StorageEntry as StorageEntry,
)
from .results import (
    Checkpoint as Checkpoint,
    EvaluationResult as EvaluationResult,
    ValidationImage as ValidationImage,
    ValidationResult as ValidationResult,
)
from .strategies import (
    Communication as Communication,
    FrozenStorage as FrozenStorage,
    Part as Part,
    Recompute as Recompute,
    Strategy as Strategy,
)
