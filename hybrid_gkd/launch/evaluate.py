"""Validation without training, several models into one table.

    python -m hybrid_gkd.evaluate MODEL ... --data FILE [--config-name NAME] [--json] [dotted.key=value ...]

A MODEL is a Hugging Face folder or hub id, a PEFT adapter folder, or a `global_step_N` folder of a run. The models are
validated one after the other, each as a run with `trainer.val_only` in its own run folder; with a teacher, the table
has the divergences from it. The preflight checks of all models run before the first one is loaded.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from hybrid_gkd.config import Config, ModelConfig
from hybrid_gkd.config.loading import examine_config, load_config
from hybrid_gkd.errors import ConfigError, call_all, raise_all
from hybrid_gkd.launch.command_line import default_config_name, load, make_parser, run_command
from hybrid_gkd.launch.stopping import Stopping
from hybrid_gkd.runtime.imports import gc_paused
from hybrid_gkd.student.checkpoint_store import STATE, exports, load_state

DEFAULTS = (
    "trainer.val_only=true", "trainer.experiment_name=evaluation", "trainer.resume_mode=disable", "trainer.logger=[]",
    "data.train_files=[]", "distillation.enabled=false",
)
"""Overrides of the recipe; the command line takes precedence."""
MODEL_PATH = "actor_rollout_ref.model.path"
ADAPTER_CONFIG = "adapter_config.json"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    return run_command(lambda stopping: evaluate(options, stopping), debug=options.debug)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line, with `models` separate from `overrides`; exit on a usage error."""
    parser = make_parser("python -m hybrid_gkd.evaluate", "Validation of several models, without training.")
    parser.add_argument("--data", action="append", help="held-out prompts, as data.val_files; may be repeated")
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of the table")
    parser.usage = "%(prog)s MODEL ... --data FILE [options] [dotted.key=value ...]"
    options = parser.parse_intermixed_args(arguments)
    is_override = re.compile(r"\+*\w+(\.[\w-]+)*=").match
    options.models = list(dict.fromkeys(word for word in options.overrides if not is_override(word)))
    options.overrides = list(filter(is_override, options.overrides))
    given = {override.lstrip("+").partition("=")[0] for override in options.overrides}
    if not options.models or MODEL_PATH in given:
        parser.error(f"name at least one model as an argument (not with {MODEL_PATH})")
    if options.data and "data.val_files" in given:
        parser.error("--data replaces data.val_files; use one of them")
    return options


def evaluate(options: argparse.Namespace, stopping: Stopping) -> int:
    """Validate every model and print the table, after an error with the models before it. Raises HybridGKDError."""
    config = base_config(options)
    configs = unique_run_names(call_all(functools.partial(config_for_model, config, model) for model in options.models))
    with gc_paused():
        from hybrid_gkd.launch import preflight, run

    all_facts = call_all(functools.partial(preflight.check_all, each) for each in configs)
    rows: dict[str, Mapping[str, float]] = {}
    try:
        for model, facts in zip(options.models, all_facts, strict=True):
            if stopping.requested():  # a signal arrived while the previous model was shut down
                break
            rows[model] = run.execute(facts, stopping).last_metrics
    finally:
        if rows:
            print(to_text(rows, as_json=options.json))
    return 0


def base_config(options: argparse.Namespace) -> Config:
    """Return the configuration of all models; with a teacher, distillation is enabled. Raises HybridGKDError."""
    path = model_folder(options.models[0])
    path = model_of_run(Path(path)).path if (Path(path) / STATE).is_file() else path
    own, overrides = options.overrides, [*DEFAULTS, f"{MODEL_PATH}={_as_yaml(path)}"]
    files = [f"data.val_files={_as_yaml(options.data)}"] if options.data else []
    options.overrides = [*overrides, *own, *files]
    name = options.config_name or default_config_name(options.overrides)
    examine = functools.partial(examine_config, config_name=name, config_path=options.config_path)
    config, _ = examine(options.overrides)
    teacher = config and config.actor_rollout_ref.teacher
    if config and teacher and ((teacher.is_set and not teacher.is_stored) or config.distillation.teacher_models):
        options.overrides.insert(len(DEFAULTS), "distillation.enabled=true")
        raise_all(examine(options.overrides)[1])
    return load(options)


def _as_yaml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)  # YAML does not join escapes of two halves


def model_folder(model: str) -> str:
    """Return the Hugging Face folder of a model.

    For a checkpoint with exported weights it is that export, for an adapter folder its base model, else the given path.
    Raises ConfigError if an adapter folder names no base model.
    """
    folder = Path(model).expanduser()
    if (folder / STATE).is_file():
        return str(next((each for each in exports(folder) if not (each / ADAPTER_CONFIG).is_file()), folder))
    if (folder / ADAPTER_CONFIG).is_file():
        try:
            return str(json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(MODEL_PATH, f"its {ADAPTER_CONFIG} names no base model: {error!r}", model) from error
    return str(folder) if folder.exists() else model


def config_for_model(config: Config, model: str) -> Config:
    """Return a copy of the configuration for one model.

    A checkpoint without exported weights is loaded into the model that its run started from, an adapter folder into its
    base model. Raises as `model_of_run`.
    """
    config, path = copy.deepcopy(config), model_folder(model)
    config.actor_rollout_ref.model.path = path
    adapter, section = Path(model).expanduser(), config.actor_rollout_ref.model
    is_adapter = (adapter / ADAPTER_CONFIG).is_file()
    if is_adapter:
        section.lora_adapter_path = str(adapter)
    if is_adapter or section.lora_adapter_path is None:  # new adapters would change nothing
        section.lora_rank, section.lora_alpha, section.target_modules, section.exclude_modules = 0, None, None, None
    if (Path(path) / STATE).is_file():
        config.actor_rollout_ref.model = model_of_run(Path(path))
        config.trainer.resume_mode, config.trainer.resume_from_path = "resume_path", path
    config.trainer.experiment_name += "_" + re.sub(r"[^\w.-]", "_", "_".join(Path(model).parts[-2:]))
    return config


def model_of_run(checkpoint: Path) -> ModelConfig:
    """Return the model section of the run of a checkpoint, which may have been started in another folder.

    Raises ConfigError, CheckpointError: the run's configuration or the checkpoint's state cannot be read.
    """
    section = load_config(config_name="config", config_path=checkpoint.parent).actor_rollout_ref.model
    began = Path(load_state(checkpoint).working_dir)
    for name in ("path", "tokenizer_path", "lora_adapter_path"):
        given = getattr(section, name)
        if given is not None and (began / given).exists():
            setattr(section, name, str(began / given))
    return section


def unique_run_names(configs: list[Config]) -> list[Config]:
    """Give every configuration its own run folder, also if model names end alike."""
    taken: set[str] = set()
    for config in configs:
        name, number = config.trainer.experiment_name, 1
        while config.trainer.experiment_name in taken:
            number += 1
            config.trainer.experiment_name = f"{name}_{number}"
        taken.add(config.trainer.experiment_name)
    return configs


def to_text(rows: Mapping[str, Mapping[str, float]], *, as_json: bool) -> str:
    """Format model -> metrics as a table, or as a JSON list of objects."""
    if as_json:
        return json.dumps([{"model": model, **metrics} for model, metrics in rows.items()], indent=2)
    from hybrid_gkd.reporting.final_table import comparison

    return comparison(rows)
