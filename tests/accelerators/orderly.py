"""What holds of every run on such devices, for test classes that are given runs as `seen`."""


class Orderly:
    """Nothing is read before it is there, and each thread keeps to the device of its rank."""

    def test_streams_wait_for_each_other(self, seen):
        assert seen.races == []

    def test_no_thread_turns_to_the_device_of_another_rank(self, seen):
        assert seen.switches == {}
