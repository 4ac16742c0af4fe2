from .objective import (
    PUBLISHED_BETAS as PUBLISHED_BETAS,
    STEPS as STEPS,
    BetaSchedule as BetaSchedule,
    Conditioning as Conditioning,
    Objective as Objective,
    Prediction as Prediction,
    RandomColumn as RandomColumn,
    RectifiedFlow as RectifiedFlow,
    SampleNoise as SampleNoise,
    build_objective as build_objective,
)
from .sampling import Sampler as Sampler, seeded_noise as seeded_noise
from .timesteps import (
    ConstantShift as ConstantShift,
    Distribution as Distribution,
    ResolutionShift as ResolutionShift,
    Shift as Shift,
    TimestepSampler as TimestepSampler,
    build_timesteps as build_timesteps,
)
from .weighting import Weighting as Weighting, build_weighting as build_weighting
