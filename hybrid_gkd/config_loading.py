"""From YAML files and `dotted.key=value` overrides to a checked configuration.

`load_config` merges the dataclass defaults with YAML and overrides (OmegaConf structured configs, so unknown keys and
wrong types are errors), checks every field's rule and the rules between fields, and returns plain dataclasses.
 Every problem is a ConfigError of the form ``<dotted.key>: <rule>; got <value>``. Needs no torch.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import os
import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from hybrid_gkd.config import Config
from hybrid_gkd.config_rules import field_rules, rules_between_fields
from hybrid_gkd.demo.use import demo_path
from hybrid_gkd.errors import ConfigError

CONFIG_DIR = Path(__file__).resolve().parent.parent / "config"


def load_config(
    overrides: list[str] | None = None, *, config_name: str | None = None, config_path: str | Path = CONFIG_DIR
) -> Config:
    """Merge defaults, `<config_path>/<config_name>.yaml` (if a name is given) and dotted overrides; check.

    A file may begin with `defaults: [other]`: the files that it builds on, in its folder.

    Raises:
        ConfigError: unknown key, wrong type, missing file, or a rule between fields is broken.
    """
    merged = copy.deepcopy(_defaults())
    if config_name is not None:
        for recipe in _read_recipe(Path(config_path), config_name):
            merged = _merge(merged, recipe)
    for override in overrides or []:
        merged = _merge(merged, _parse_override(override), key=override.partition("=")[0])
    OmegaConf.register_resolver("demo", demo_path, replace=True)
    try:
        config = OmegaConf.to_object(merged)
    except MissingMandatoryValue as error:
        raise ConfigError(_full_key(error), "must be given", show_value=False) from None
    except OmegaConfBaseException as error:
        raise ConfigError(_full_key(error), _reason(error), show_value=False) from None
    assert isinstance(config, Config)
    _normalise(config)
    check_config(config)
    return config


@functools.cache
def _defaults() -> Any:
    return OmegaConf.structured(Config)


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML; `load_config` reads it back to the same values."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def to_dict(config: Config) -> dict[str, Any]:
    """The resolved configuration as nested dictionaries of plain values."""
    return dataclasses.asdict(config)


def _read_recipe(folder: Path, name: str, above: tuple[str, ...] = ()) -> list[DictConfig]:
    """A YAML file behind those of its `defaults` list."""
    file = folder / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    if not file.is_file():
        there = ", ".join(sorted(p.stem for p in folder.glob("*.yaml"))) or "none"
        raise ConfigError("--config-name", f"must name a YAML file in {folder} (there: {there})", name)
    if name in above:
        raise ConfigError("--config-name", f"the defaults lists go in a circle: {' -> '.join([*above, name])}", name)
    try:
        loaded = OmegaConf.load(file)
    except Exception as error:  # yaml's own error types are not part of OmegaConf's interface
        raise ConfigError("--config-name", f"{file} is not valid YAML: {error}", show_value=False) from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError("--config-name", f"{file} must hold a mapping of sections", show_value=False)
    defaults = loaded.pop("defaults", [])
    return [*(part for base in defaults for part in _read_recipe(folder, base, (*above, name))), loaded]


def _parse_override(override: str) -> DictConfig:
    key, equals, _ = override.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key.lstrip("+")):
        raise ConfigError(override, "overrides have the form dotted.key=value", show_value=False)
    try:
        return OmegaConf.from_dotlist([override.lstrip("+")])
    except Exception as error:  # the value is parsed as YAML, which has its own error types
        raise ConfigError(key, f"the value is not valid YAML: {error}", override) from None


def _merge(base: Any, extra: DictConfig, key: str = "") -> Any:
    try:
        return OmegaConf.unsafe_merge(base, extra)  # changes `base`, which merge would copy each time
    except ConfigKeyError as error:
        unknown = _full_key(error)
        close = re.search(r"Did you mean: '(\w+)'", str(error))
        hint = f" (did you mean {'.'.join([*unknown.split('.')[:-1], close[1]])}?)" if close else ""
        raise ConfigError(unknown, f"there is no such key{hint}", show_value=False) from None
    except OmegaConfBaseException as error:
        raise ConfigError(_full_key(error, key or "config"), _reason(error), show_value=False) from None
    except TypeError as error:  # a part of a list, for example
        raise ConfigError(key or "config", str(error), show_value=False) from None


def _full_key(error: OmegaConfBaseException, default: str = "config") -> str:
    return str(error.full_key or error.key or default)


def _reason(error: OmegaConfBaseException) -> str:
    reason = str(error.msg or error).splitlines()[0]
    if "is not a ListConfig" in reason:
        return "must be a list: items in brackets, with commas between them"
    return reason


def _normalise(config: Config) -> None:
    model, teacher = config.actor_rollout_ref.model, config.actor_rollout_ref.teacher
    for section, name in ((model, "path"), (model, "tokenizer_path"), (teacher.model, "path"), (teacher, "keys")):
        value = getattr(section, name)
        if isinstance(value, str):  # the shell leaves the ~ behind a = alone
            setattr(section, name, os.path.expanduser(value))
    for name in ("train_files", "val_files"):
        value = getattr(config.data, name)
        files = [value] if isinstance(value, str) else (value or [])
        if not isinstance(files, list) or not all(isinstance(file, str) and file for file in files):
            raise ConfigError(f"data.{name}", "must be a file or a list of files", value)
        setattr(config.data, name, files)


def check_config(config: Config) -> None:
    """Check each field's rule, then the rules between fields. Raises ConfigError for the first that is broken."""
    for rules in (field_rules, rules_between_fields):
        for key, holds, rule in rules(config):
            if not holds:
                raise ConfigError(key, rule, operator.attrgetter(key)(config))
