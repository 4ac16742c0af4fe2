"""A run that ends with the same fault again and again is recognised by the faults of its nodes."""

import pytest

from smalti_health.circuit_file import Circuit, CircuitFault, circuit_file, read_circuit, read_circuits
from smalti_health.circuits import close_circuit, open_circuit, repeated_fault, reset_circuit


def fault(kind="ecc", *, resumed=5, host="a", uuid="GPU-1"):
    return CircuitFault(kind=kind, time=1.0, step=9, host=host, rank=0, resumed=resumed, uuid=uuid)


@pytest.mark.parametrize(
    ("faults", "stuck"),
    [
        ([fault()] * 2, False),
        ([fault()] * 3, True),
        ([fault(resumed=None)] * 3, True),
        ([fault(resumed=0), fault(), fault(), fault()], True),
        ([fault(), fault(), fault(resumed=6)], False),
        ([fault(), fault("lost"), fault()], False),
        ([fault(), fault(host="b", uuid="GPU-2"), fault()], False),
        ([fault(), fault(), fault(host="b", uuid="GPU-2"), fault()], True),
        ([fault(host="b", uuid="GPU-2")] * 3, False),
        ([fault(host="pod-1"), fault(host="pod-2"), fault(host="pod-3")], True),
    ],
)
def test_three_faults_of_a_kind_from_the_same_step_on_one_host_or_device_are_a_loop(faults, stuck):
    assert (repeated_fault(Circuit(faults=tuple(faults)), "a", frozenset({"GPU-1"})) is not None) == stuck


def test_a_circuit_opens_closes_and_is_reset(tmp_path):
    open_circuit(tmp_path, 1, fault())
    open_circuit(tmp_path, 1, fault("lost"))
    assert read_circuits(tmp_path)[1] == Circuit(state="open", faults=(fault(), fault("lost")))
    close_circuit(tmp_path, 1)
    assert (read_circuit(tmp_path, 1).state, len(read_circuit(tmp_path, 1).faults)) == ("closed", 2)
    reset_circuit(tmp_path, 1)
    assert read_circuit(tmp_path, 1).faults == ()


def test_a_file_that_cannot_be_read_counts_as_closed(tmp_path):
    circuit_file(tmp_path, 0).write_text("{")
    close_circuit(tmp_path, 0)
    assert read_circuit(tmp_path, 0) == Circuit()
    assert circuit_file(tmp_path, 0).read_text() == "{"
