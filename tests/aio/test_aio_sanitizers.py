"""The engine under AddressSanitizer and ThreadSanitizer (minutes: `make test-slow`)."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", ["address", "thread", "python"])
def test_no_sanitizer_finds_anything(kind):
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    script = Path(__file__).with_name("sanitize.py")
    done = subprocess.run([sys.executable, str(script), kind], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
