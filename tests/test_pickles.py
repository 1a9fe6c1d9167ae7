"""`.bin` files of both formats become extents with torch.load's bytes, and nothing in them runs."""

import io
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.checkpoint import open_checkpoint
from offload.errors import CheckpointError, UnsupportedError

FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old"])
# torch.load reads these from the zip format only.
ZIP_ONLY = [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64]
BOTH = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


def raw(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def save(state, folder, zipped=True, **options):
    file = Path(folder) / "pytorch_model.bin"
    torch.save(state, file, _use_new_zipfile_serialization=zipped, **options)
    return file


def assert_as_torch_loads(folder, weights_only=True):
    wanted = torch.load(Path(folder) / "pytorch_model.bin", weights_only=weights_only)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format == "bin"
    assert list(checkpoint.tensors) == list(wanted)
    for name, tensor in wanted.items():
        got = checkpoint.tensors[name].read()
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(raw(got), raw(tensor)), name
        assert got.is_contiguous(), name
    return checkpoint


def random_tensor(shape, dtype):
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 256, (count,), dtype=torch.uint8)
    return data.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


# ---- what is right is read ----------------------------------------------------------------------


@FORMATS
def test_every_dtype(tmp_path, zipped):
    kinds = BOTH + (ZIP_ONLY if zipped else [])
    state = {f"{kind} {shape}": random_tensor(shape, kind) for kind in kinds
             for shape in [(), (3,), (2, 3), (0, 4)]}  # fmt: skip
    save(state, tmp_path, zipped)
    assert_as_torch_loads(tmp_path)


@FORMATS
def test_views_keep_their_stride_and_share_their_bytes(tmp_path, zipped):
    base = torch.randn(6, 8)
    state = {
        "base": base,
        "again": base,
        "transposed": base.t(),
        "rows": base[2:4],
        "columns": base[:, 1:7:2],
        "element": base[3, 3],
        "flat": base.view(-1),
        "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
        "expanded": torch.randn(3, 1).expand(3, 4),
        "row of one": torch.randn(1, 5).t(),
    }
    save(state, tmp_path, zipped)
    found = assert_as_torch_loads(tmp_path).tensors
    assert found["base"] == found["again"]
    assert found["base"].stride is None and found["flat"].stride is None
    assert found["rows"].stride is None and found["row of one"].stride is None
    assert found["rows"].offset == found["base"].offset + 2 * 8 * 4
    assert found["transposed"].stride == (1, 8)
    assert found["columns"].nbytes == (5 * 8 + 5) * 4
    assert found["expanded"].nbytes == 3 * 4


@FORMATS
def test_state_dict_of_a_module(tmp_path, zipped):
    layer = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    save(layer.state_dict(), tmp_path, zipped)
    assert_as_torch_loads(tmp_path)


@FORMATS
def test_parameters_and_attributes(tmp_path, zipped):
    plain, marked, tensor = (torch.nn.Parameter(torch.randn(3)) for _ in range(3))
    marked.note = "an attribute of its own"
    tensor = torch.randn(2)
    tensor.note = 1
    save({"plain": plain, "marked": marked, "tensor": tensor}, tmp_path, zipped)
    assert_as_torch_loads(tmp_path, weights_only=False)


@FORMATS
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickle_protocols(tmp_path, zipped, protocol):
    save({"a": torch.randn(3), "b": torch.randn(2).half()}, tmp_path, zipped,
         pickle_protocol=protocol)  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_as_torch_loads(tmp_path, weights_only=False)


def test_many_tensors_in_the_old_format(tmp_path):
    """Its pickles are longer than the first look at the file."""
    save({"layer." * 40 + str(number): torch.tensor(number) for number in range(4000)}, tmp_path,
         zipped=False)  # fmt: skip
    assert (tmp_path / "pytorch_model.bin").stat().st_size > 1 << 20
    assert_as_torch_loads(tmp_path)


@FORMATS
def test_what_is_no_tensor_is_no_weight(tmp_path, zipped):
    save({"a": torch.randn(2), "step": 7, "note": None, "rate": 0.5, "tags": [1, "x"]}, tmp_path,
         zipped)  # fmt: skip
    assert list(open_checkpoint(tmp_path).tensors) == ["a"]


@st.composite
def viewed_tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = random_tensor(shape, draw(st.sampled_from(BOTH)))
    if shape and draw(st.booleans()):
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        dimension = draw(st.integers(0, len(shape) - 1))
        size = tensor.shape[dimension]
        start = draw(st.integers(0, size))
        tensor = tensor.narrow(dimension, start, draw(st.integers(0, size - start)))
    return tensor


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.text(max_size=10), viewed_tensors(), min_size=1, max_size=5),
       st.booleans())  # fmt: skip
