"""Host memory limits: sizes as text, made-up cgroup trees of both versions, and one real cgroup."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from offload.memory_limits import host_memory_available, host_memory_total, parse_size

MIB = 1 << 20
UNLIMITED_V1 = 9223372036854771712


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (12345, 12345),
        ("12345", 12345),
        ("20GiB", 20 * 2**30),
        ("24GB", 24 * 10**9),
        ("500MB", 500 * 10**6),
        ("500 MiB", 500 * 2**20),
        ("1.5GiB", 3 * 2**29),
        (".5KiB", 512),
        ("7KB", 7000),
        ("2TiB", 2**41),
        ("1TB", 10**12),
        ("8gib", 8 * 2**30),
        ("8GIB", 8 * 2**30),
        (" 8GiB ", 8 * 2**30),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


def test_sizes_mean_what_they_mean_in_accelerate():
    reference = pytest.importorskip("accelerate.utils.modeling").convert_file_size_to_int
    for text in ["20GiB", "24GB", "500MB", "1.5GiB", "3KiB", "7KB", "2MiB", "10gib"]:
        assert parse_size(text) == reference(text)


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1GiB", "1e9", "20G", "20 Gi", "infGB", "nanGB", "1,5GiB", "٣GiB", "20GiB 3",
     -1, 2.5, True, None, [1]],
)  # fmt: skip
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="not understood") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("size", ["9" * 400, "9" * 400 + ".5TiB", "9000000.TiB", 1 << 63])
def test_more_than_any_machine_has(size):
    with pytest.raises(ValueError, match="is more than any machine has"):
        parse_size(size)


@pytest.mark.parametrize("text", ["20Gb", "20gb", "3mb"])
def test_bits_are_not_bytes(text):
    """accelerate divides these by eight, which nobody expects of a memory budget."""
    with pytest.raises(ValueError, match="reads as bits"):
        parse_size(text)


# ---- made-up machines ---------------------------------------------------------------------------


class Machine:
    """A tree with the files of /proc and /sys that count, for a machine of 1000 MiB."""

    def __init__(self, root: Path):
        self.root = root
        self.write("proc/meminfo", "MemTotal: 1024000 kB\nMemFree: 1 kB\nMemAvailable: 819200 kB\n")
        self.mounts = ["22 1 0:20 / /proc rw shared:1 - proc proc rw"]
        self.own = []

    def write(self, name, content):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(content))

    def mount_v1(self, point="/sys/fs/cgroup/memory", mounted="/", options="rw,memory"):
        self.mounts.append(f"35 31 0:32 {mounted} {point} rw - cgroup cgroup {options}")

    def mount_v2(self, point="/sys/fs/cgroup", mounted="/"):
        self.mounts.append(f"41 31 0:38 {mounted} {point} rw shared:9 - cgroup2 cgroup2 rw")

    def group_v1(self, path, limit, usage, inactive=0, hierarchical=UNLIMITED_V1):
        base = f"sys/fs/cgroup/memory/{path}"
        self.write(f"{base}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{base}/memory.usage_in_bytes", f"{usage}\n")
        self.write(
            f"{base}/memory.stat",
            f"cache 5\ninactive_file 7\nhierarchical_memory_limit {hierarchical}\n"
            f"total_cache 5\ntotal_inactive_file {inactive}\n",
        )

    def group_v2(self, path, limit, usage, inactive=0, high="max"):
        base = f"sys/fs/cgroup/{path}"
        self.write(f"{base}/memory.max", f"{limit}\n")
        self.write(f"{base}/memory.high", f"{high}\n")
        self.write(f"{base}/memory.current", f"{usage}\n")
        self.write(f"{base}/memory.stat", f"anon 1\nfile 9\ninactive_file {inactive}\n")

    def sees(self):
        """(available, total) in MiB."""
        self.write("proc/self/mountinfo", "\n".join(self.mounts) + "\n")
        self.write("proc/self/cgroup", "\n".join(self.own) + "\n")
        return host_memory_available(self.root) / MIB, host_memory_total(self.root) / MIB


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_no_cgroup_at_all(machine):
    assert machine.sees() == (800, 1000)


def test_v1_own_limit(machine):
    machine.own = ["9:name=systemd:/", "4:memory:/job"]
    machine.mount_v1()
    machine.group_v1("", UNLIMITED_V1, 10 * MIB)
    machine.group_v1("job", 300 * MIB, 100 * MIB, inactive=40 * MIB)
    assert machine.sees() == (240, 300)


def test_v1_limit_of_an_ancestor(machine):
    machine.own = ["4:cpu,memory:/a/b/c"]
    machine.mount_v1(options="rw,cpu,memory")
    machine.group_v1("a", 400 * MIB, 350 * MIB)
    machine.group_v1("a/b", UNLIMITED_V1, 300 * MIB)
    machine.group_v1("a/b/c", 390 * MIB, 10 * MIB)
    assert machine.sees() == (50, 390)


def test_v1_limit_that_only_the_hierarchy_tells(machine):
    """In a container the limited parent may lie above the mount."""
    machine.own = ["4:memory:/"]
    machine.mount_v1()
    machine.group_v1("", UNLIMITED_V1, 50 * MIB, hierarchical=200 * MIB)
    assert machine.sees() == (150, 200)


def test_v2_max_and_high(machine):
    machine.own = ["0::/user.slice/job"]
    machine.mount_v2()
    machine.group_v2("user.slice", 700 * MIB, 100 * MIB)
    machine.group_v2("user.slice/job", 600 * MIB, 100 * MIB, inactive=30 * MIB)
    assert machine.sees() == (530, 600)
    machine.group_v2("user.slice/job", 600 * MIB, 100 * MIB, inactive=30 * MIB, high=500 * MIB)
    assert machine.sees() == (430, 500)
    machine.group_v2("user.slice", 700 * MIB, 690 * MIB)
    assert machine.sees() == (10, 500)


def test_v2_unlimited(machine):
    machine.own = ["0::/job"]
    machine.mount_v2()
    machine.group_v2("job", "max", 100 * MIB)
    assert machine.sees() == (800, 1000)


def test_both_versions_mounted(machine):
    """The memory controller sits on v1; the v2 tree beside it has no memory files."""
    machine.own = ["4:memory:/job", "0::/init.scope"]
    machine.mount_v2("/sys/fs/cgroup/unified")
    machine.mount_v1()
    machine.group_v1("job", 300 * MIB, 100 * MIB)
    machine.write("sys/fs/cgroup/unified/init.scope/cgroup.procs", "1\n")
    assert machine.sees() == (200, 300)


def test_container_with_a_namespace(machine):
    machine.own = ["0::/"]
    machine.mount_v2()
    machine.group_v2("", 256 * MIB, 56 * MIB)
    assert machine.sees() == (200, 256)


def test_container_without_a_namespace(machine):
    """The process knows its path on the host; the mount shows that cgroup as the root."""
    machine.own = ["4:memory:/docker/0123abcd/inner"]
    machine.mount_v1(mounted="/docker/0123abcd")
    machine.group_v1("", 300 * MIB, 200 * MIB)
    machine.group_v1("inner", 250 * MIB, 1 * MIB)
    assert machine.sees() == (100, 250)


@pytest.mark.parametrize("path", ["/../other", "/gone/away", "/docker/0123"])
def test_a_path_that_the_mount_does_not_show(machine, path):
    machine.own = [f"4:memory:{path}"]
    machine.mount_v1(mounted="/docker/0123abcd")
    machine.group_v1("", 300 * MIB, 200 * MIB)
    assert machine.sees() == (100, 300)


def test_more_used_than_allowed(machine):
    machine.own = ["0::/"]
    machine.mount_v2()
    machine.group_v2("", 256 * MIB, 300 * MIB)
    assert machine.sees() == (0, 256)


def test_missing_and_odd_files(machine):
    machine.own = ["4:memory:/job", "garbage", "0::"]
    machine.mounts += ["garbage", "1 2 3 - cgroup2", "- -", ""]
    machine.mount_v1()
    machine.mount_v2("/sys/fs/cgroup/unified")
    machine.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", 300 * MIB)
    assert machine.sees() == (300, 300)
    machine.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "what?")
    machine.write("sys/fs/cgroup/memory/job/memory.stat", "hierarchical_memory_limit\nx y z\n")
    assert machine.sees() == (800, 1000)


def test_a_mount_point_with_blanks(machine):
    machine.own = ["0::/"]
    machine.mount_v2(r"/sys/fs/cgroup/with\040blank")
    machine.group_v2("with blank", 256 * MIB, 56 * MIB)
    assert machine.sees() == (200, 256)


# ---- the real machine ---------------------------------------------------------------------------


def test_here_it_is_within_what_the_machine_has():
    memory = psutil.virtual_memory()
    assert 0 < host_memory_total() <= memory.total
    assert 0 < host_memory_available() <= memory.total


def test_a_real_cgroup_of_300_mb():
    """A child that puts itself under a limit sees no more than the limit leaves."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    limit = 300 * 10**6
    if os.geteuid() != 0:
        pytest.skip("only root may make a cgroup")
    name = f"offload-test-{os.getpid()}"
    group, file = (v1 / name, "memory.limit_in_bytes") if v1.is_dir() else (v2 / name, "memory.max")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        if not (group / file).exists():
            pytest.skip("the memory controller is not enabled here")
        (group / file).write_text(str(limit))
        script = (
            "import os, sys\n"
            "from offload.memory_limits import host_memory_available, host_memory_total\n"
            "open(sys.argv[1], 'w').write(str(os.getpid()))\n"  # importing torch needs more
            "block = bytearray(os.urandom(1 << 20)) * 100\n"
            "print(host_memory_total(), host_memory_available())"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, str(group / "cgroup.procs")],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        total, available = map(int, done.stdout.split())
        assert limit - 4096 <= total <= limit
        assert 0 < available <= limit - 100 * MIB
    finally:
        group.rmdir()
