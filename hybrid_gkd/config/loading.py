"""Load a configuration from YAML files and `dotted.key=value` overrides, and check it.

`load_config` merges the dataclass defaults with YAML and overrides (OmegaConf structured configs, so unknown keys and
wrong types are errors), checks every field's rule and the rules between fields, and returns plain dataclasses.
Every problem is a ConfigError of the form ``<dotted.key>: <rule>; got <value>``. Does not import torch.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import math
import operator
import os
import pickle
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # of OmegaConf, which reads with it
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from hybrid_gkd.compat.verl.readings import OF_VERL
from hybrid_gkd.config.actor_rollout_ref import TeacherConfig
from hybrid_gkd.config.flat import flat, references
from hybrid_gkd.config.metadata import LENGTH_SCHEDULE
from hybrid_gkd.config.rules import field_rules, rules_between_fields
from hybrid_gkd.config.schema import Config
from hybrid_gkd.config.spelling import SpellingReader, is_single, own_keys
from hybrid_gkd.config.suggestions import suggestion
from hybrid_gkd.config.teachers import NAMED, use_only_teacher
from hybrid_gkd.config.texts import TextLoader, is_text, keep_typed, typed
from hybrid_gkd.errors import ConfigError, raise_all
from hybrid_gkd.runtime.imports import load_object

logger = logging.getLogger(__name__)

Tree = dict[Any, Any]
"""Values of a YAML file or of one override, in nested dictionaries."""
SCHEDULE = "data.max_response_length_schedule"
CONFIG_DIR = Path(__file__).resolve().parents[2] / "config"
VERL_RECIPE = CONFIG_DIR / "ppo_trainer.yaml"
"""Recipe of commands in the style of verl."""
RECIPES = {
    "demo", "gkd", "gkd_trainer", "gpu_demo", "on_policy_distill_trainer", "one_gpu", "ppo", "ppo_demo", "ppo_trainer",
    "prompt_distillation", "self_distillation", "weak_teacher",
}  # fmt: skip
"""Recipes of this repository; others in CONFIG_DIR are the user's."""
RESOLVERS = {"demo": "hybrid_gkd.demo.use:demo_path", "by_device": "hybrid_gkd.demo.use:by_device"}
"""Name -> function behind `${name:...}` in YAML, imported on first use."""


def load_config(
    overrides: list[str] | None = None, *, config_name: str | None = None, config_path: str | Path = CONFIG_DIR
) -> Config:
    """Merge defaults, `<config_path>/<config_name>.yaml` (if a name is given) and dotted overrides, and check the
    result.

    A file may begin with `defaults: [other]`: files in the same folder that it extends.

    Raises:
        ConfigError: unknown key, wrong type, missing file, or a broken rule between fields.
        SeveralErrors: several of these.
    """
    config, problems = examine_config(overrides, config_name=config_name, config_path=config_path)
    raise_all(problems)
    assert config is not None
    return config


def examine_config(
    overrides: list[str] | None = None, *, config_name: str | None = None, config_path: str | Path = CONFIG_DIR,
    only_recipes: bool = False,
) -> tuple[Config | None, list[ConfigError]]:  # fmt: skip
    """Return the configuration and all of its errors; fields with errors have their defaults.

    The configuration is None if it cannot be resolved. `only_recipes`: leave out the files that are not in `RECIPES`.
    """
    merged, problems, recipes = pickle.loads(_defaults()), list[ConfigError](), list[tuple[Path, Tree]]()
    try:
        recipes = _read_recipe(Path(config_path), config_name) if config_name is not None else []
    except ConfigError as error:
        problems.append(error)
    whole = not problems  # else keys of the unread file would be reported as missing
    of_verl = any(file.resolve() == VERL_RECIPE for file, _ in recipes)
    if only_recipes:
        shipped = {CONFIG_DIR / f"{name}.yaml" for name in RECIPES}
        recipes = [(file, tree) for file, tree in recipes if file.resolve() in shipped]
    for _, recipe in recipes:
        _merge_source(merged, [("config", recipe)], problems, of_verl)
    given = [(each.partition("=")[0], _parse_override(each)) for each in overrides or []]
    _merge_source(merged, given, problems, of_verl)
    for name in RESOLVERS:
        OmegaConf.register_resolver(name, functools.partial(_resolve, name), replace=True)
    try:
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException:
        try:
            missing = _fill_missing(merged)
            config = OmegaConf.to_object(merged)
        except OmegaConfBaseException as error:  # a reference to a key that there is not
            return None, [*problems, _unresolved(merged, error)]
        wrong = {error.key for error in problems}
        problems += [error for error in missing if error.key not in wrong] if whole else []
    assert isinstance(config, Config)
    problems += _normalise(config)
    if whole:
        problems += broken_rules(config, wrong={error.key for error in problems})
    return config, problems


