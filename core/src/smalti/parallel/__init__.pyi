from .accelerator import (
    pins_memory as pins_memory,
    side_stream as side_stream,
    to_device as to_device,
    use_device as use_device,
)
from .collective import (
    Boundary as Boundary,
    RankError as RankError,
    run_on_all_ranks as run_on_all_ranks,
    run_on_main_rank as run_on_main_rank,
)
from .device_models import (
    DeviceModel as DeviceModel,
    device_model_of as device_model_of,
    device_models as device_models,
)
from .devices import (
    ALLOCATOR_VARIABLES as ALLOCATOR_VARIABLES,
    ImageSize as ImageSize,
    accelerator_kind as accelerator_kind,
    cpu_notices as cpu_notices,
    describe_devices as describe_devices,
    native_bf16 as native_bf16,
)
from .failure_detection import (
    FailureDetector as FailureDetector,
    LostRankError as LostRankError,
    RankStatuses as RankStatuses,
    write_lost_report as write_lost_report,
)
from .gloo import (
    BrokenGroupError as BrokenGroupError,
    GlooCommunicator as GlooCommunicator,
    break_group as break_group,
    is_connection_error as is_connection_error,
)
from .late_ranks import RankWork as RankWork, describe_phases as describe_phases, describe_work as describe_work
from .precision import (
    Products as Products,
    choose_precision as choose_precision,
    cost_of as cost_of,
    describe as describe,
    in_bf16 as in_bf16,
    is_rocm as is_rocm,
    products as products,
)
from .process_group import (
    ProcessGroupParallel as ProcessGroupParallel,
    ReplicatedParallel as ReplicatedParallel,
    local_part as local_part,
)
from .protocol import (
    AbortableCommunicator as AbortableCommunicator,
    Communicator as Communicator,
    Parallel as Parallel,
    TrainingState as TrainingState,
)
from .rank_boards import ProgressBoard as ProgressBoard
from .state import (
    FlatRange as FlatRange,
    ModelState as ModelState,
    PortableState as PortableState,
    capture as capture,
    fill_param_groups as fill_param_groups,
    model_tensors as model_tensors,
    named_parameters as named_parameters,
    named_state as named_state,
    param_groups_of as param_groups_of,
    portable_name as portable_name,
    regrouped as regrouped,
    restore as restore,
    shape_of as shape_of,
)
