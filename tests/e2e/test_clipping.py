"""`--grad_clip_method=value` reaches the optimizer: no element of a step is larger than the limit, and many are as large."""

import torch

LIMIT, MOMENTUM = 1e-3, 0.9


def test_a_run_clips_the_elements_of_its_gradients(train, tmp_path):
    options = {"optimizer": "sgd", "adam_weight_decay": 0.0, "learning_rate": 1.0, "train_batch_size": 4}
    clipping = {"grad_clip_method": "value", "max_grad_norm": LIMIT}
    run = train(tmp_path / "run", max_train_steps=2, checkpoint_step_interval=1, **options, **clipping)
    assert run.code == 0, run.output
    before, after = run.tensors(1, "model"), run.tensors(2, "model")
    moved = torch.cat([(after[name] - before[name]).flatten().abs() for name in before]) / (1 + MOMENTUM)
    assert moved.max() < LIMIT * 1.001
    assert (moved > LIMIT * 0.999).sum() > 10  # of a clipped norm, one element could be
