"""Which checkpoint a run continues from, before anything is loaded."""

import dataclasses
import os
import re
import shutil

import numpy as np
import pytest

from hybrid_gkd.config.loading import load_config
from hybrid_gkd.data.given import GivenCompletion
from hybrid_gkd.data.prompts import Row, Rows
from hybrid_gkd.errors import CheckpointError, ConfigError
from hybrid_gkd.launch.resume import find_resumption
from hybrid_gkd.ppo import resuming
from hybrid_gkd.ppo.resuming import (
    TEACHER_PATH,
    changed_settings,
    data_checksums,
    data_state,
    learning_settings,
    template_checksums,
)
from hybrid_gkd.student.checkpoint_store import SNAPSHOT, CheckpointStore, TrainerState
from hybrid_gkd.types import Task

STEPS, PROMPTS = 20, 64
RUN = ["data.train_files=x", "actor_rollout_ref.model.path=x", "actor_rollout_ref.teacher.model.path=teacher"]


def make_config(folder, *overrides):
    return load_config([*RUN, f"trainer.default_local_dir={folder}", *overrides])


def settings_of(config, steps=STEPS):
    return learning_settings(config, steps=steps)


def save(config, *steps):
    store = CheckpointStore(config.run_dir, keep=None)
    for step in steps:
        data = data_state(config, PROMPTS)
        settings, here = settings_of(config), os.getcwd()
        state = TrainerState(step=step, data=data, first_metrics={}, settings=settings, working_dir=here)
        with store.writing(state) as folder:
            for name in ("actor", "huggingface"):
                (folder / name).mkdir()
                (folder / name / "part.safetensors").write_bytes(os.urandom(3 * 2**20))
    return store.latest()


def find(config, steps=STEPS):
    return find_resumption(config, settings_of(config, steps), num_prompts=PROMPTS, steps=steps)


