"""Standard streams that nobody reads any more."""

import subprocess
import sys
from threading import Event, Thread

import pytest

from smalti.system.streams import plugin_output, reserve_stdout

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


def test_what_plugins_print_goes_to_stderr_in_and_after_their_calls_and_all_else_where_it_belongs(capsys):
    def call(word: str, inside: Event, leave: Event) -> None:
        with plugin_output():
            inside.set()
            leave.wait(60)
            print(word)
        print(f"{word} in a thread of its own")

    reserve_stdout(True)
    try:
        with plugin_output():
            events = {word: (Event(), Event()) for word in ("first", "second")}
            threads = {word: Thread(target=call, args=(word, *each)) for word, each in events.items()}
            for word, thread in threads.items():
                thread.start()
                events[word][0].wait(60)
            print("in a call")
        print("while they are in")
        for word, thread in threads.items():  # the first that came goes first
            events[word][1].set()
            thread.join()
            print(f"after the {word}")
    finally:
        reserve_stdout(False)
    print("later")
    out, errors = capsys.readouterr()
    assert out == "while they are in\nafter the first\nafter the second\nlater\n"
    printed = [line for word in threads for line in (word, f"{word} in a thread of its own")]
    assert errors.splitlines() == ["in a call", *printed]
