"""A node that the others do not reach any more."""

import re

from support.nodes.runs import Run


def test_both_sides_of_a_cut_name_the_lost_node_and_end_long_before_the_timeout_of_the_process_group(two_nodes, tmp_path):
    run = Run(two_nodes, tmp_path / "run", ranks=1, node_timeout=3)
    run.wait_for_step(3)
    two_nodes.cut(1)
    assert run.codes(100) == [9, 9], run.outputs()
    first, second = run.outputs()
    # The name of a node is known once it was read, a second after the start at the latest.
    assert re.search(r"node 1( \(node1\))? has shown no sign of life for 3 s", first), first
    assert re.search(r"node 0( \(node0\))? has shown no sign of life for 3 s", second), second
    assert any("before leaving" in output for output in (first, second))
    logs = sorted((run.directory / "logs").glob("agent-*.log"))
    assert [file.name for file in logs] == ["agent-node0.log", "agent-node1.log"]
    for file, output in zip(logs, (first, second), strict=True):
        assert "error_file" in file.read_text(), "what torch's agent says is kept"
        assert not any(part in output for part in ("error_file", "ChildFailedError", "failed (exitcode")), output
    assert two_nodes.leftovers() == []