def flip(file):
    data = bytearray(file.read_bytes())
    for place in (len(data) // 3, len(data) // 2):
        data[place] ^= 0xFF
    file.write_bytes(data)


def test_a_new_run_has_none(tmp_path):
    assert find(make_config(tmp_path)) is None
    save(make_config(tmp_path), 5)
    assert find(make_config(tmp_path, "trainer.resume_mode=disable")) is None


def cut(folder):
    os.truncate(folder / "actor" / "part.safetensors", 1000)
    return r"global_step_10/actor/part\.safetensors has 1000 bytes instead of 3145728"


def flip_weights(folder):
    flip(folder / "actor" / "part.safetensors")
    return r"global_step_10/actor/part\.safetensors has another checksum"


def flip_state(folder):
    flip(folder / "trainer_state.json")
    return r"global_step_10/trainer_state\.json has another checksum"


def remove_weights(folder):
    (folder / "actor" / "part.safetensors").unlink()
    return r"global_step_10/actor/part\.safetensors cannot be read: No such file"


def remove_all(folder):
    folder.rename(folder.with_name("elsewhere"))
    return r"global_step_10/manifest\.json cannot be read"


@pytest.mark.slow
@pytest.mark.parametrize("damage", [cut, flip_weights, flip_state, remove_weights, remove_all])
def test_the_newest_intact_one_is_taken_and_the_damaged_one_named(damage, tmp_path):
    config = make_config(tmp_path)
    reason = damage(save(config, 5, 10))
    found = find(config)
    assert (found.folder.name, found.state.step) == ("global_step_5", 5)
    (remark,) = found.remarks
    assert re.search(rf"skipped: .*{reason}", remark)
    given = make_config(
        tmp_path, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={config.run_dir}/global_step_10"
    )
    with pytest.raises(CheckpointError, match=rf"trainer\.resume_from_path: .*{reason}"):
        find(given)
    flip(config.run_dir / "global_step_5" / "manifest.json")
    with pytest.raises(CheckpointError, match=rf"no intact checkpoint(.|\n)*{reason}(.|\n)*global_step_5"):
        find(config)


def test_a_snapshot_that_is_newer_than_all_checkpoints_is_taken_if_it_is_intact(tmp_path):
    config = make_config(tmp_path)
    checkpoint = save(config, 5)
    own = make_config(tmp_path, "trainer.experiment_name=other")
    shutil.move(save(own, 7).parent, config.run_dir / SNAPSHOT)
    snapshot = config.run_dir / SNAPSHOT / "global_step_7"
    assert find(config).folder == snapshot
    (snapshot / "actor" / "part.safetensors").unlink()
    found = find(config)
    assert found.folder == checkpoint
    assert found.remarks[0].startswith(f"skipped: {snapshot}/actor/part.safetensors cannot be read")
    save(config, 8)
    assert find(config).state.step == 8


def test_damage_to_the_export_is_told_and_no_more(tmp_path):
    config = make_config(tmp_path)
    (save(config, 5) / "huggingface" / "part.safetensors").unlink()
    found = find(config)
    assert found.state.step == 5
    (remark,) = found.remarks
    assert "huggingface/part.safetensors cannot be read" in remark


def test_what_is_left_of_a_finished_run_is_not_read(tmp_path):
    config = make_config(tmp_path)
    flip(save(config, STEPS) / "actor" / "part.safetensors")
    assert find(config).state.step == STEPS
    with pytest.raises(CheckpointError, match="no intact checkpoint"):
        find(config, steps=STEPS + 1)


@pytest.mark.slow
def test_changed_settings_are_listed_and_have_to_be_allowed(tmp_path):
    (save(make_config(tmp_path), 5, 7) / "trainer_state.json").unlink()
    changed = [
        "actor_rollout_ref.actor.optim.lr=1e-3", "distillation.loss_mode=jsd", "data.train_files=[y,z]",
        "actor_rollout_ref.teacher.model.path=other",
    ]
    with pytest.raises(ConfigError) as caught:
        find(make_config(tmp_path, *changed))
    lines = str(caught.value).splitlines()
    allow = "actor_rollout_ref.teacher.allow_teacher_change"
    assert lines[0].startswith(f"trainer.allow_changed_config and {allow}: ")
    for line in (
        "actor_rollout_ref.actor.optim.lr: 1e-06 -> 0.001", "distillation.loss_mode: forward_kl -> jsd",
        "data.train_files: ['x'] -> ['y', 'z']", "actor_rollout_ref.teacher.model.path: teacher -> other",
    ):
        assert line in lines
    assert "global_step_7/trainer_state.json cannot be read" in lines[0]
    found = find(make_config(tmp_path, *changed, "trainer.allow_changed_config=true", f"{allow}=true"))
    assert found.state.step == 5
    assert "distillation.loss_mode: forward_kl -> jsd" in found.remarks[1]


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.save_freq=3", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768", "reward.answer_key=answer"],
        ["trainer.total_training_steps=30"],  # the rate is constant
        ["actor_rollout_ref.teacher.server_ip=elsewhere"],  # what it serves is known after the handshake
    ],
)
def test_what_changes_memory_speed_or_reports_needs_no_leave(overrides, tmp_path):
    save(make_config(tmp_path), 5)
    assert find(make_config(tmp_path, *overrides)).remarks == []


def test_more_steps_change_a_schedule_that_ends_with_the_run(tmp_path):
    schedule = "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"
    config = make_config(tmp_path, schedule)
    save(config, 5)
    assert find(config).remarks == []
    with pytest.raises(ConfigError, match=r"trainer\.total_training_steps: 20 -> 30"):
        find(config, steps=30)


def test_a_reward_counts_where_it_is_trained_on():
    ppo = ["distillation.enabled=false", "reward.answer_key=answer", "actor_rollout_ref.rollout.n=2"]
    before, after = (load_config([*RUN, *ppo, f"reward.name={name}"]) for name in ("exact_match", "gsm8k"))
    assert changed_settings(settings_of(before), settings_of(after)) == ["reward.name: exact_match -> gsm8k"]
    assert TEACHER_PATH not in settings_of(before)


def test_a_reference_policy_that_joins_or_leaves_the_loss_has_to_be_allowed():
    key = "actor_rollout_ref.actor.use_kl_loss"
    without, beside = (load_config([*RUN, f"{key}={each}"]) for each in (False, True))
    assert changed_settings(settings_of(without), settings_of(beside)) == [f"{key}: False -> True"]
    assert changed_settings(settings_of(beside), settings_of(without)) == [f"{key}: True -> False"]


