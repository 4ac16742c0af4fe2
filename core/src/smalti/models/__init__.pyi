from .attention import attention_kernel as attention_kernel, choose_attention as choose_attention
from .blocks import (
    CONTAINERS as CONTAINERS,
    BlockClass as BlockClass,
    Structure as Structure,
    count_parameters as count_parameters,
    find_blocks as find_blocks,
    repeated_classes as repeated_classes,
)
from .context_parallel import Attention as Attention, ContextPlan as ContextPlan, Join as Join, Split as Split
from .family import (
    Encoding as Encoding,
    ModelFamily as ModelFamily,
    SampleRequest as SampleRequest,
    context_plan as context_plan,
    latents_of as latents_of,
)
from .family_check import family_problems as family_problems
from .setup import (
    choose_tf32 as choose_tf32,
    compile_blocks as compile_blocks,
    config_of as config_of,
    ensure_compiled as ensure_compiled,
    products_in_tf32 as products_in_tf32,
    tf32_choice as tf32_choice,
    use_channels_last as use_channels_last,
    wants_channels_last as wants_channels_last,
)
from .size_conditioning import SizeConditioning as SizeConditioning
from .weights import (
    FolderWeights as FolderWeights,
    PostLoadTransform as PostLoadTransform,
    SeededWeights as SeededWeights,
    Weights as Weights,
    check_names as check_names,
    dry_run as dry_run,
    first_weight as first_weight,
    is_dry_run as is_dry_run,
    materialise as materialise,
    without_weights as without_weights,
)
