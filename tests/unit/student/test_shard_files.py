"""Files of several ranks are safetensors like any other, and what is read from them is what was written."""

import itertools

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_gkd.errors import CheckpointError
from hybrid_gkd.runtime.files import FileSum
from hybrid_gkd.student import shard_files
from hybrid_gkd.student.shard_files import Part, ShardFiles, write_shard

WHOLE = {
    "matrix": torch.arange(7 * 3, dtype=torch.float32).reshape(7, 3),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "count": torch.tensor(3, dtype=torch.int64),
    "mask": torch.tensor([True, False, True]),
}


def write(folder, cuts):
    """A file for each neighbouring pair of rows in `cuts`; what has fewer rows is in the first ones."""
    for rank, (start, stop) in enumerate(itertools.pairwise(cuts)):
        parts = []
        for name, tensor in WHOLE.items():
            rows = tensor[start:stop] if tensor.ndim else tensor
            if rows.numel() and (tensor.ndim or rank == 0):
                shape, whole = tuple(rows.shape), tuple(tensor.shape)
                parts.append(Part(name, tensor.dtype, shape, whole, start, lambda rows=rows: rows))
        written = write_shard(folder / f"rank_{rank}.safetensors", parts, updates_done="7")
        assert written == FileSum.of(folder / f"rank_{rank}.safetensors")


@pytest.mark.parametrize("cuts", [(0, 7), (0, 3, 6, 7), (0, 1, 7)])
@pytest.mark.parametrize("piece", [1, 2**26])
def test_any_rows_can_be_read_from_any_cut(cuts, piece, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_files, "PIECE_BYTES", piece)
    write(tmp_path, cuts)
    files = ShardFiles(tmp_path)
    assert files.facts["updates_done"] == "7"
    assert files.names() == set(WHOLE)
    for name, tensor in WHOLE.items():
        assert files.shape(name) == tuple(tensor.shape)
        for start, stop in [(0, 7), (2, 5), (6, 7), (7, 7)] if tensor.ndim else [(0, 0)]:
            expected = tensor[start:stop] if tensor.ndim else tensor
            found = torch.zeros_like(expected)
            files.read(name, found, tuple(tensor.shape), start)
            assert torch.equal(found, expected), (name, start, stop)


def test_other_programs_read_the_files(tmp_path):
    write(tmp_path, (0, 7))
    loaded = load_file(tmp_path / "rank_0.safetensors")
    assert loaded.keys() == WHOLE.keys()
    for name, tensor in WHOLE.items():
        assert torch.equal(loaded[name], tensor)
        assert loaded[name].dtype == tensor.dtype


def test_what_does_not_fit_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="no safetensors files"):
        ShardFiles(tmp_path)
    write(tmp_path, (0, 3, 7))
    files = ShardFiles(tmp_path)
    with pytest.raises(CheckpointError, match="it has no other"):
        files.read("other", torch.zeros(1), (1,), 0)
    with pytest.raises(CheckpointError, match=r"matrix is \(7, 3\) instead of \(8, 3\)"):
        files.read("matrix", torch.zeros(8, 3), (8, 3), 0)
    (tmp_path / "rank_1.safetensors").unlink()
    with pytest.raises(CheckpointError, match="3 rows of matrix where 7 are needed"):
        ShardFiles(tmp_path).read("matrix", torch.zeros(7, 3), (7, 3), 0)
    (tmp_path / "rank_1.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(CheckpointError, match=r"rank_1\.safetensors cannot be loaded"):
        ShardFiles(tmp_path)


@pytest.mark.parametrize("metadata", [None, {"index": "[1]"}, {"index": "{"}])
def test_a_shard_without_its_index_is_named(tmp_path, metadata):
    save_file({"a": torch.zeros(2)}, tmp_path / "rank.safetensors", metadata)
    with pytest.raises(CheckpointError, match=r"rank\.safetensors cannot be loaded: \w+"):
        ShardFiles(tmp_path)