def test_rewards_that_a_prompt_function_now_reads_have_to_be_allowed():
    prompts = "distillation.teacher_prompt_fn=my_prompts:with_a_solution"
    without, beside = load_config([*RUN, prompts]), load_config([*RUN, prompts, "reward.answer_key=answer"])
    change = "distillation.teacher_prompt_fn (reads rewards): False -> True"
    assert changed_settings(settings_of(without), settings_of(beside)) == [change]


OPERATIONAL = """
data: val_files max_unpacked_gigabytes
actor_rollout_ref.model: trust_remote_code enable_gradient_checkpointing
actor_rollout_ref.actor: use_dynamic_bsz ppo_max_token_len_per_gpu ppo_micro_batch_size_per_gpu use_torch_compile
actor_rollout_ref.actor.fsdp_config: param_offload optimizer_offload reshard_after_forward fsdp_size full_determinism
actor_rollout_ref.actor.checkpoint: save_hf_model save_merged
critic: use_dynamic_bsz ppo_max_token_len_per_gpu ppo_micro_batch_size_per_gpu
critic.fsdp_config: param_offload optimizer_offload reshard_after_forward fsdp_size full_determinism
distillation: teacher_sharing
algorithm.filter_groups: max_num_gen_batches
reward: timeout num_workers
reward_model: forward_max_token_len_per_gpu
reward_model.model: trust_remote_code
"""
"""Keys of the sections of the learning signal that only change memory, speed, placement, exports or reports."""


def leaves(section, prefix):
    for entry in dataclasses.fields(section):
        value, key = getattr(section, entry.name), f"{prefix}.{entry.name}"
        yield from leaves(value, key) if dataclasses.is_dataclass(value) else [key]


def test_every_key_of_the_learning_signal_is_compared(tmp_path):
    """A run in which all of them count: critic, reference, teacher, rewards and a reward model at once."""
    config = make_config(
        tmp_path, "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true", "reward.answer_key=answer",
        "distillation.use_task_rewards=true", "actor_rollout_ref.actor.use_kl_loss=true", "reward_model.enable=true",
        "reward_model.model.path=x",
    )  # fmt: skip
    arr, operational = config.actor_rollout_ref, set()
    for line in OPERATIONAL.split("\n")[1:-1]:
        section, names = line.split(": ")
        operational |= {f"{section}.{name}" for name in names.split()}
    sections = {
        "data": config.data, "actor_rollout_ref.model": arr.model, "actor_rollout_ref.actor": arr.actor,
        "actor_rollout_ref.ref": arr.ref, "critic": config.critic, "distillation": config.distillation,
        "algorithm": config.algorithm, "reward": config.reward, "reward_model": config.reward_model,
    }  # fmt: skip
    every = {key for name, section in sections.items() for key in leaves(section, name)}
    assert every - (settings_of(config) | data_state(config, PROMPTS)).keys() == operational


def test_answers_that_rewards_are_computed_from_count_like_prompts():
    before, after = (
        data_checksums([Task(index=0, token_ids=np.zeros(1, np.int32), text="1+1", answer=answer)], [], answers=True)
        for answer in ("2", "3")
    )
    (change,) = changed_settings(before, after)
    assert change.startswith("data.train_files (checksum of the answers): ")
    assert "data.train_files (checksum of the answers)" not in data_checksums([], [], answers=False)


def test_every_key_of_the_tables_exists_and_survives_a_checkpoint(tmp_path):
    config = make_config(tmp_path, "actor_rollout_ref.actor.grad_clip=.inf")
    settings = settings_of(config)
    assert {"distillation.topk", "actor_rollout_ref.actor.optim.betas", TEACHER_PATH} <= settings.keys()
    save(config, 5)
    assert find(config).state.settings == settings
    assert not set(resuming.SAME_BATCHES) & settings.keys()


