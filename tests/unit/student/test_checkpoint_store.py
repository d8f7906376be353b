"""An interrupted or failed write never replaces a good checkpoint."""

import ctypes
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybrid_gkd.errors import CheckpointError
from hybrid_gkd.runtime import files
from hybrid_gkd.runtime.files import FileSum
from hybrid_gkd.student.checkpoint_store import (
    LATEST,
    RESERVED,
    SNAPSHOT,
    Best,
    CheckpointStore,
    TrainerState,
    find_damage,
    load_state,
    prepare_snapshots,
    remove_snapshots,
)


def state(step):
    return TrainerState(step=step, data={"data.seed": 0}, first_metrics={"actor/kl_loss": 1.5})


def write(store, step, text="weights"):
    with store.writing(state(step)) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "part").write_text(text, encoding="utf-8")


def flip(file):
    """Two flipped bytes."""
    data = bytearray(file.read_bytes())
    for place in (len(data) // 3, len(data) // 2):
        data[place] ^= 0xFF
    file.write_bytes(data)


def test_latest_is_the_newest_complete_one_and_its_state_reads_back(tmp_path):
    store = CheckpointStore(tmp_path, keep=None)
    assert store.latest() is None
    write(store, 5)
    write(store, 10)
    assert store.latest() == tmp_path / "global_step_10"
    assert load_state(store.latest()) == state(10)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("no space left on device"), RuntimeError])
def test_an_interrupted_write_leaves_the_previous_checkpoint_alone(tmp_path, error):
    """A full disk has room again for the last rows of metrics.jsonl."""
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 5, "good")

    def interrupted_write():
        with store.writing(state(6)) as folder:
            (folder / "half").write_text("written", encoding="utf-8")
            raise error

    with pytest.raises((KeyboardInterrupt, CheckpointError, RuntimeError)):
        interrupted_write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_5", LATEST]
    assert (store.latest() / "actor" / "part").read_text(encoding="utf-8") == "good"
    write(store, 6)
    assert store.latest() == tmp_path / "global_step_6"
    assert not (store.latest() / "half").exists()


@pytest.mark.slow
def test_a_process_killed_while_it_writes_leaves_the_previous_checkpoint(tmp_path):
    write(CheckpointStore(tmp_path, keep=1), 5, "good")
    code = f"""if True:
        import os, signal
        from pathlib import Path
        from hybrid_gkd.student.checkpoint_store import CheckpointStore
        folder = CheckpointStore(Path({str(tmp_path)!r}), keep=1).begin(6)
        (folder / "actor").mkdir()
        (folder / "actor" / "part").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == -signal.SIGKILL
    store = CheckpointStore(tmp_path, keep=1)
    assert (store.latest() / "actor" / "part").read_text(encoding="utf-8") == "good"
    assert find_damage(store.latest()) == {}
    assert (tmp_path / ".global_step_6.writing").is_dir()
    write(store, 7)
    assert store.latest() == tmp_path / "global_step_7"
    assert not (tmp_path / ".global_step_6.writing").exists()


def test_writing_a_step_again_replaces_it_as_a_whole(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 5, "old")
    write(store, 5, "new")
    assert (store.latest() / "actor" / "part").read_text(encoding="utf-8") == "new"


def test_an_old_checkpoint_that_cannot_be_removed_stays_and_is_named(tmp_path, caplog):
    """Somebody has moved it to another disk, and left a link."""
    store = CheckpointStore(tmp_path / "run", keep=1)
    (tmp_path / "run").mkdir()
    write(store, 5)
    (tmp_path / "run" / "global_step_5").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "global_step_5").symlink_to(tmp_path / "elsewhere")
    write(store, 6)
    assert store.latest() == tmp_path / "run" / "global_step_6"
    assert (tmp_path / "elsewhere" / "actor" / "part").is_file()
    assert f"cannot remove an old checkpoint: {tmp_path / 'run' / 'global_step_5'}" in caplog.text


def test_a_run_killed_while_it_replaces_a_step_keeps_the_old_one(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 5, "old")
    rename = os.rename

    def killed_at_the_second_rename(source, target):
        if str(source).endswith(".writing"):
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", killed_at_the_second_rename)
    with pytest.raises(KeyboardInterrupt):
        write(store, 5, "new")
    monkeypatch.undo()
    assert (store.latest() / "actor" / "part").read_text(encoding="utf-8") == "old"
    write(store, 5, "new")
    assert (store.latest() / "actor" / "part").read_text(encoding="utf-8") == "new"
    assert [path.name for path in tmp_path.iterdir() if "replaced" in path.name] == []


def reserved(folder):
    """Bytes of the disk that files of the store's own take, checkpoints aside."""
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir() if path.is_file() and path.name != LATEST)


