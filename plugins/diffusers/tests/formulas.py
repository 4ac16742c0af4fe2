"""What one forward pass costs, as a formula of a model's configuration: an answer beside the one that the families count.

Two operations for each multiplication and addition, in matrix products, convolutions and attention. `c` is the configuration of
a model of diffusers, `n` picture tokens (for SDXL `h` x `w` latent pixels), `m` text tokens, `t` both, `d` the width
of a token.
"""

from types import SimpleNamespace


def linear(tokens, given, made):
    return 2 * tokens * given * made


def attention(queries, keys, width):
    return 4 * queries * keys * width


def embedded(given, width):
    """A number, or a vector, as an embedding: two layers."""
    return linear(1, given, width) + linear(1, width, width)


def multiple(number, of):
    return -(-number // of) * of


def width_of(c):
    return c.num_attention_heads * c.attention_head_dim


def flux(c, n, m):
    d, t = width_of(c), n + m
    ends = linear(n, c.in_channels, d) + linear(m, c.joint_attention_dim, d) + linear(n, d, c.out_channels or c.in_channels)
    once = embedded(256, d) * (2 if c.guidance_embeds else 1) + embedded(c.pooled_projection_dim, d) + linear(1, d, 2 * d)
    modulation = c.num_layers * 2 * linear(1, d, 6 * d) + c.num_single_layers * linear(1, d, 3 * d)
    return ends + once + modulation + (c.num_layers + c.num_single_layers) * (24 * t * d * d + attention(t, t, d))


def chroma(c, n, m):
    d, t = width_of(c), n + m
    ends = linear(n, c.in_channels, d) + linear(m, c.joint_attention_dim, d) + linear(n, d, c.out_channels or c.in_channels)
    numbers, hidden = 12 * c.num_layers + 3 * c.num_single_layers + 2, c.approximator_hidden_dim
    modulation = linear(numbers, c.approximator_num_channels + d + 2 * c.approximator_layers * hidden, hidden)
    return ends + modulation + (c.num_layers + c.num_single_layers) * (24 * t * d * d + attention(t, t, d))


def ernie(c, n, m):
    d, t, patch = c.hidden_size, n + m, c.patch_size**2
    ends = linear(n, patch * c.in_channels, d) + linear(m, c.text_in_dim, d) + linear(t, d, patch * c.out_channels)
    once = embedded(d, d) + linear(1, d, 6 * d) + linear(1, d, 2 * d)
    return ends + once + c.num_layers * (linear(t, d, 4 * d + 3 * c.ffn_hidden_size) + attention(t, t, d))


def flux2(c, n, m):
    d, t = width_of(c), n + m
    ends = linear(n, c.in_channels, d) + linear(m, c.joint_attention_dim, d) + linear(n, d, c.out_channels or c.in_channels)
    once = embedded(c.timestep_guidance_channels, d) * (2 if c.guidance_embeds else 1) + linear(1, d, (6 + 6 + 3 + 2) * d)
    per_token = 4 * d + 3 * int(c.mlp_ratio * d)
    return ends + once + (c.num_layers + c.num_single_layers) * (linear(t, d, per_token) + attention(t, t, d))


def sd3(c, n, m):
    d, t, dual = width_of(c), n + m, sum(number < c.num_layers for number in c.dual_attention_layers)
    patch = c.patch_size**2
    ends = linear(n, patch * c.in_channels, d) + linear(m, c.joint_attention_dim, d) + linear(n, d, patch * c.out_channels)
    once = embedded(256, d) + embedded(c.pooled_projection_dim, d) + linear(1, d, 2 * d)
    blocks = c.num_layers * (24 * t * d * d + attention(t, t, d) + 2 * linear(1, d, 6 * d))
    unread = linear(m, d, 9 * d) + linear(1, d, 4 * d)  # the last block makes nothing of its text but keys and values
    second = dual * (linear(n, d, 4 * d) + attention(n, n, d) + linear(1, d, 3 * d))
    return ends + once + blocks - unread + second


def pixart(c, n, m):
    d, patch = width_of(c), c.patch_size**2
    ends = linear(n, patch * c.in_channels, d) + linear(n, d, patch * c.out_channels)
    text = linear(m, c.caption_channels, d) + linear(m, d, d)
    once = embedded(256, d) + linear(1, d, 6 * d) + (3 * embedded(256, d // 3) if c.use_additional_conditions else 0)
    own = linear(n, d, 4 * d) + attention(n, n, d)
    across = linear(n, d, 2 * d) + linear(m, c.cross_attention_dim, 2 * d) + attention(n, m, d)
    return ends + text + once + c.num_layers * (own + across + linear(n, d, 8 * d))


def sana(c, n, m):
    d, patch = width_of(c), c.patch_size**2
    ends = linear(n, patch * c.in_channels, d) + linear(n, d, patch * c.out_channels)
    text = linear(m, c.caption_channels, d) + linear(m, d, d)
    once = embedded(256, d) + linear(1, d, 6 * d)
    # Values, and ones to norm with, are summed over tokens by keys; queries read the sums.
    own = linear(n, d, 4 * d) + 2 * linear(n, d, c.attention_head_dim + 1)
    inner = c.num_cross_attention_heads * c.cross_attention_head_dim
    across = 2 * linear(n, d, inner) + linear(m, c.cross_attention_dim, 2 * inner) + attention(n, m, inner)
    hidden = int(c.mlp_ratio * d)
    mixing = linear(n, d, 2 * hidden) + linear(n, 9, 2 * hidden) + linear(n, hidden, d)
    return ends + text + once + c.num_layers * (own + across + mixing)


def auraflow(c, n, m):
    d, m = width_of(c), m + 8  # registers
    t, patch, hidden = n + m, c.patch_size**2, multiple(int(8 * d / 3), 256)
    ends = linear(n, patch * c.in_channels, d) + linear(m - 8, c.joint_attention_dim, d) + linear(n, d, patch * c.out_channels)
    once = embedded(256, d) + linear(1, d, 2 * d)
    block = linear(t, d, 4 * d + 3 * hidden) + attention(t, t, d)
    modulation = (2 * c.num_mmdit_layers + c.num_single_dit_layers) * linear(1, d, 6 * d)
    return ends + once + modulation + (c.num_mmdit_layers + c.num_single_dit_layers) * block


def lumina2(c, n, m):
    d, patch, told = c.hidden_size, c.patch_size**2, min(c.hidden_size, 1024)
    t, hidden = n + m, multiple(4 * d, c.multiple_of)
    own = 2 * d + 2 * c.num_kv_heads * d // c.num_attention_heads

    def block(tokens):
        return linear(tokens, d, own + 3 * hidden) + attention(tokens, tokens, d)

    ends = linear(n, patch * c.in_channels, d) + linear(m, c.cap_feat_dim, d) + linear(t, d, patch * c.in_channels)
    once = embedded(256, told) + linear(1, told, d)
    modulation = (c.num_refiner_layers + c.num_layers) * linear(1, told, 4 * d)
    return ends + once + modulation + c.num_refiner_layers * (block(n) + block(m)) + c.num_layers * block(t)


def ideogram(c, n, m):
    d, t = width_of(c), n + m
    ends = linear(t, c.in_channels, d) + linear(t, c.llm_features_dim, d) + linear(t, d, c.in_channels)
    once = embedded(d, d) + linear(1, d, c.adaln_dim) + linear(1, c.adaln_dim, d)
    block = linear(t, d, 4 * d + 3 * c.intermediate_size) + attention(t, t, d) + linear(1, c.adaln_dim, 4 * d)
    return ends + once + c.num_layers * block


def krea2(c, n, m):
    d, w, t, layers = width_of(c), c.text_hidden_dim, n + m, c.num_text_layers
    fused = w // c.text_num_attention_heads

    def block(tokens, kept, width, head, kv, hidden):
        """`kept` tokens attend to each other."""
        per_token = 3 * width + 2 * head * kv + 3 * hidden
        return linear(tokens, width, per_token) + attention(tokens, kept, width)

    text = (fused, c.text_num_key_value_heads, c.text_intermediate_size)
    across = c.num_layerwise_text_blocks * block(m * layers, layers, w, *text) + linear(m * w, layers, 1)
    along = c.num_refiner_text_blocks * block(m, m, w, *text) + linear(m, w, d) + linear(m, d, d)
    once = embedded(c.timestep_embed_dim, d) + linear(1, d, 6 * d)
    ends = linear(n, c.in_channels, d) + linear(n, d, c.in_channels)
    main = block(t, t, d, c.attention_head_dim, c.num_key_value_heads, c.intermediate_size)
    return across + along + once + ends + c.num_layers * main


def ovis_image(c, n, m):
    d, t = width_of(c), n + m
    ends = linear(n, c.in_channels, d) + linear(m, c.joint_attention_dim, d) + linear(n, d, c.out_channels or c.in_channels)
    once = embedded(256, d) + linear(1, d, 2 * d)
    modulation = c.num_layers * 2 * linear(1, d, 6 * d) + c.num_single_layers * linear(1, d, 3 * d)
    per_token = 4 * d + 3 * 4 * d
    return ends + once + modulation + (c.num_layers + c.num_single_layers) * (linear(t, d, per_token) + attention(t, t, d))


def longcat_image(c, n, m):
    d, t = width_of(c), n + m
    ends = linear(n, c.in_channels, d) + linear(m, c.joint_attention_dim, d) + linear(n, d, c.in_channels)
    once = embedded(256, d) + linear(1, d, 2 * d)
    modulation = c.num_layers * 2 * linear(1, d, 6 * d) + c.num_single_layers * linear(1, d, 3 * d)
    return ends + once + modulation + (c.num_layers + c.num_single_layers) * (24 * t * d * d + attention(t, t, d))


bria = longcat_image


def hidream(c, n, m):
    """Of an image that is not square, which is padded."""
    d, m = width_of(c), 3 * m  # T5, the last layer of Llama, and the one of the block
    n, patch = c.max_resolution[0] * c.max_resolution[1] // c.patch_size**2, c.patch_size**2
    t, blocks = n + m, c.num_layers + c.num_single_layers

    def gated(tokens, hidden):
        return linear(tokens, d, 3 * multiple(2 * hidden // 3, 256))

    def experts(tokens):
        return linear(tokens, d, c.num_routed_experts) + gated(tokens, 2 * d) + c.num_activated_experts * gated(tokens, 4 * d)

    ends = linear(n, patch * c.in_channels, d) + linear(n, d, patch * c.out_channels) + linear(1, d, 2 * d)
    text = blocks * linear(m // 3, c.caption_channels[1], d) + linear(m // 3, c.caption_channels[0], d)
    once = embedded(256, d) + embedded(c.text_emb_dim, d)
    own = linear(t, d, 4 * d) + attention(t, t, d)
    double = c.num_layers * (own + experts(n) + gated(m, 4 * d) + linear(1, d, 12 * d))
    return ends + text + once + double + c.num_single_layers * (own + experts(t) + linear(1, d, 6 * d))


def qwen_image(c, n, m):
    d, t = width_of(c), n + m
    ends = linear(n, c.in_channels, d) + linear(m, c.joint_attention_dim, d) + linear(n, d, c.patch_size**2 * c.out_channels)
    once = embedded(256, d) + linear(1, d, 2 * d)
    return ends + once + c.num_layers * (24 * t * d * d + attention(t, t, d) + 2 * linear(1, d, 6 * d))


def qwen_image21(c, n, m):
    d, n = width_of(c), 4 * n  # tokens, of which images have multiples of four
    t, rows = n + m, 2  # times: that of the image, and 0 for the text
    ends = linear(n, c.in_channels, d) + linear(m, c.context_in_dim, d) + linear(m, d, d) + linear(t, d, c.out_channels)
    once = rows * (embedded(256, d) + linear(1, d, 4 * d) + linear(1, d, d))
    block = linear(t, d, 4 * d + 3 * c.mlp_ratio * d) + attention(n, t, d) + attention(m, m, d)
    return ends + once + c.num_layers * block


def z_image(c, n, m):
    d, depth, told = c.dim, 4 * c.in_channels, min(c.dim, 256)
    n, m = multiple(n, 32), multiple(m, 32)

    def block(tokens):
        return linear(tokens, d, 4 * d + 3 * int(d / 3 * 8)) + attention(tokens, tokens, d)

    ends = linear(n, depth, d) + linear(m, c.cap_feat_dim, d) + linear(n + m, d, depth)
    once = linear(1, 256, 1024) + linear(1, 1024, told) + linear(1, told, d)
    modulation = (c.n_refiner_layers + c.n_layers) * linear(1, told, 4 * d)
    return ends + once + modulation + c.n_refiner_layers * (block(n) + block(m)) + c.n_layers * block(n + m)


def anima(c, n, m):
    d, patch, low = width_of(c), c.patch_size[1] * c.patch_size[2], c.adaln_lora_dim
    ends = linear(n, patch * (c.in_channels + 1), d) + linear(n, d, patch * c.out_channels)
    once = linear(1, d, d) + linear(1, d, 3 * d)
    own = linear(n, d, 4 * d) + attention(n, n, d)
    across = linear(n, d, 2 * d) + linear(m, c.text_embed_dim, 2 * d) + attention(n, m, d)
    modulation = 3 * (linear(1, d, low) + linear(1, low, 3 * d))
    last = linear(1, d, low) + linear(1, low, 2 * d)
    return ends + once + last + c.num_layers * (own + across + modulation + 2 * linear(n, d, int(c.mlp_ratio * d)))


cosmos = anima


def sdxl(c, h, w, m):
    widths, time = c.block_out_channels, 4 * c.block_out_channels[0]
    depths = [0 if "CrossAttn" not in kind else own for kind, own in zip(c.down_block_types, depths_of(c), strict=True)]
    stages = [SimpleNamespace(area=h * w // 4**number, d=d, depth=depths[number]) for number, d in enumerate(widths)]

    def convolution(area, given, made):
        return linear(area, 9 * given, made)

    def residual(stage, given):
        shortcut = linear(stage.area, given, stage.d) if given != stage.d else 0
        own = convolution(stage.area, given, stage.d) + convolution(stage.area, stage.d, stage.d)
        return own + linear(1, time, stage.d) + shortcut

    def transformer(stage, depth):
        area, d = stage.area, stage.d
        own = linear(area, d, 4 * d) + attention(area, area, d)
        across = linear(area, d, 2 * d) + linear(m, c.cross_attention_dim, 2 * d) + attention(area, m, d)
        return depth and linear(area, d, 2 * d) + depth * (own + across + linear(area, d, 12 * d))

    total = convolution(h * w, c.in_channels, widths[0]) + convolution(h * w, widths[0], c.out_channels)
    total += linear(1, widths[0], time) + linear(1, time, time)
    if c.addition_embed_type:
        total += linear(1, c.projection_class_embeddings_input_dim, time) + linear(1, time, time)
    given, kept = widths[0], [widths[0]]
    for number, stage in enumerate(stages):
        for _ in range(c.layers_per_block):
            total += residual(stage, given) + transformer(stage, stage.depth)
            given = stage.d
            kept.append(given)
        if number < len(stages) - 1:
            total += convolution(stages[number + 1].area, given, given)
            kept.append(given)
    middle = stages[-1]
    total += 2 * residual(middle, given) + transformer(middle, depths_of(c)[-1])
    for number, stage in reversed(list(enumerate(stages))):
        for _ in range(c.layers_per_block + 1):
            total += residual(stage, given + kept.pop()) + transformer(stage, stage.depth)
            given = stage.d
        if number:
            total += convolution(stages[number - 1].area, given, given)
    return total


sd1x = sd2x = sdxl


def depths_of(c):
    """Transformer blocks in each transformer of a stage."""
    depth = c.transformer_layers_per_block
    return [depth] * len(c.block_out_channels) if isinstance(depth, int) else list(depth)
