"""What ranks of DeepSpeed need and is there before they are forked: the module, and what it asks of the processor."""

import signal

import deepspeed as deepspeed

from smalti_deepspeed.compiling import processor

ignored = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the processes that find out wait for others of their own
processor()
signal.signal(signal.SIGCHLD, ignored)
