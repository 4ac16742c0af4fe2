"""A step of a sharded run beside one of a loop by hand: the same model and batch in plain torch, in bf16 throughout.

As `rehearsal`, for processes that are forked from `python -m accelerators`.
"""

from collections.abc import Sequence
from contextlib import ExitStack

from accelerators.rehearsal import Phase, built, phase


def beside_bare_loop(words: Sequence[str], *, rank: int = 1, ranks: int = 8) -> dict[str, Phase]:
    """The third step of `smalti train WORDS`, and that of `bare_step` with its model and batch."""
    import torch

    from accelerators import cluster
    from accelerators.rehearsal import Rehearsal
    from accelerators.watching import Watch
    from smalti.training.trainer import train_step

    cluster.stand(rank, ranks)
    seen, watch, given = Rehearsal(), Watch(), []
    with ExitStack() as closing:
        run = built(words, watch, closing)
        forward = run.family.forward

        def asked(model, *inputs):
            given[:] = inputs
            return forward(model, *inputs)

        run.family.forward = asked
        home = torch.device(run.world.device).index
        with watch:
            for name in ("first", "second", "smalti"):
                with phase(seen, name, watch, home):
                    train_step(run, next(run.batches))
            run.settle()
            model = _sharded(run)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            for name in ("first", "second", "bare"):
                with phase(seen, name, watch, home):
                    _bare_step(model, optimizer, forward, *given)
    return seen.phases


def _sharded(run):
    """The run's model anew, each block and the rest as groups of torch's `fully_shard`."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from smalti.training.build_run import build_model

    model, blocks = build_model(run.config, run.plugins, run.family, run.world.device)
    mesh = init_device_mesh("cuda", (run.world.size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(model.get_submodule(block.path), mesh=mesh, mp_policy=policy, reshard_after_forward=block.reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model._apply(lambda tensor: torch.empty_like(tensor, device=run.world.device))
    return model.train()


def _bare_step(model, optimizer, forward, latents, timesteps, conditioning) -> None:
    """Noise, forward pass, loss in fp32, backward pass, clipping by the norm of all shards, AdamW."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    noise, part = torch.randn_like(latents), (timesteps / 1000).view(-1, 1, 1, 1)
    noisy, target = latents + part * (noise - latents), noise - latents
    prediction = forward(model, noisy, timesteps, conditioning)
    F.mse_loss(prediction.float(), target).backward()
    gradients = [parameter.grad.to_local() for parameter in model.parameters()]
    squares = torch.nn.utils.get_total_norm(gradients).square()
    dist.all_reduce(squares)
    torch._foreach_mul_(gradients, (1 / (squares.sqrt() + 1e-6)).clamp(max=1.0))
    optimizer.step()
    optimizer.zero_grad()