def _fill_missing(merged: DictConfig) -> list[ConfigError]:
    """Make every missing value an empty text, and return an error for each. Takes as long as all the rest of loading.

    Raises OmegaConfBaseException: a reference leads nowhere.
    """
    missing, unread = sorted(OmegaConf.missing_keys(merged)), {"data.train_files"} if merged.trainer.val_only else set()
    for key in missing:
        OmegaConf.update(merged, key, None if key in unread else "")
    demo = "demo" if merged.distillation.enabled is not False else "ppo_demo"
    rule = f"must be set; --config-name {demo} needs no models and data"
    return [ConfigError(key, rule, show_value=False, missing=True) for key in missing if key not in unread]


def _unresolved(merged: DictConfig, error: OmegaConfBaseException) -> ConfigError:
    """Return the error of a value whose `${...}` cannot be resolved, not of one that is defined as that value."""
    key, values = _full_key(error), flat(OmegaConf.to_container(merged))
    sources, seen = references(values), {key}
    while (source := sources.get(key)) in values and source not in seen:
        key = source
        seen.add(key)
    reason, hint = _reason(error), "${...} refers to another key; for a shell variable remove the single quotes"
    if "Environment variable" in reason:
        hint = "set it, or give a default as in ${oc.env:NAME,default}"
    return ConfigError(key, f"{reason}: {hint}", values.get(key))


def _resolve(resolver: str, *arguments: Any, _root_: Any) -> Any:
    return load_object("config", RESOLVERS[resolver])(*arguments, _root_=_root_)


@functools.cache
def _defaults() -> bytes:
    """Return all defaults, pickled: unpickling takes a quarter of the time of `deepcopy`."""
    return pickle.dumps(OmegaConf.structured(Config))


def to_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML, which `load_config` reads back to the same values."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(dataclasses.asdict(config))))


