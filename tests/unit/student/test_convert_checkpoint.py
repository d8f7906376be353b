"""The converter, by hand, is the only thing that reads a checkpoint with a pickle."""

import re
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from test_checkpoint_io import make_config, random_batch
from torch.distributed.checkpoint.state_dict import get_state_dict

import hybrid_gkd
from hybrid_gkd.convert_checkpoint import main
from hybrid_gkd.student.actor import Actor
from hybrid_gkd.student.checkpoint_io import load_model
from hybrid_gkd.student.checkpoint_store import find_damage
from hybrid_gkd.testing import make_tiny_model, single_process_group

ROOT = Path(hybrid_gkd.__file__).parent


def save_as_earlier_versions(actor, folder):
    weights, optimizer = get_state_dict(actor.model, actor.optimizer)
    dcp.save(
        {"model": weights, "optimizer": optimizer, "updates_done": actor.updates_done}, checkpoint_id=folder / "actor"
    )
    (folder / "trainer_state.json").write_text('{"step": 2, "data": {}, "first_metrics": {}}')
    (folder / "huggingface").mkdir()
    (folder / "huggingface" / "config.json").write_text("{}")


def test_what_is_converted_goes_on_as_it_would_have(tmp_path, capsys):
    config, old, new = make_config(make_tiny_model(tmp_path / "model")), tmp_path / "old", tmp_path / "new"
    with single_process_group():
        whole, resumed = (Actor(config, device=torch.device("cpu"), num_updates=5) for _ in range(2))
        for step in range(2):
            whole.update(random_batch(step))
        save_as_earlier_versions(whole, old)
        assert main([str(old), str(new)]) == 0
        assert f"trainer.resume_from_path={new}" in capsys.readouterr().out
        assert find_damage(new) == {}
        assert {path.name for path in new.iterdir()} == {"actor", "huggingface", "manifest.json", "trainer_state.json"}
        load_model(resumed, new / "actor")
        assert whole.update(random_batch(2)) == resumed.update(random_batch(2))
    assert main([str(old), str(new)]) == 1
    assert f"{new} exists already" in capsys.readouterr().err
    assert main([str(new), str(tmp_path / "newer")]) == 1
    assert "no checkpoint of an earlier version" in capsys.readouterr().err


def test_nothing_else_can_unpickle_a_file():
    unsafe = re.compile(r"torch\.load|pickle\.load|import pickle|np\.load|distributed\.checkpoint|import dcp")
    found = {
        str(file.relative_to(ROOT)) for file in ROOT.rglob("*.py")
        if any(unsafe.search(line.partition("#")[0]) for line in file.read_text().splitlines())
    }
    assert found == {"convert_checkpoint.py"}
