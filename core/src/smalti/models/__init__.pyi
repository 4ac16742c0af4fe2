from .attention import attention_kernel as attention_kernel, choose_attention as choose_attention
from .blocks import (
    BlockClass as BlockClass,
    Structure as Structure,
    blocks_named as blocks_named,
    describe_blocks as describe_blocks,
    find_blocks as find_blocks,
    unknown_classes as unknown_classes,
)
from .capabilities import (
    Adaptable as Adaptable,
    Cacheable as Cacheable,
    Encoding as Encoding,
    Exporter as Exporter,
    FormatExporter as FormatExporter,
    KeepsRawLatents as KeepsRawLatents,
    ScalesAdapter as ScalesAdapter,
    family_problems as family_problems,
    latents_of as latents_of,
    latents_to_keep as latents_to_keep,
)
from .context_parallel import Attention as Attention, ContextPlan as ContextPlan, Join as Join, Split as Split
from .family import (
    ModelFamily as ModelFamily,
    SampleRequest as SampleRequest,
    context_plan as context_plan,
    encode as encode,
    native_objective as native_objective,
)
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
from .weight_files import (
    WeightFiles as WeightFiles,
    plain_name as plain_name,
    variant_of as variant_of,
    weight_files as weight_files,
    weight_map as weight_map,
)
from .weights import (
    FolderWeights as FolderWeights,
    PostLoadTransform as PostLoadTransform,
    SeededWeights as SeededWeights,
    ShapeWeights as ShapeWeights,
    Weights as Weights,
    check_names as check_names,
    dry_run as dry_run,
    first_weight as first_weight,
    is_dry_run as is_dry_run,
    materialise as materialise,
    without_weights as without_weights,
)