def _escaped(value: Any) -> Any:
    """Return nested values whose texts OmegaConf reads as they are, although they have `${`."""
    if isinstance(value, dict):
        return {key: _escaped(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(each) for each in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: f"{2 * found[1]}\\${{", value)
    return value


def _read_recipe(folder: Path, name: str, above: tuple[str, ...] = ()) -> list[tuple[Path, Tree]]:
    """Read a YAML file and the files of its `defaults` list, each with its path, base files first."""
    file = _file(folder, name)
    if not file.is_file():
        there = ", ".join(sorted(p.stem for p in folder.glob("*.yaml"))) or "none"
        here = _file(Path(), name)
        hint = f"; --config-path {here.parent} --config-name {here.stem} names {here}" if here.is_file() else ""
        raise ConfigError("--config-name", f"must name a YAML file in {folder} (available: {there}){hint}", name)
    if name in above:
        raise ConfigError("--config-name", f"the defaults lists form a cycle: {' -> '.join([*above, name])}", name)
    try:
        loaded: Any = OmegaConf.to_container(OmegaConf.load(file))
        if isinstance(loaded, dict):
            loaded = keep_typed(loaded, file.read_text(encoding="utf-8"))
    except Exception as error:  # yaml's own error types are not part of OmegaConf's interface
        raise ConfigError("--config-name", f"{file} is not valid YAML: {_reason(error)}", show_value=False) from None
    if not isinstance(loaded, dict):
        raise ConfigError("--config-name", f"{file} must contain a mapping of sections", show_value=False)
    defaults = loaded.pop("defaults", [])
    if not isinstance(defaults, list) or not all(isinstance(base, str) for base in defaults):
        raise ConfigError("--config-name", f"{file}: defaults must be a list of file names", defaults)
    parts = list[tuple[Path, Tree]]()
    for base in defaults if "_self_" in defaults else [*defaults, "_self_"]:
        where = folder if _file(folder, base).is_file() else CONFIG_DIR
        parts += [(file, loaded)] if base == "_self_" else _read_recipe(where, base, (*above, name))
    return parts


def _file(folder: Path, name: str) -> Path:
    return folder / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")


def _parse_override(override: str) -> Tree | ConfigError:
    key, equals, value = override.partition("=")
    if key.startswith("~"):
        rule = "keys cannot be deleted, since every key has a value; set it, to null if it is optional"
        return ConfigError(key, rule, show_value=False)
    own = key.lstrip("+")
    if not equals or not re.fullmatch(r"\w+(\.[\w-]+)*", own):
        return ConfigError(override, "overrides have the form dotted.key=value", show_value=False)
    if not _is_utf8(value):
        return ConfigError(key, "must be UTF-8 text, and the locale one of UTF-8 (LC_ALL, LANG)", value)
    try:
        parsed: Any = _nested(own.split("."), typed(value, own)) if is_text(own) else (
            OmegaConf.to_container(OmegaConf.from_dotlist([override.lstrip("+")]))
        )
        if not value.lstrip().startswith(("{", "[")):
            return parsed
        texts = parsed if is_text(own) else yaml.load(value, TextLoader)  # YAML reads {1:4} as {64: null}
        if any(each is None and ":" in str(path[-1]) for path, each in _leaves(texts)):
            return ConfigError(key, "must have a space after each colon, as in {name: value}", value)
        section = functools.reduce(operator.getitem, own.split("."), parsed)
        return parsed if is_text(own) else _nested(own.split("."), keep_typed(section, value, own))
    except Exception as error:  # the value is parsed as YAML, which has its own error types
        return ConfigError(key, f"the value is not valid YAML: {_reason(error)}", value)


def _is_utf8(text: str) -> bool:
    """Return whether no byte of an argument was left undecoded, for which Python has a surrogate."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _merge_source(
    base: DictConfig, parts: list[tuple[str, Tree | ConfigError]], problems: list[ConfigError], of_verl: bool
) -> None:
    """Merge the values of a command line or a file into `base`, after translating verl's spellings.

    `of_verl`: interpret numbers that verl counts differently as verl does.
    """
    split = [[] if isinstance(part, ConfigError) else list(_leaves(part)) for _, part in parts]
    given = [(".".join(map(str, path)), value) for leaves in split for path, value in leaves]

    def below(key: str) -> Any:
        return of_verl if key == OF_VERL else OmegaConf.select(base, key, default=None)

    reader = SpellingReader(given, below)
    for (name, part), leaves in zip(parts, split, strict=True):
        if isinstance(part, ConfigError):
            problems.append(part)
            continue
        if isinstance(part.get("data"), dict) and isinstance(part["data"].get("train_files"), dict | list):
            base.data.train_files = None  # else files with weights would be added to those of `base`
        pieces, as_given = list[Tree](), True
        for path, value in leaves:
            key = ".".join(map(str, path))
            try:
                read = reader.read(key, value)
            except ConfigError as error:
                problems.append(error)
                read = {}
            as_given = as_given and read == {key: value}
            pieces += [_nested(own.split("."), new) for own, new in read.items()]
        for piece in [part] if as_given else pieces:
            _merge(base, piece, problems, name)
    for line in reader.summary():
        logger.info("%s", line)


def _merge(base: DictConfig, extra: Tree, problems: list[ConfigError], key: str = "config") -> None:
    """Merge the valid values of `extra` into `base`; `key` is used in messages of errors that have no key."""
    leaves = list(_leaves(extra))
    own, value = ".".join(map(str, leaves[0][0])), leaves[0][1]
    plain = len(leaves) == 1 and isinstance(value, str | int | float) and value != MISSING
    try:
        if plain and is_single(own):
            OmegaConf.update(base, own, value)  # a merge would walk over all of `base`
        else:
            OmegaConf.unsafe_merge(base, extra)
        return
    except ConfigKeyError as error:
        unknown = _full_key(error)
        close = re.search(r"Did you mean: '(\w+)'", str(error))
        hint = suggestion(own, ".".join([*unknown.split(".")[:-1], close[1]]) if close else None)
        problem = ConfigError(own if hint else unknown, f"there is no such key{hint}", show_value=False)
    except (OmegaConfBaseException, TypeError) as error:  # TypeError: for example a list in place of a section
        problem = ConfigError(_full_key(error, key), _reason(error), show_value=False)
        if any(each.startswith(f"{own}.") for each in own_keys()):
            rule = LENGTH_SCHEDULE["rule"] if own == SCHEDULE else "is a section: set keys below it"
            problem = ConfigError(own, rule, value)
    if len(leaves) > 1:
        for path, value in leaves:
            _merge(base, _nested(path, value), problems, key)
    elif str(problem) not in map(str, problems):  # an unknown section has several leaves
        problems.append(problem)


def _leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield each value of nested dictionaries with its keys."""
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from _leaves(value, (*path, name))
    else:
        yield path, tree


def _nested(path: Sequence[Any], value: Any) -> Tree:
    return functools.reduce(lambda inner, name: {name: inner}, reversed(path), value)


def _full_key(error: Exception, default: str = "config") -> str:
    return str(getattr(error, "full_key", None) or getattr(error, "key", None) or default)


def _reason(error: Exception) -> str:
    """Return the reason of an error in one line."""
    if not isinstance(error, OmegaConfBaseException):
        return " ".join(str(error).replace('in "<unicode string>", ', "at ").split())  # PyYAML's name of an override
    reason = str(error.msg or error).splitlines()[0]
    if "is not a ListConfig" in reason or "is not a TupleConfig" in reason:
        return "must be a list: comma-separated items in brackets"
    return reason


def _normalise(config: Config) -> list[ConfigError]:
    """Expand home folders, make lists of files, and replace nulls by numbers. Returns the errors in lists of files."""
    problems = list[ConfigError]()
    for name in [name for name in config.distillation.teacher_models if not re.fullmatch(r"[\w-]+", name)]:
        problems.append(ConfigError(NAMED, "must have names of letters, digits, - and _", name))
        del config.distillation.teacher_models[name]
    use_only_teacher(config)
    model, teachers = config.actor_rollout_ref.model, [config.actor_rollout_ref.teacher]
    teachers += config.distillation.teacher_models.values()
    ref = config.actor_rollout_ref.ref.model
    paths = ((model, "path"), (model, "tokenizer_path"), (model, "lora_adapter_path"), (ref, "path"))
    others = ((config.critic.model, "path"), (config.reward_model.model, "path"), (config.trainer, "resume_from_path"))
    of_teachers = [pair for teacher in teachers for pair in (
        (teacher.model, "path"), (teacher.model, "lora_adapter_path"), (teacher, "keys"),
    )]  # fmt: skip
    for section, name in (*paths, *others, *of_teachers):
        value = getattr(section, name)
        if isinstance(value, str):  # the shell does not expand a ~ after =
            setattr(section, name, os.path.expanduser(value))
    for teacher in teachers:
        if teacher.num_microbatches is None:
            teacher.num_microbatches = TeacherConfig.num_microbatches
    if isinstance(config.data.train_files, dict):
        weights, config.data.train_files = config.data.train_files, list(config.data.train_files)
        try:
            fractions = [float(weight) for weight in weights.values()]
        except (TypeError, ValueError):
            fractions = [math.nan]
        if config.data.train_weights is not None:
            rule = "must be null if data.train_files has the weights"
            problems.append(ConfigError("data.train_weights", rule, config.data.train_weights))
        if all(0 < fraction <= 1 for fraction in fractions):
            config.data.train_weights = fractions
        else:
            rule = "must map each file to its weight, above 0 and at most 1"
            problems.append(ConfigError("data.train_files", rule, weights))
    for name in ("train_files", "val_files"):
        value = getattr(config.data, name)
        files = [value] if isinstance(value, str) and value else (value or [])
        if not isinstance(files, list) or not all(isinstance(file, str) and file for file in files):
            problems.append(ConfigError(f"data.{name}", "must be a file or a list of files", value))
            files = []
        setattr(config.data, name, files)
    return problems


def broken_rules(config: Config, wrong: set[str]) -> list[ConfigError]:
    """Return the errors of rules of fields and between fields.

    `wrong`: keys with values that were rejected before. They, and values that break their own rule, are replaced by
    their defaults, and rules between fields that mention them are skipped.
    """
    problems, wrong = [], set(wrong)
    for key, holds, rule in field_rules(config):
        if not holds and key not in wrong:
            problems.append(ConfigError(key, rule, _value(config, key)))
            wrong.add(key)
    sound = copy.deepcopy(config)
    for key in wrong & {error.key for error in problems}:
        path, _, name = key.rpartition(".")
        section = _value(sound, path)
        setattr(section, name, getattr(type(section)(), name))
    about_wrong = re.compile("|".join(rf"\b{re.escape(key.rpartition('.')[2])}\b" for key in wrong) or r"(?!)")
    for key, holds, rule in rules_between_fields(sound):
        if not holds and key not in wrong and not about_wrong.search(rule):
            value = _value(config, key)
            problems.append(ConfigError(key, rule, value, missing=value in (None, "", [], {})))
    return problems


def _value(config: Config, key: str) -> Any:
    """Return the value of a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value