def spellings(name):
    here = os.getcwd()
    return [f"./{name}", f"{name}/", f"{here}/{name}", f"../{os.path.basename(here)}/{name}", "link", f"~/{name}"]


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("key", ["actor_rollout_ref.model.path", "actor_rollout_ref.teacher.model.path"])
def test_another_spelling_of_a_folder_is_no_change(number, key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to("model")
    save(make_config("out", f"{key}=model"), 5)
    assert find(make_config("out", f"{key}={spellings('model')[number]}")).remarks == []


def test_files_are_compared_as_files_and_splits_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(make_config("out", "data.train_files=[rows.jsonl,saved:train]"), 5)
    assert find(make_config("out", "data.train_files=[./rows.jsonl,saved/:train]")).remarks == []
    with pytest.raises(ConfigError, match=r"data\.train_files: .* -> \['rows\.jsonl', 'saved:test'\]"):
        find(make_config("out", "data.train_files=[rows.jsonl,saved:test]"))


def test_relative_paths_begin_in_the_folder_of_the_run_before(tmp_path, monkeypatch):
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path)
    save(make_config(tmp_path), 5)
    monkeypatch.chdir(tmp_path / "below")
    model = "actor_rollout_ref.model.path=../x"
    rest = ["data.train_files=../x", "actor_rollout_ref.teacher.model.path=../teacher"]
    assert find(make_config(tmp_path, model, *rest)).remarks == []


@pytest.mark.parametrize("old", [False, True])
def test_a_moved_model_is_listed_and_has_to_be_allowed(old, tmp_path):
    """`old`: a checkpoint that has the path among the settings of the data alone."""
    config, moved = make_config(tmp_path), "actor_rollout_ref.model.path=elsewhere/x"
    data, settings = data_state(config, PROMPTS), settings_of(config)
    if old:
        data["actor_rollout_ref.model.path"] = settings.pop("actor_rollout_ref.model.path")
    state = TrainerState(step=5, data=data, first_metrics={}, settings=settings)
    with CheckpointStore(config.run_dir, keep=None).writing(state):
        pass
    assert find(config).remarks == []
    with pytest.raises(ConfigError, match=r"allow_changed_config: (.|\n)*model\.path: x -> elsewhere/x\n"):
        find(make_config(tmp_path, moved))
    found = find(make_config(tmp_path, moved, "trainer.allow_changed_config=true"))
    assert "actor_rollout_ref.model.path: x -> elsewhere/x" in found.remarks[0]


def rows_of(system, tools=None):
    chat = [{"role": "system", "content": system}, {"role": "user", "content": "1+1"}]
    return Rows("where", "name", [Row(messages=chat, tools=tools)], 1.0)


@pytest.mark.parametrize("changed", [rows_of("Lie."), rows_of("Be kind.", [{"type": "function"}])])
def test_all_that_a_prompt_has_counts(changed):
    before, after = (data_checksums([], [rows], answers=False) for rows in (rows_of("Be kind."), changed))
    (change,) = changed_settings(before, after)
    assert change.startswith("data.train_files (checksum of the messages): ")
    older = {name: value for name, value in before.items() if "messages" not in name}
    assert changed_settings(older, after) == []


def completed(text, **changes):
    completion = GivenCompletion([{"role": "assistant", "content": text}], [], is_cut=False)
    chat = [{"role": "user", "content": "1+1"}]
    return Rows("where", "name", [Row(messages=chat, given=dataclasses.replace(completion, **changes))], 1.0)


@pytest.mark.parametrize("changed", [completed("3"), completed("2", excluded=[(0, 1)]), completed("2", is_cut=True)])
def test_all_that_a_given_completion_has_counts(changed):
    before, after = (data_checksums([], [rows], answers=False) for rows in (completed("2"), changed))
    (change,) = changed_settings(before, after)
    assert change.startswith("data.train_files (checksum of the given answers): ")


def test_a_checkpoint_that_does_not_know_of_cut_completions_is_resumed_without_any():
    found = data_checksums([], [completed("2")], answers=False)
    assert found["data.train_files (checksum of the given answers)"] == "9d8590a8"


def test_chat_templates_count():
    before, after = template_checksums("{{ a }}", {"t": "x"}), template_checksums("{{ b }}", {"t": "y"})
    assert [change.partition(": ")[0] for change in changed_settings(before, after)] == list(before)
    key = "actor_rollout_ref.model.path (checksum of the chat template)"
    assert template_checksums(None, {"t": None}).keys() == {key}
