from .distribution import (
    Block as Block,
    DistributedPlan as DistributedPlan,
    LaunchEntry as LaunchEntry,
    World as World,
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
    CommandCollector as CommandCollector,
    Communication as Communication,
    Deferred as Deferred,
    FamilyEntry as FamilyEntry,
    FrozenStorage as FrozenStorage,
    MetadataEntry as MetadataEntry,
    OptimizerEntry as OptimizerEntry,
    Origin as Origin,
    Part as Part,
    Recompute as Recompute,
    Registered as Registered,
    ScanEntry as ScanEntry,
    StorageEntry as StorageEntry,
    Strategy as Strategy,
)
from .results import (
    Checkpoint as Checkpoint,
    EvaluationResult as EvaluationResult,
    FaultAction as FaultAction,
    Finding as Finding,
    FindingLevel as FindingLevel,
    GpuFault as GpuFault,
    ValidationImage as ValidationImage,
    ValidationResult as ValidationResult,
)
