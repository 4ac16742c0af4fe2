"""Which training images and noise levels a run learns."""
