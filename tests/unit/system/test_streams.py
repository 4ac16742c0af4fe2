"""Standard streams that nobody reads any more."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from smalti.system import ignore_write_errors
ignore_write_errors()
print('out')
print('err', file=sys.stderr)
open('done', 'w')
"""


@pytest.mark.parametrize("broken", ["2>&-", "1>&-", "2>/dev/full", ">/dev/full 2>&1"])
def test_a_process_goes_on_without_its_words(tmp_path, broken):
    subprocess.run(["sh", "-c", f'"$0" -c "$1" {broken}', sys.executable, SCRIPT], cwd=tmp_path, check=False)
    assert (tmp_path / "done").exists()


def test_words_come_through_where_somebody_reads_them(tmp_path):
    said = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (said.stdout, said.stderr) == ("out\n", "err\n")
