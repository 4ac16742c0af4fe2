"""FSDP 1 keeps the contract of a distribution strategy."""

from smalti.testing.pytest import ParallelContract


class TestTwoRanks(ParallelContract):
    plugin = "fsdp2"
    flags = ("--fsdp_enable", "--fsdp_version=1")
