from .build_run import (
    assemble as assemble,
    become_run as become_run,
    begin as begin,
    build as build,
    build_model as build_model,
    build_optimizer as build_optimizer,
    open_parallel as open_parallel,
    wrap_model as wrap_model,
)
from .checkpointing import save as save
from .ddp_parallel import DdpParallel as DdpParallel
from .failures.attempts import (
    AttemptFailed as AttemptFailed,
    attempt as attempt,
    computed as computed,
    on_all_ranks as on_all_ranks,
)
from .failures.fault_watch import FaultWatch as FaultWatch
from .failures.out_of_memory import memory_explained as memory_explained
from .failures.step_times import StepTimes as StepTimes
from .failures.watchdog import LEAVE_SECONDS as LEAVE_SECONDS, Watchdog as Watchdog
from .loss import DenoisingLoss as DenoisingLoss, denoising_loss as denoising_loss
from .metrics import broadcast_running_stats as broadcast_running_stats, log_metrics as log_metrics
from .optim.ema import (
    WeightAverage as WeightAverage,
    grouped as grouped,
    local_part as local_part,
    local_parts as local_parts,
)
from .optim.optimizers import (
    AdamW as AdamW,
    build_registered as build_registered,
    decouple_decay as decouple_decay,
    matrices as matrices,
    parameter_groups as parameter_groups,
)
from .periodic import is_due as is_due, periodic_work as periodic_work
from .resume import check_adapter as check_adapter
from .resume_checks import check_resumable as check_resumable
from .run import Context as Context, PeriodicWork as PeriodicWork, Run as Run, StepsInBackward as StepsInBackward
from .terms import (
    POLICY as POLICY,
    SecondCaption as SecondCaption,
    Step as Step,
    Term as Term,
    Turn as Turn,
    lacks_base as lacks_base,
)
from .trainer import train as train, train_step as train_step