def test_equal_to_torch_load(state, zipped):
    with tempfile.TemporaryDirectory() as folder:
        save(state, folder, zipped)
        assert_as_torch_loads(folder)


def test_no_weight_is_read_at_open(tmp_path):
    """Opening a file of 64 MB moves a thousandth of it."""
    save({"a": torch.zeros(1 << 24)}, tmp_path)
    script = (
        "import sys; from offload.checkpoint import open_checkpoint\n"
        "read = lambda: int(open('/proc/self/io').readline().split()[1])\n"
        "before = read(); open_checkpoint(sys.argv[1]); print(read() - before)"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100_000


# ---- what is wrong is named, and never run ------------------------------------------------------


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@FORMATS
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_program_is_refused_by_name_and_not_run(tmp_path, zipped, protocol):
    marker = tmp_path / "it-ran"
    file = save({"a": torch.randn(2), "b": Evil(marker)}, tmp_path, zipped,
                pickle_protocol=protocol)  # fmt: skip
    with pytest.raises(CheckpointError, match=r"posix\.system.*nothing was executed") as caught:
        open_checkpoint(tmp_path)
    assert str(file) in str(caught.value)
    assert not marker.exists()


class BadState(OrderedDict):
    pass


@FORMATS
def test_a_class_is_refused_by_name(tmp_path, zipped):
    save({"a": torch.nn.Linear(2, 2)}, tmp_path, zipped)
    with pytest.raises(CheckpointError, match=r"torch\.nn\.modules\.linear\.Linear"):
        open_checkpoint(tmp_path)
    save(BadState(a=torch.randn(2)), tmp_path, zipped)
    with pytest.raises(CheckpointError, match=r"test_pickles\.BadState"):
        open_checkpoint(tmp_path)


@FORMATS
def test_nested_state_dict(tmp_path, zipped):
    save({"epoch": 3, "state_dict": {"a": torch.randn(2)}}, tmp_path, zipped)
    with pytest.raises(CheckpointError, match=r"'state_dict' is itself a dict.*Save that part"):
        open_checkpoint(tmp_path)


@FORMATS
@pytest.mark.parametrize(("content", "kind"), [(torch.zeros(2), "tensor"), ([1], "list")])
def test_what_is_no_state_dict(tmp_path, zipped, content, kind):
    save(content, tmp_path, zipped)
    with pytest.raises(CheckpointError, match=f"holds a {kind}, not a dict"):
        open_checkpoint(tmp_path)


@FORMATS
def test_conjugated_tensors(tmp_path, zipped):
    save({"a": torch.randn(2, dtype=torch.complex64).conj()}, tmp_path, zipped)
    with pytest.raises(UnsupportedError, match=r"pytorch_model\.bin: .*conjugated"):
        open_checkpoint(tmp_path)


@FORMATS
def test_sparse_tensors(tmp_path, zipped):
    save({"a": torch.eye(3).to_sparse()}, tmp_path, zipped)
    with pytest.raises(CheckpointError, match="_rebuild_sparse_tensor"):
        open_checkpoint(tmp_path)


@FORMATS
@pytest.mark.parametrize("cut", [1, 10, 100, 300, 500, 800, 1000, 1200])
def test_truncated_file(tmp_path, zipped, cut):
    file = save({"a": torch.randn(99), "b": torch.randn(99)}, tmp_path, zipped)
    os.truncate(file, file.stat().st_size - cut)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*download it again"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80", b"\x80\x02.", b"{}", b"\0" * 999])
def test_files_that_are_none(tmp_path, content):
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*download it again"):
        open_checkpoint(tmp_path)


def test_a_pickle_of_something_else(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match=r"not one of torch\.save"):
        open_checkpoint(tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript(tmp_path):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), str(tmp_path / "pytorch_model.bin"))
    with pytest.raises(UnsupportedError, match="TorchScript"):
        open_checkpoint(tmp_path)


def test_the_tar_format(tmp_path):
    import tarfile

    with tarfile.open(tmp_path / "pytorch_model.bin", "w") as archive:
        archive.addfile(tarfile.TarInfo("storages"), io.BytesIO())
    with pytest.raises(UnsupportedError, match="tar format"):
        open_checkpoint(tmp_path)


def rewrite(file, compression=zipfile.ZIP_STORED, **changed):
    """Write the archive anew with some records' content changed."""
    with zipfile.ZipFile(file) as archive:
        records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in records:
            archive.writestr(name, changed.get(name.rpartition("/")[2], content))