def test_room_for_a_checkpoint_is_held_until_it_is_written(tmp_path):
    store = CheckpointStore(tmp_path, keep=1, reserved_bytes=2**20)
    store.reserve()
    assert reserved(tmp_path) >= 2**20
    with store.writing(state(1)):
        assert reserved(tmp_path) == 0
    assert reserved(tmp_path) == 0
    store.reserve()
    assert reserved(tmp_path) >= 2**20
    store.release()
    store.release()
    assert reserved(tmp_path) == 0


@pytest.mark.slow
def test_a_disk_without_the_room_is_said(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    store = CheckpointStore(tmp_path, keep=1, reserved_bytes=free + 2**40)
    with pytest.raises(CheckpointError, match=r"cannot reserve disk space .* \(\d+ MiB, 0 files\): No space"):
        store.reserve()
    assert reserved(tmp_path) == 0


def test_inodes_for_a_checkpoint_are_held_until_it_is_written(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep=1, reserved_files=5)
    store.reserve()
    (folder,) = tmp_path.glob(f"{RESERVED}*")
    assert len(list(folder.iterdir())) == 5
    with store.writing(state(1)):
        assert not list(tmp_path.glob(f"{RESERVED}*"))

    def full(path, *args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "touch", full)
    with pytest.raises(CheckpointError, match=r"\(0 MiB, 5 files\): No space left on device"):
        store.reserve()
    assert not list(tmp_path.glob(f"{RESERVED}*"))


def test_a_write_protected_folder_is_named_by_the_write_and_only_logged_at_the_exit(tmp_path, monkeypatch, caplog):
    store = CheckpointStore(tmp_path, keep=1, reserved_bytes=2**20)
    store.reserve()

    def refuse(path, *args, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("unlink", "mkdir"):
        monkeypatch.setattr(Path, name, refuse)
    store.release()
    assert "cannot free the disk space that is reserved for a checkpoint: [Errno 30] Read-only" in caplog.text
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*global_step_1: .*Read-only file system"):
        write(store, 1)


@pytest.mark.parametrize("text", [b"1", b"", b"10", b"10\n\n", b"\0\0\0\0", b"1" * 5000])
def test_a_damaged_pointer_hides_no_checkpoint(tmp_path, caplog, text):
    """It was cut from 100 to 1 or 10, or filled with zeros after a crash of the machine."""
    store = CheckpointStore(tmp_path, keep=None)
    for step in (1, 10, 100):
        write(store, step)
    (tmp_path / LATEST).write_bytes(text)
    assert [folder.name for folder in store.newest_first()] == ["global_step_100", "global_step_10", "global_step_1"]
    assert f"{tmp_path / LATEST} does not name a step" in caplog.text


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_that_reserves_nothing_is_no_obstacle(tmp_path, monkeypatch, code):
    def fallocate(*args):
        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(files.ctypes, "CDLL", lambda *args, **kwargs: SimpleNamespace(fallocate=fallocate))
    CheckpointStore(tmp_path, keep=1, reserved_bytes=2**20).reserve()
    assert list(tmp_path.iterdir()) == []


def test_folders_of_the_user_beside_the_checkpoints_are_left_alone(tmp_path):
    (tmp_path / "global_step_1_best").mkdir()
    store = CheckpointStore(tmp_path, keep=1)
    for step in (1, 2):
        write(store, step)
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == ["global_step_1_best", "global_step_2"]


def test_only_the_newest_are_kept_and_later_ones_of_another_run_do_not_count(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (30, 1, 2, 3):
        write(store, step)
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == [
        "global_step_2", "global_step_3", "global_step_30",
    ]


def test_checkpoints_that_a_run_has_not_continued_from_are_removed_first(tmp_path):
    """Else those of its own past would be, and a damaged newest one would lead back to the others."""
    store = CheckpointStore(tmp_path, keep=2)
    for step in (10, 20, 27):
        write(store, step)
    resumed = CheckpointStore(tmp_path, keep=2)
    resumed.abandon_after(20)
    write(resumed, 30)
    assert resumed.newest_first() == [resumed.folder(30), resumed.folder(20)]
    resumed.abandon_after(20)
    write(resumed, 30)  # now of this branch
    write(resumed, 40)
    assert resumed.newest_first() == [resumed.folder(40), resumed.folder(30)]


def test_a_run_killed_before_it_moved_the_pointer_has_its_first_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 7)
    (tmp_path / LATEST).unlink()
    assert store.latest() == tmp_path / "global_step_7"
    (tmp_path / LATEST).write_bytes(b"\xff7")
    assert store.latest() == tmp_path / "global_step_7"


def test_the_checkpoint_that_the_pointer_names_comes_first_be_it_there_or_not(tmp_path):
    store = CheckpointStore(tmp_path, keep=None)
    for step in (30, 5, 10):
        write(store, step)
    shutil.rmtree(tmp_path / "global_step_10")
    assert [folder.name for folder in store.newest_first()] == ["global_step_10", "global_step_5"]


@pytest.mark.parametrize("root", [None, "memory"])
def test_of_snapshots_the_newest_is_kept_and_resumed_from_if_no_checkpoint_is_newer(root, tmp_path):
    """The best one is no exception; the link leads to a folder of the run's own."""
    run_dir, other = tmp_path / "run", root and tmp_path / root
    run_dir.mkdir()
    checkpoints, snapshots = CheckpointStore(run_dir, keep=2), prepare_snapshots(run_dir, other and str(other))
    assert (run_dir / SNAPSHOT).is_symlink() == (root is not None)
    write(checkpoints, 3)
    for step in (1, 4, 5):
        best = TrainerState(step=step, data={}, first_metrics={}, best=Best(metric="val/x", value=1.0, step=1))
        with snapshots.writing(best) as folder:
            (folder / "part").write_text("weights", encoding="utf-8")
    assert [path.name for path in (run_dir / SNAPSHOT).glob("global_step_*")] == ["global_step_5"]
    assert checkpoints.resumable() == [run_dir / SNAPSHOT / "global_step_5", run_dir / "global_step_3"]
    write(checkpoints, 5)
    assert checkpoints.resumable()[0] == run_dir / "global_step_5"
    assert prepare_snapshots(run_dir, other and str(other)).latest() == run_dir / SNAPSHOT / "global_step_5"  # kept
    again = prepare_snapshots(run_dir, str(tmp_path / "elsewhere"))
    assert again.latest() is None
    remove_snapshots(run_dir)
    remove_snapshots(run_dir)
    left = [path.name for folder in ("memory", "elsewhere") for path in (tmp_path / folder).glob("*")]
    assert left == []
    assert not (run_dir / SNAPSHOT).is_symlink()


def test_a_link_to_snapshots_that_are_gone_is_no_obstacle(tmp_path):
    """A restart of the machine empties /dev/shm."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    write(prepare_snapshots(run_dir, str(tmp_path / "memory")), 1)
    shutil.rmtree(tmp_path / "memory")
    assert CheckpointStore(run_dir, keep=None).resumable() == []
    write(prepare_snapshots(run_dir, str(tmp_path / "memory")), 2)
    assert CheckpointStore(run_dir, keep=None).resumable() == [run_dir / SNAPSHOT / "global_step_2"]


def test_a_file_that_another_machine_has_is_missed(tmp_path):
    store = CheckpointStore(tmp_path, keep=None)
    store.begin(1)
    with pytest.raises(CheckpointError, match=r"actor/part was written by a worker and is not in this folder"):
        store.complete(state(1), {"actor/part": FileSum(size=1, crc32=1)})
    assert store.latest() is None


def test_a_broken_state_is_named(tmp_path):
    (tmp_path / "trainer_state.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"trainer_state\.json"):
        load_state(tmp_path)


def test_every_file_is_listed_and_what_happened_to_it_is_found(tmp_path):
    store = CheckpointStore(tmp_path, keep=None)
    with store.writing(state(1), sums := {}) as folder:
        for name in ("kept", "flipped", "cut", "gone"):
            (folder / "actor" / name).parent.mkdir(exist_ok=True)
            (folder / "actor" / name).write_bytes(bytes(range(256)))
        sums["actor/kept"] = FileSum.of(folder / "actor" / "kept")
    folder = store.latest()
    listed = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["files"]
    assert set(listed) == {"trainer_state.json", *(f"actor/{name}" for name in ("kept", "flipped", "cut", "gone"))}
    assert listed["actor/kept"] == {"size": 256, "crc32": zlib.crc32(bytes(range(256)))}
    assert find_damage(folder) == {}
    flip(folder / "actor" / "flipped")
    os.truncate(folder / "actor" / "cut", 100)
    (folder / "actor" / "gone").unlink()
    flip(folder / "trainer_state.json")
    found = find_damage(folder)
    assert found.keys() == {"trainer_state.json", "actor/flipped", "actor/cut", "actor/gone"}
    assert found["actor/cut"] == "has 100 bytes instead of 256"
    assert "checksum" in found["actor/flipped"]
    assert "actor/flipped" not in find_damage(folder, largest=255)
    manifest = folder / "manifest.json"
    whole = manifest.read_text(encoding="utf-8")
    manifest.write_text(whole.replace('"size": 256', '"size": 257', 1), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read: it has another checksum than when"):
        find_damage(folder)
    older = {"files": json.loads(whole)["files"]}
    manifest.write_text(json.dumps(older), encoding="utf-8")
    assert find_damage(folder) == found
    (folder / "manifest.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        find_damage(folder)


def test_a_folder_that_cannot_be_written_is_a_checkpoint_error(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        write(CheckpointStore(tmp_path / "file", keep=2), 1)
