"""What a rehearsal says of an error of the run."""

from pathlib import Path

import pytest
import torch

from smalti_plan.rehearsal.child import explained


@pytest.mark.parametrize("folder", ["/home/me/torch", "/home/me/smalti_plan"])
def test_an_error_names_the_innermost_line_that_is_not_of_torch_wherever_the_users_code_lies(folder):
    code = compile("def forward():\n    torch.zeros(2).view(3)\n", f"{folder}/model.py", "exec")
    exec(code, names := {"torch": torch})
    with pytest.raises(RuntimeError) as raised:
        names["forward"]()
    assert explained(raised.value, "step").where == f"{folder}/model.py:2 in forward"


def test_lines_of_torch_are_not_named():
    inner = compile("def view(tensor):\n    return tensor.view(3)\n", f"{Path(torch.__file__).parent}/inner.py", "exec")
    exec(inner, names := {})
    with pytest.raises(RuntimeError) as raised:
        names["view"](torch.zeros(2))
    assert explained(raised.value, "step").where.endswith("in test_lines_of_torch_are_not_named")
