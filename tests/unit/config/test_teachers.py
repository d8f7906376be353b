"""Several teachers in the configuration: spellings of verl, keys, rules, and the view of one teacher alone."""

import pytest

from hybrid_gkd.config import DEFAULT_TEACHER, run_teachers
from hybrid_gkd.config.loading import examine_config, load_config, to_yaml
from hybrid_gkd.workers.placement import threads_per_process

MODELS = "distillation.teacher_models"
OWN = ["data.train_files=x", "actor_rollout_ref.model.path=student"]
TWO = [f"{MODELS}.a.model_path=one", f"{MODELS}.a.key=math", f"{MODELS}.b.server_ip=far", f"{MODELS}.b.server_port=1"]

PPO = ["reward.answer_key=answer", "actor_rollout_ref.rollout.n=2"]


def problems(*overrides):
    return [str(problem) for problem in examine_config([*OWN, *overrides])[1]]


def test_each_has_a_key_and_a_section_of_its_own():
    config = load_config([*OWN, *TWO, f"{MODELS}.a.inference.dtype=float32", f"{MODELS}.a.chat_template=no"])
    first, second = run_teachers(config)
    assert (first.key, first.where, first.label) == ("math", f"{MODELS}.a", "teacher a")
    assert (second.key, second.label) == ("b", "teacher b")
    assert (first.section.model.path, first.section.dtype, first.section.chat_template) == ("one", "float32", "no")
    assert second.section.endpoints == ["far:1"]
    assert [each.section.is_local for each in run_teachers(first.config)] == [True]
    assert [each.key for each in run_teachers(load_config([*OWN, *TWO, "actor_rollout_ref.teacher.server_ip=x"]))] == [
        "math", "b", DEFAULT_TEACHER,
    ]  # fmt: skip


