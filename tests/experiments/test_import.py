"""Importing the experiments changes nothing of the process."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_an_import_leaves_closed_streams_closed_and_a_command_opens_them():
    script = """if True:
        import sys
        import experiments
        assert sys.stdout is None, "the import opened a stream"
        from experiments import process_start
        process_start.open_closed_streams()
        assert sys.stdout.fileno() == 1
    """
    command = [sys.executable, "-c", f"import os; os.close(1)\nos.execv({sys.executable!r}, "]
    command[-1] += f"[{sys.executable!r}, '-c', {script!r}])"
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