def test_big_endian(tmp_path):
    file = save({"a": torch.randn(2)}, tmp_path)
    rewrite(file, byteorder=b"big")
    with pytest.raises(UnsupportedError, match="big-endian"):
        open_checkpoint(tmp_path)
    file = save({"a": torch.randn(2)}, tmp_path, zipped=False)
    content = file.read_bytes()
    place = content.index(b"little_endian") + len(b"little_endian")
    place = content.index(b"\x88", place)
    file.write_bytes(content[:place] + b"\x89" + content[place + 1 :])
    with pytest.raises(UnsupportedError, match="big-endian"):
        open_checkpoint(tmp_path)


def test_an_archive_made_by_another_zip(tmp_path):
    file = save({"a": torch.randn(2)}, tmp_path)
    rewrite(file)  # without torch's alignment
    assert_as_torch_loads(tmp_path)
    rewrite(file, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="compressed"):
        open_checkpoint(tmp_path)


def test_a_record_of_another_size(tmp_path):
    file = save({"a": torch.randn(2)}, tmp_path)
    rewrite(file, **{"0": bytes(7)})
    with pytest.raises(CheckpointError, match="has 7 bytes, its pickle says 8"):
        open_checkpoint(tmp_path)


def old_file(folder, body):
    """A file of the old format around a hand-written pickle."""
    head = b"".join(pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001,
                                                      {"little_endian": True}))  # fmt: skip
    (folder / "pytorch_model.bin").write_bytes(head + body + pickle.dumps([], 2))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\x80\x02}" + b"\x85" * 200_000 + b"K\1s.", "malformed"),
        (b"\x80\x02}(" + b")" + b"\x85" * 200_000 + b"K\1u.", "malformed"),  # hash() of a deep key
        (b"\x80\x02)" + b"\x85" * 200_000 + b")R.", "malformed"),  # a call of a deep tuple
        (b"\x80\x02)" + b"\x85" * 200_000 + b"Q.", "malformed"),
        (b"\x80\x02r\xff\xff\xff\xff.", "malformed"),
        (b"\x80\x02K\1r\xff\xff\xff\xff.", "holds a int"),  # a memo place of 4 billion
        (b"\x80\x02h\x05.", "malformed"),
        (b"\x80\x02X\xff\xff\xff\x7fabc.", "within its pickles"),
        (b"\x80\x04\x8d" + b"\xff" * 8 + b"abc.", "malformed|within its pickles"),
        (b"\x80\x02ccollections\nOrderedDict\n)R(K\1K\2K\3u.", "malformed"),
        (b"\x80\x02ccollections\nOrderedDict\n.", "not a dict"),
        (b"\x80\x02\x82\1.", "EXT1"),
        (b"\x80\x02(lp0\n0i__builtin__\nexec\n.", "INST|LIST"),
        (b"\x80\x02c__builtin__\neval\n(X\1\0\0\x001tR.", r"__builtin__\.eval"),
    ],
)
def test_hostile_pickles(tmp_path, body, message):
    old_file(tmp_path, body)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert "pytorch_model.bin" in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.filterwarnings("ignore:Detected pickle protocol", "ignore:invalid escape sequence")
@FORMATS
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_mutated_file_is_read_or_refused(zipped, data):
    """Any byte changed: the tensors that torch.load finds, or one of our errors."""
    with tempfile.TemporaryDirectory() as folder:
        file = save({"a": torch.arange(6.0).view(2, 3).t(), "b": torch.arange(3)}, folder, zipped)
        content = bytearray(file.read_bytes())
        for _ in range(data.draw(st.integers(1, 2))):
            place = data.draw(st.integers(0, len(content) - 1))
            if data.draw(st.booleans()):
                content[place] = data.draw(st.integers(0, 255))
            elif data.draw(st.booleans()):
                del content[place]
            else:
                content.insert(place, data.draw(st.integers(0, 255)))
        file.write_bytes(content)
        try:
            checkpoint = open_checkpoint(folder)
            tensors = {name: place.read() for name, place in checkpoint.tensors.items()}
        except (CheckpointError, UnsupportedError):
            return
        try:
            wanted = torch.load(file)
        except Exception:  # torch also knows checksums, which reading extents leaves alone
            return
        assert set(tensors) == {name for name, value in wanted.items() if torch.is_tensor(value)}
        for name, tensor in tensors.items():
            assert (tensor.dtype, tensor.shape) == (wanted[name].dtype, wanted[name].shape)
            assert torch.equal(raw(tensor), raw(wanted[name]))
