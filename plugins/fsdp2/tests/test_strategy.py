"""FSDP2 keeps the contract of a distribution strategy, on one, two and three ranks, in every form that it has."""

from smalti.testing.pytest import ParallelContract


class TestOneRank(ParallelContract):
    plugin = "fsdp2"
    flags = ("--fsdp_enable",)
    ranks = 1


class TestTwoRanks(ParallelContract):
    plugin = "fsdp2"
    flags = ("--fsdp_enable",)