def test_a_configuration_that_was_written_is_read_again(tmp_path):
    config = load_config([*OWN, *TWO])
    (tmp_path / "mine.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert load_config(config_name="mine", config_path=tmp_path) == config
    changed = load_config([f"{MODELS}.b.server_port=2"], config_name="mine", config_path=tmp_path)
    assert run_teachers(changed)[1].section.endpoints == ["far:2"]


def test_a_name_with_a_hyphen_is_a_name():
    config = load_config([*OWN, *TWO, f"{MODELS}.my-own.model_path=three"])
    assert [teacher.key for teacher in run_teachers(config)] == ["math", "b", "my-own"]


def test_one_alone_is_the_teacher_of_all_rows():
    config = load_config([*OWN, *TWO[:2], f"{MODELS}.a.max_retries=1", "actor_rollout_ref.teacher.request_timeout=5"])
    (teacher,) = run_teachers(config)
    assert (teacher.key, teacher.where, teacher.label) == (DEFAULT_TEACHER, "actor_rollout_ref.teacher", "teacher")
    assert teacher.config is config
    section = config.actor_rollout_ref.teacher
    assert (section.model.path, section.max_retries, section.request_timeout) == ("one", 1, 5)
    assert run_teachers(load_config([*OWN, *TWO, "distillation.enabled=false", *PPO])) == []


@pytest.mark.parametrize(("overrides", "message"), [
    ([f"{MODELS}.b.key=math"], f"{MODELS}.b.key: must differ between teachers (math, math)"),
    ([f"{MODELS}.b.weight=2"], f"{MODELS}.b.weight: needs distillation.ensemble=mixture"),
    (["distillation.ensemble=mixture"], f"distillation.ensemble: needs at least two teachers of {MODELS}"),
    ([f"{MODELS}.b.key=math", "distillation.ensemble=mixture", f"{MODELS}.b.chat_template=x"],
     f"{MODELS}.b.chat_template: must be the same for all teachers with the key math"),
    ([f"{MODELS}.b.key=default", "distillation.ensemble=mixture", "actor_rollout_ref.teacher.server_ip=near",
      "actor_rollout_ref.teacher.chat_template=x"],
     "actor_rollout_ref.teacher.chat_template: must be the same for all teachers with the key default"),
    ([f"{MODELS}.b.cache=s", "data.response_key=r", "distillation.candidates=student"],
     f"distillation.candidates: must be teacher with {MODELS}.b.cache"),
    ([f"{MODELS}.b.server_ip=null", f"{MODELS}.b.server_port=null", f"{MODELS}.b.cache=s", "data.response_key=r",
      "distillation.teacher_prompt_fn=a.py:b"],
     f"distillation.teacher_prompt_fn: needs a teacher service, not scores stored in {MODELS}.b.cache"),
    (["actor_rollout_ref.actor.fsdp_config.full_determinism=true"],
     "actor_rollout_ref.actor.fsdp_config.full_determinism: needs a teacher that the run starts (model.path instead of "
     f"server_ip in {MODELS}.b)"),
    ([f"{MODELS}.b.key=math", "distillation.ensemble=sum", "distillation.as_reward=true", *PPO],
     "distillation.as_reward: must be false with distillation.ensemble=sum"),
    ([f"{MODELS}.b.key=math", "distillation.ensemble=sum", "distillation.token_weights=confident_wrong"],
     "distillation.token_weights: must be uniform or position with distillation.ensemble=sum"),
    ([f"{MODELS}.b.key=math", f"{MODELS}.teacher.server_ip=x", "actor_rollout_ref.teacher.server_ip=y",
      "distillation.ensemble=sum"], f"{MODELS}.teacher.key: must be of another name"),
    (["distillation.teacher_sharing=turns"], "distillation.teacher_sharing: needs at least two teachers of"),
    ([f"{MODELS}.b.key=default", "actor_rollout_ref.teacher.server_ip=near"], f"{MODELS}.b.key: must differ"),
    ([f"{MODELS}.b.max_retries=-1"], f"{MODELS}.b.max_retries: must be at least 0; got -1"),
    ([f"{MODELS}.b.nothing=1"], f"{MODELS}.b.nothing: there is no such key"),
    ([f"{MODELS}.b.num_replicas=2"], f"{MODELS}.b.num_replicas: is for a service that the run starts"),
    ([f"{MODELS}.c.key=c"], f"{MODELS}.c.model.path: a teacher is needed"),
    ([f"{MODELS}.a.overlap_rollout=false"], f"{MODELS}.a.overlap_rollout: must be left out"),
    (["actor_rollout_ref.teacher.max_retries=1", "actor_rollout_ref.teacher.backend=hf"],
     "actor_rollout_ref.teacher.model.path: must be set, or server_ip, with max_retries, backend of actor_rollout_"),
    ([f"{MODELS}={{a.b: {{server_ip: far}}}}"], f"{MODELS}: must have names of letters, digits, - and _; got 'a.b'"),
    ([f"{MODELS}.a.cache=s", f"{MODELS}.a.model_path=null"], f"{MODELS}.a.cache: needs a teacher (model.path"),
    (["distillation.cross_tokenizer=map"], f"{MODELS}.b.model.path: must be the folder or hub id of the teacher's tok"),
])  # fmt: skip
def test_what_is_wrong_is_refused_by_the_teachers_own_key(overrides, message):
    (found,) = problems(*TWO, *overrides)
    assert found.startswith(message)


@pytest.mark.parametrize(("override", "message"), [
    ("distillation.teacher_prompt_fn=a.py:b", "distillation.teacher_prompt_fn: must be null with "),
    ("distillation.candidates=student", "distillation.candidates: must be teacher with "),
    ("distillation.tail=sampled", "distillation.tail: must not be sampled with distillation.cross_tokenizer"),
    ("distillation.token_weights=confident_wrong", "distillation.token_weights: must not depend on the student's "),
    ("actor_rollout_ref.teacher.cache=s", "actor_rollout_ref.teacher.cache: must be null with "),
    ("actor_rollout_ref.teacher.source=initial", "distillation.cross_tokenizer: must be refuse with "),
])  # fmt: skip
def test_another_tokenizer_needs_a_teacher_of_its_own_without_what_depends_on_tokens(override, message):
    path = [] if "source" in override else ["actor_rollout_ref.teacher.model.path=x"]
    found = problems(*path, "data.teacher_prompt_key=hint" if not path else "data.shuffle=true",
                     "distillation.cross_tokenizer=spans", override)  # fmt: skip
    assert any(each.startswith(message) for each in found), found


def test_local_teachers_share_the_cores_with_the_workers(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(12)))
    local = [f"{MODELS}.{name}.model_path=x" for name in "abc"]
    assert threads_per_process(load_config([*OWN, *local, f"{MODELS}.c.num_replicas=3"])) == 2
